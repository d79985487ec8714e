"""How a model is trained: the options of training, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headprune.config.option import check_number, check_numbers
from headprune.config.training import LoraOptions, TrainingOptions
from headprune.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoraOptions, TrainingOptions):
    """How a pruned model is trained: from what, how long, how fast, and what of it is kept."""

    def __post_init__(self) -> None:
        for name in ("distill", "hidden"):
            if isinstance(getattr(self, name), int):
                object.__setattr__(self, name, float(getattr(self, name)))  # True is a weight of 1
        check_number("seed", self.seed, whole=True, least=0, below=2**32, error=TrainingError)
        for name in ("epochs", "learning_rate", "temperature"):
            check_number(name, getattr(self, name), above=0, error=TrainingError)
        for name in ("weight_decay", "distill", "hidden"):
            check_number(name, getattr(self, name), least=0, error=TrainingError)
        for name in ("warmup", "validation"):
            check_number(name, getattr(self, name), least=0, below=1, error=TrainingError)
        check_numbers(self, TrainingError)

    @property
    def total_evaluations(self) -> int:
        return max(1, math.ceil(self.evaluations * self.epochs))

    @property
    def chooses(self) -> bool:
        """Whether there is more than one evaluation, and something to hold out for it."""
        return self.total_evaluations > 1 and self.validation > 0

    def settings(self) -> dict[str, Any]:
        """Its values in the order of declaration, as JSON can hold them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def train_config(options: Mapping[str, Any], config: TrainConfig | None = None) -> TrainConfig:
    """A config from keywords; a name that is none of its fields is refused."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in options:
        if name not in names:
            raise TrainingError(f"Training has no option {name!r}; there are: {', '.join(sorted(names))}.")
    return dataclasses.replace(config or TrainConfig(), **options)
