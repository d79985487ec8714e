"""Settings of learned gates: the constants of the papers, and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.config.option import check_numbers
from headprune.config.training import GateBudgetOptions, GateOptions
from headprune.errors import GateError, ScheduleError

# As in search/config.py: the command line imports this before it parses its arguments.
if TYPE_CHECKING:
    from headprune.search.budget import Budget
    from headprune.training.hard_concrete import HardConcrete
    from headprune.units import Kind

# The constants of the papers: Shim 2021, whose configuration warms the L0 weight up in the first of ten epochs, and
# Voita 2019.
SETTINGS: dict[str, dict[str, Any]] = {
    "shim": {"straight_through": True, "start": 2.0, "rescale": True, "warmup": 0.1},
    "voita": {"straight_through": False, "start": 0.0, "rescale": False, "warmup": 0.0},
}
TARGETS = ("keep", "keep_parameters", "keep_flops")


@dataclass(frozen=True, kw_only=True)
class GateConfig(GateOptions, GateBudgetOptions):
    """How gates learn. The defaults are those of Shim 2021 (arXiv 2110.03252); `setting="voita"` takes those of Voita
    2019 (arXiv 1905.09418) for all that is not set."""

    def __post_init__(self) -> None:
        from headprune.search.stop import Stop

        if self.setting not in SETTINGS:
            raise GateError(f"There is no setting {self.setting!r} of gates; choose one of {', '.join(SETTINGS)}.")
        for name, value in SETTINGS[self.setting].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_numbers(self, GateError)
        object.__setattr__(self, "keep", Stop(self.keep).keep)
        targets = [name for name in TARGETS if getattr(self, name) is not None]
        if len(targets) + (self.l0 is not None) != 1:
            named = " and ".join([*targets, *(["l0"] if self.l0 is not None else [])]) or "none"
            raise ScheduleError(
                f"Gates need one of l0, {', '.join(TARGETS)}, and {named} was given; l0=0.02 is a weight, keep=0.5 a "
                "target."
            )
        if self.l0 is not None and not self.l0 >= 0:
            raise GateError(f"The weight l0 must not be negative, but it is {self.l0}.")
        if not 0 <= self.warmup <= 1:
            raise GateError(f"warmup is a share of the training between 0 and 1, not {self.warmup}.")
        if not self.rate > 0:
            raise GateError(f"rate must be above 0, but it is {self.rate}.")
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
                "keep counts units of one kind, and heads and neurons have gates; set a budget with "
                "keep_parameters or keep_flops."
            )
        return None

    @property
    def distribution(self) -> HardConcrete:
        from headprune.training.hard_concrete import HardConcrete

        return HardConcrete(self.beta, self.gamma, self.zeta)


def reaching_rate(steps: float, learning_rate: float, start: float = 2.0) -> float:
    """The multiple of a learning rate, which decays to 0, with which a gate can change from open to closed within these
    steps; at least that of the paper, whose trainings are long."""
    return max(10.0, 4 * max(abs(start), 1.0) / (steps * learning_rate))
