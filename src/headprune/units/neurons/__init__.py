"""Feed-forward layers as sites: where their neurons are, by table or by experiment."""
