"""Pruned models where models are served: one file or folder per runtime."""
