"""Charts of results in memory, as in a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headprune.criteria.scoring import ScoreResult
from headprune.errors import CriterionError
from headprune.measure.trajectory import Step
from headprune.reports.page import curve_charts
from headprune.reports.run_view import RunView
from headprune.reports.scores import scores_chart


def plot_trajectory(steps: Sequence[Step], metric: str, stopped_at: int) -> Any:
    """The curve of a report, from a trajectory without a run."""
    record = {"settings": {"model": ""}, "result": {"metric": metric, "step": stopped_at}}
    return plot_runs([RunView(metric, Path(), record, list(steps))])


def plot_runs(runs: Sequence[RunView]) -> Any:
    """The metric of these runs over the share removed."""
    return curve_charts(runs, saved=True)["metric"]


def plot_scores(result: ScoreResult, criterion: str | None = None) -> Any:
    """The heat map of `score --out`; of several criteria, name one."""
    if result.single:
        return scores_chart(next(iter(result.criteria)), result)
    if criterion not in result.criteria:
        raise CriterionError(f"Name one of the criteria to plot: {', '.join(result.criteria)}.")
    return scores_chart(criterion, replace(result, scores=result.scores[criterion], single=True))
