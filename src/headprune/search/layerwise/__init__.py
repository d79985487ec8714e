"""Layer-wise pruning, front to back: each layer is loaded alone, pruned and repaired on hidden states of the pruned
model, and unloaded before the next."""
