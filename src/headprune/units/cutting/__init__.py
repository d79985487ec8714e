"""How weights get smaller: what is kept of which tensor, what forward code needs, and the way back."""
