"""Training with transformers' Trainer: recovery of a pruned model by labels or distillation, and learned gates."""

from typing import TYPE_CHECKING

from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.training.config import TrainConfig
    from headprune.training.fit import FitResult, fit
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "FitResult": "headprune.training.fit",
            "TrainConfig": "headprune.training.config",
            "fit": "headprune.training.fit",
        },
    )

__all__ = ["FitResult", "TrainConfig", "fit"]
