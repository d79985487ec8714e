"""Reads files and data sets into the batches that a task takes."""

from typing import TYPE_CHECKING

from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.data.batching import Examples
    from headprune.data.columns import Columns
    from headprune.data.examples import load_examples
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Columns": "headprune.data.columns",
            "Examples": "headprune.data.batching",
            "load_examples": "headprune.data.examples",
        },
    )

__all__ = ["Columns", "Examples", "load_examples"]
