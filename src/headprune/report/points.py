"""The points of a budget as people read them: what was asked for, what came out, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.search.config import BUDGETS

WORDS = {"parameters": "of the parameters", "flops": "of the FLOPs", "memory": "of the memory", "latency": "as fast"}
MEASURED = {"keep_parameters": "parameters", "keep_memory": "parameters", "keep_flops": "flops", "speedup": "latency"}


@dataclass(frozen=True)
class Point:
    """A model that a run with a budget leaves: with several points one each, else the result."""

    option: str  # the setting that asked for it
    asked: float  # a share of the dense model, or how many times as fast
    step: int
    folder: str  # inside the run
    metric: float | None
    interval: Sequence[float | None] | None
    units: Mapping[str, int]  # left, by kind
    shares: Mapping[str, float]  # left of the parameters, FLOPs and time, as far as they were measured

    @property
    def short(self) -> str:
        """For a label in a figure: "2x", "60%"."""
        return f"{self.asked:.4g}x" if self.option == "speedup" else f"{100 * self.asked:.4g}%"

    @property
    def text(self) -> str:
        """ "2x as fast", "60% of the FLOPs"."""
        return f"{self.short} {WORDS[BUDGETS[self.option]]}"

    @property
    def came_out(self) -> str:
        """What was asked for, beside what the model has in that measure; empty where that was not measured."""
        share = self.shares.get(MEASURED[self.option])
        if not share:
            return ""
        if self.option == "speedup":
            return f"asked for {self.asked:.1f}x, measured {1 / share:.2f}x" if share else ""
        return f"asked for {self.text}, left with {100 * share:.1f}%"


def budget_of(settings: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """The option that asks for a budget, and its points; None for a run without one."""
    return next(((name, list(settings[name])) for name in BUDGETS if settings.get(name)), None)


def points_of(record: Mapping[str, Any]) -> list[Point]:
    """All points that a run has reached, in the order of its steps; none of a run without a budget, or without a
    result."""
    budget, result = budget_of(record["settings"]), record.get("result")
    if budget is None or not result:
        return []
    option, asked = budget
    listed = record.get("points") or []
    if not listed:  # a single one
        shares = (record.get("savings") or {}).get("shares", {})
        units = {kind: left for kind, (_, left) in result["units"].items()}
        between = result.get("pruned_interval")
        return [Point(option, asked[-1], result["step"], "model", result["pruned"], between, units, shares)]
    return [
        Point(
            option,
            _asked(point["label"]),
            point["step"],
            point["model"],
            point["metric"],
            point["interval"],
            point["units"],
            point["shares"],
        )
        for point in listed
    ]


def _asked(label: str) -> float:
    """The number in a label such as speedup-1.5."""
    return float(label.split("-", 1)[1])
