"""From files or data sets to batches that a model takes."""

from typing import TYPE_CHECKING

from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.data.batches import Examples
    from headprune.data.columns import Columns
    from headprune.data.sources import load_examples
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Columns": "headprune.data.columns",
            "Examples": "headprune.data.batches",
            "load_examples": "headprune.data.sources",
        },
    )

__all__ = ["Columns", "Examples", "load_examples"]
