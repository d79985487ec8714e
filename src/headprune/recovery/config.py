"""One declaration of everything that decides how a model is trained; options of the command line are made from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headprune.errors import TrainingError
from headprune.search.config import option


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a pruned model is trained: from what, how long, how fast, and what of it is kept."""

    epochs: float = option(1.0, "Passes over the training data.")
    learning_rate: float = option(5e-5, "Highest learning rate; LoRA takes about ten times as much as full training.")
    batch_size: int = option(32, "Samples per batch, of all processes together.", minimum=1)
    gradient_accumulation: int = option(1, "Batches per step; their gradients are those of one large batch.", minimum=1)
    warmup: float = option(0.1, "Share of the steps in which the learning rate rises; after them it falls to zero.")
    weight_decay: float = option(0.0, "Weight decay of AdamW.")
    distill: float = option(1.0, "Weight of the dense model's predictions in the loss; 0 leaves them out.")
    temperature: float = option(2.0, "Temperature that both models' predictions are compared at.")
    hidden: float = option(10.0, "Weight of the dense model's hidden states, where widths match; 0 leaves them out.")
    dropout: bool = option(
        False, "Draw what the model was trained to draw: dropout, dropped layers. A small model learns better without."
    )
    lora: int = option(0, "Rank of LoRA; 0 trains all weights.", minimum=0)
    evaluations: int = option(1, "Evaluations per epoch on held-out training data; the best model is kept.", minimum=1)
    validation: float = option(
        0.1, "Share of the training data that is held out for that, where there is more than one evaluation."
    )
    patience: int | None = option(None, "Stop after this many evaluations without a better one.", word=int, minimum=1)
    save_steps: int | None = option(
        None, "Steps between checkpoints, beside those after every evaluation and epoch.", word=int, minimum=1
    )
    seed: int = option(0, "Seed of shuffling, dropout and LoRA's start.")
    report_to: str | None = option(
        None, "Where else losses are logged, by the names that transformers has: tensorboard, wandb."
    )

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
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in options:
        if name not in known:
            raise TrainingError(f"Training has no option {name!r}; there are: {', '.join(sorted(known))}.")
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
