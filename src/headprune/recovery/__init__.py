"""Training a pruned model so that it gets back what it lost: from labels, from the dense model, or from both."""

from typing import TYPE_CHECKING

from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.recovery.config import TrainConfig
    from headprune.recovery.trainer import Fitted, fit
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Fitted": "headprune.recovery.trainer",
            "TrainConfig": "headprune.recovery.config",
            "fit": "headprune.recovery.trainer",
        },
    )

__all__ = ["Fitted", "TrainConfig", "fit"]
