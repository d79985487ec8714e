"""How a model is trained: the options of training, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headprune.config.training import LoraOptions, TrainingOptions
from headprune.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoraOptions, TrainingOptions):
    """How a pruned model is trained: from what, how long, how fast, and what of it is kept."""

    def __post_init__(self) -> None:
        for name in ("distill", "hidden"):
            object.__setattr__(self, name, float(getattr(self, name)))  # True is a weight of 1
        for name, least in (("batch_size", 1), ("gradient_accumulation", 1), ("evaluations", 1), ("lora", 0)):
            _check(name, getattr(self, name), whole=True, least=least)
        _check("seed", self.seed, whole=True, least=0, below=2**32)
        for name in ("patience", "save_steps"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), whole=True, least=1)
        for name in ("epochs", "learning_rate", "temperature"):
            _check(name, getattr(self, name), above=0)
        for name in ("weight_decay", "distill", "hidden"):
            _check(name, getattr(self, name), least=0)
        for name in ("warmup", "validation"):
            _check(name, getattr(self, name), least=0, below=1)

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


def _check(
    name: str,
    value: Any,
    *,
    whole: bool = False,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a value outside its range with a sentence that says what it may be."""
    limits = (
        *([] if least is None else [f"at least {least:g}"]),
        *([] if above is None else [f"above {above:g}"]),
        *([] if below is None else [f"below {below:g}"]),
    )
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    fits = (
        number
        and math.isfinite(value)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not fits:
        kind = "a whole number" if whole else "a number"
        raise TrainingError(f"{name} must be {kind} {' and '.join(limits)}, not {value!r}.")
