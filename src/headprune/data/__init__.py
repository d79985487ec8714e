"""From files or data sets to batches that a model takes."""

from headprune.data.batches import Examples
from headprune.data.sources import Columns, load_examples

__all__ = ["Columns", "Examples", "load_examples"]
