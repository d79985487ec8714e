"""Steps and trajectories: what was removed, in order, and all that was measured after each removal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headprune.units.members import Head

CURVE_COLUMNS = "Pruned_Heads,Accuracy,Step,Removed_Heads,Agreement,Loss,Parameters,Attention_FLOPs"


@dataclass(frozen=True)
class Step:
    """One removal. Step 0 is the dense model, where nothing was removed; `scores` are those that led to the removal."""

    step: int
    removed: tuple[Head, ...]
    score: float | None  # mean score of the heads that were removed
    metric: float
    agreement: float | None
    loss: float | None
    heads: int  # heads left, as parameterised
    applied_heads: int  # heads left, counted once per application (ALBERT's twelve uses of one head)
    parameters: int
    flops: int  # of the attention heads that are left, for one sequence
    scores: torch.Tensor | None
    # Per site that lost heads: which compensation was used, and its error on the calibration data without and with it.
    compensation: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "removed": [list(head) for head in self.removed],
            "score": plain(self.score),
            "metric": plain(self.metric),
            "agreement": plain(self.agreement),
            "loss": plain(self.loss),
            "heads": self.heads,
            "applied_heads": self.applied_heads,
            "parameters": self.parameters,
            "flops": self.flops,
            "compensation": [dict(repair) for repair in self.compensation],
            "scores": None if self.scores is None else [[plain(v) for v in row] for row in self.scores.tolist()],
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Step:
        scores = line["scores"]
        if scores is not None:
            rows = [[math.nan if value is None else value for value in row] for row in scores]
            scores = torch.tensor(rows, dtype=torch.float64)
        return cls(
            step=line["step"],
            removed=tuple(Head(site, head) for site, head in line["removed"]),
            score=line["score"],
            metric=math.nan if line["metric"] is None else line["metric"],
            agreement=line["agreement"],
            loss=line["loss"],
            heads=line["heads"],
            applied_heads=line["applied_heads"],
            parameters=line["parameters"],
            flops=line["flops"],
            scores=scores,
            compensation=tuple(line.get("compensation", ())),  # older journals know of none
        )


def plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value  # JSON has neither NaN nor Infinity


def removed_until(steps: Sequence[Step], last: int) -> list[Head]:
    """All heads that are gone after step `last`."""
    return [head for step in steps[: last + 1] for head in step.removed]


def curve_csv(steps: Sequence[Step]) -> str:
    """The curve with the authors' columns first. Pruned_Heads counts a tied head once per application, as they do."""
    lines = [CURVE_COLUMNS]
    for step in steps:
        values = (
            steps[0].applied_heads - step.applied_heads,
            step.metric,
            step.step,
            steps[0].heads - step.heads,
            step.agreement,
            step.loss,
            step.parameters,
            step.flops,
        )
        lines.append(",".join("" if value is None else repr(value) for value in values))
    return "\n".join(lines) + "\n"
