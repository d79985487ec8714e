"""What a model predicts: its inputs, its targets, its loss per sample, its predictions, its metric."""
