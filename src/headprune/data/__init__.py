"""From files or data sets to batches that a model takes."""

from headprune.data.batches import Examples
from headprune.data.columns import Columns
from headprune.data.sources import load_examples

__all__ = ["Columns", "Examples", "load_examples"]
