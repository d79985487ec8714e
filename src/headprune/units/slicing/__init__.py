"""Slices weights: which indices of which tensor are kept, what forward code needs then, and how to undo it."""
