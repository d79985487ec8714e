"""Compares criteria from the same dense model on the same data: a study of one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headprune.former_names import former_names
from headprune.runs.experiment import Experiment
from headprune.runs.studies.comparison import Row
from headprune.runs.studies.run_study import SerialExecutor, run_study
from headprune.runs.studies.study_runs import make_group
from headprune.search.observers import Observer

__getattr__ = former_names(__name__)


def compare(
    experiment: Experiment,
    criteria: Sequence[str],
    out: Path,
    *,
    trials: int = 1,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> list[Row]:
    """Run every criterion to the end of its curve, or resume its run, and compare; best first. Writes comparison.json
    and report.html beside the runs.

    A criterion may have its own schedule and repair, as in "gnorm@one-shot+lstsq". The others use the experiment's,
    or where that names no schedule the one they were published with. The best has the largest area under its curve over
    the usable range; with a budget, the best metric there.
    """
    group = make_group(experiment, criteria, out, trials=trials)
    (result,) = run_study([group], SerialExecutor(), observer=observer, overwrite=overwrite)
    return result.rows
