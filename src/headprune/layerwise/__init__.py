"""Running a model layer after layer: where every batch has got to, in memory or on disk."""
