"""Saves and loads pruned models, as checkpoints of headprune, of plain transformers, or with portable code."""
