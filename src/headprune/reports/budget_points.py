"""The points of a budget: the target of each, the measured share, and the folder of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.config.groups import BUDGETS
from headprune.errors import RunError

MEASURE_TEXT = {
    "parameters": "of the parameters",
    "flops": "of the FLOPs",
    "memory": "of the memory",
    "latency": "as fast",
}
SHARE_NAMES = {
    "keep_parameters": "parameters",
    "keep_memory": "parameters",
    "keep_flops": "flops",
    "speedup": "latency",
}


@dataclass(frozen=True)
class Point:
    """A model at a point of the budget of a run; with one point, the result."""

    option: str  # the option of the budget
    target: float  # a share of the dense model, or how many times as fast
    step: int
    folder: str  # inside the run
    metric: float | None
    interval: Sequence[float | None] | None
    units: Mapping[str, int]  # left, by kind
    shares: Mapping[str, float]  # left of the parameters, FLOPs and time, as far as they were measured

    @property
    def short(self) -> str:
        """For a label in a figure: "2x", "60%"."""
        return f"{self.target:.4g}x" if self.option == "speedup" else f"{100 * self.target:.4g}%"

    @property
    def text(self) -> str:
        """ "2x as fast", "60% of the FLOPs"."""
        return f"{self.short} {MEASURE_TEXT[BUDGETS[self.option]]}"

    @property
    def target_and_result(self) -> str:
        """The target, and the measured share of the model; empty where that was not measured."""
        share = self.shares.get(SHARE_NAMES[self.option])
        if not share:
            return ""
        if self.option == "speedup":
            return f"target {self.target:.1f}x, measured {1 / share:.2f}x" if share else ""
        return f"target {self.text}, measured {100 * share:.1f}%"


def budget_of(settings: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """The option of the budget, and its points; None for a run without one."""
    return next(((name, list(settings[name])) for name in BUDGETS if settings.get(name)), None)


def points_of(record: Mapping[str, Any]) -> list[Point]:
    """All points that a run has reached, in the order of its steps; none for a run without a budget or a result."""
    budget, result = budget_of(record["settings"]), record.get("result")
    if budget is None or not result:
        return []
    option, targets = budget
    records = record.get("points") or []
    if not records:  # a single one
        shares = (record.get("savings") or {}).get("shares", {})
        units = {kind: left for kind, (_, left) in result["units"].items()}
        interval = result.get("pruned_interval")
        return [Point(option, targets[-1], result["step"], "model", result["pruned"], interval, units, shares)]
    return [
        Point(
            option,
            _target_in(point["label"]),
            point["step"],
            point["model"],
            point["metric"],
            point["interval"],
            point["units"],
            point["shares"],
        )
        for point in records
    ]


def _target_in(label: str) -> float:
    """The number in a label such as speedup-1.5."""
    try:
        return float(label.partition("-")[2])
    except ValueError:
        raise RunError(f"The point {label!r:.60} of a run names no number; run it again with --overwrite.") from None
