"""What decides how gates learn: the constants of the papers, and how many units may be left."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.errors import GateError, ScheduleError
from headprune.search.config import option, parse_keep

# As in search/config.py: the command line reads this before it knows what it is asked for.
if TYPE_CHECKING:
    from headprune.gates.hard_concrete import HardConcrete
    from headprune.search.budget import Budget
    from headprune.units import Kind

# What the papers do differently: Shim 2021, and Voita 2019.
SETTINGS: dict[str, dict[str, Any]] = {
    "shim": {"straight_through": True, "start": 2.0, "rescale": True, "warmup": 0.5},
    "voita": {"straight_through": False, "start": 0.0, "rescale": False, "warmup": 0.0},
}
TARGETS = ("keep", "keep_parameters", "keep_flops")


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """How gates learn. The defaults are those of Shim 2021 (arXiv 2110.03252); `setting="voita"` takes those of Voita
    2019 (arXiv 1905.09418) for whatever is not said otherwise."""

    l0: float | None = option(None, "Weight of the L0 loss; how much is left is then learnt freely.", word=float)
    keep: float | int | None = option(
        None, "Share (0.5) or number (36) of heads that are left in the end.", parse=parse_keep
    )
    keep_parameters: float | None = option(None, "Share of the model's parameters that is left.", word=float)
    keep_flops: float | None = option(None, "Share of the FLOPs of a forward pass that is left.", word=float)
    units: str | None = option(
        None, "'heads', 'neurons' or 'heads,neurons'; heads by default, both for parameters and FLOPs."
    )
    group: int = option(32, "Neighbouring neurons that share a gate.", minimum=1)
    setting: str = option("shim", "The paper whose values are the defaults: shim or voita.")
    beta: float = option(1 / 3, "Temperature of a gate.")
    gamma: float = option(-0.1, "Lower end that a gate is stretched to.")
    zeta: float = option(1.1, "Upper end that a gate is stretched to.")
    start: float = option(None, "log alpha at the start: 2, which is open; under voita 0.", word=float)
    straight_through: bool = option(
        None,
        "Gates are 0 or 1 in the forward pass, with the gradient of those between: yes; under voita no.",
        word=bool,
    )
    rescale: bool = option(
        None, "Outputs are multiplied by members / open members of their layer: yes; under voita no.", word=bool
    )
    warmup: float = option(
        None,
        "Share of the training in which the L0 weight grows from 0, or a target falls from all: 0.5; under voita 0.",
        word=float,
    )
    rate: float = option(10.0, "Learning rate of gates, as a multiple of the model's.")
    difference: float = option(
        0.0, "Weight of the squared change of a layer's output without each unit, so that those of little change close."
    )

    def __post_init__(self) -> None:
        from headprune.search.stop import Stop

        if self.setting not in SETTINGS:
            raise GateError(f"There is no setting {self.setting!r} of gates; choose one of {', '.join(SETTINGS)}.")
        for name, value in SETTINGS[self.setting].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise GateError(f"{field.name} must be a finite number, not {value}.")
        object.__setattr__(self, "keep", Stop(self.keep).keep)
        asked = [name for name in TARGETS if getattr(self, name) is not None]
        if len(asked) + (self.l0 is not None) != 1:
            given = " and ".join([*asked, *(["l0"] if self.l0 is not None else [])]) or "none"
            raise ScheduleError(
                f"Gates need one of l0, {', '.join(TARGETS)}, and {given} was given; l0=0.02 is a weight, keep=0.5 a "
                "target."
            )
        if self.l0 is not None and not self.l0 >= 0:
            raise GateError(f"The weight l0 must not be negative, but it is {self.l0}.")
        if not 0 <= self.warmup <= 1:
            raise GateError(f"warmup is a share of the training between 0 and 1, not {self.warmup}.")
        for name in ("rate", "group"):
            if not getattr(self, name) > 0:
                raise GateError(f"{name} must be above 0, but it is {getattr(self, name)}.")
        if not self.difference >= 0:
            raise GateError(f"The weight difference must not be negative, but it is {self.difference}.")
        _ = self.kinds, self.budget, self.distribution

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of units that have gates."""
        from headprune.criteria.kinds import as_kinds

        if self.units is not None:
            return as_kinds(self.units)
        both = self.keep_parameters is not None or self.keep_flops is not None
        return ("heads", "neurons") if both else ("heads",)

    @property
    def budget(self) -> Budget | None:
        """The target in parameters or FLOPs, if it is one of these."""
        from headprune.search.budget import Budget, points

        for name in ("keep_parameters", "keep_flops"):
            if getattr(self, name) is not None:
                return Budget(name.removeprefix("keep_"), points(getattr(self, name), name))  # type: ignore[arg-type]
        if self.keep is not None and len(self.kinds) > 1:
            raise ScheduleError(
                "keep counts units of one kind, and heads and neurons have gates; say how much may be left with "
                "keep_parameters or keep_flops."
            )
        return None

    @property
    def distribution(self) -> HardConcrete:
        from headprune.gates.hard_concrete import HardConcrete

        return HardConcrete(self.beta, self.gamma, self.zeta)


def reaching_rate(steps: float, learning_rate: float, start: float = 2.0) -> float:
    """The multiple of a learning rate with which a gate can get from open to closed in a training of so many steps, as
    it falls to 0 on the way; at least the paper's, whose trainings are long."""
    return max(10.0, 4 * max(abs(start), 1.0) / (steps * learning_rate))
