"""The result of `prune`: the pruned model and its trajectory, as a frame, a chart, and a table in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.display import data_frame, html_table
from headprune.measure.curves import curve_rows
from headprune.measure.metrics import Metric
from headprune.measure.trajectory import Step


@dataclass(frozen=True, repr=False)
class PruneResult:
    """The pruned model (the object that was passed), the whole trajectory, and the step that the model is at."""

    model: PreTrainedModel
    dense: PreTrainedModel | None
    trajectory: list[Step]
    stopped_at: int
    metric: Metric
    mask: torch.Tensor  # bool [sites x heads], True = kept
    rule: str = ""  # what decided where to stop
    points: Mapping[int, str] = field(default_factory=dict)  # steps at the points of a budget, where there are several
    unreached: Mapping[int, str] = field(
        default_factory=dict
    )  # sites left whole, as no sample reaches them; their paths

    @property
    def result(self) -> Step:
        return self.trajectory[self.stopped_at]

    def to_frame(self) -> Any:
        """The trajectory as a pandas frame, with a line per step; `removed` is a share."""
        return data_frame(curve_rows(self.trajectory))

    def plot(self) -> Any:
        """The metric over the share removed, as an Altair chart; the ring marks the step of the model."""
        from headprune.reports.plots import plot_trajectory

        return plot_trajectory(self.trajectory, self.metric.name, self.stopped_at)

    def _repr_html_(self) -> str:
        first, last = self.trajectory[0], self.result
        interval = ("95% interval", _ends(first), _ends(last))
        rows = [
            *((kind, f"{count:,}", f"{last.units.get(kind, 0):,}") for kind, count in first.units.items()),
            (self.metric.name, f"{first.metric:.4g}", f"{last.metric:.4g}"),
            *([interval] if first.interval is not None else []),
            *([("agreement", "1", f"{last.agreement:.4g}")] if last.agreement is not None else []),
            ("parameters", f"{first.parameters:,}", f"{last.parameters:,}"),
            *([("time of a forward pass", "1", f"{last.latency:.3g}")] if last.latency is not None else []),
        ]
        where = f"step {self.stopped_at} of {len(self.trajectory) - 1}, {self.rule or 'the end of the curve'}"
        return html_table(f"Pruned: {where}", ("", "dense", "pruned"), rows)

    def __repr__(self) -> str:
        first, last = self.trajectory[0], self.result
        agree = "" if last.agreement is None else f", agreement {last.agreement:.3f}"
        removed = " and ".join(f"{count - last.units[kind]} of {count} {kind}" for kind, count in first.units.items())
        return (
            f"<PruneResult: {removed} removed, {self.metric.name} "
            f"{first.metric:.4g} -> {last.metric:.4g}{agree}, stopped at step {self.stopped_at} of "
            f"{len(self.trajectory) - 1} by {self.rule or 'the end of the curve'}>"
        )


def _ends(step: Step) -> str:
    return "" if step.interval is None else f"[{step.interval.low:.4g}, {step.interval.high:.4g}]"
