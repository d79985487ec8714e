"""Runs a model layer after layer, with hidden states in memory or on disk, after checking that its class allows it."""
