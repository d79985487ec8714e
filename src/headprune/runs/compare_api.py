"""`headprune.compare`: compares criteria from Python, with the runs of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.config.groups import BUDGETS
from headprune.config.option_file import nearest
from headprune.criteria.registry import split_names
from headprune.display import data_frame, html_table
from headprune.errors import StudyError
from headprune.extras import need_report
from headprune.measure.compare_at_budget import AtBudget
from headprune.measure.curves import curve_rows
from headprune.measure.trajectory import Step
from headprune.reports.format import interval_text, measured_text, value_text, verdict_of
from headprune.reports.plots import plot_runs
from headprune.reports.run_view import RunView, load_runs
from headprune.runs.alpha import AlphaChoice, with_chosen_alpha
from headprune.runs.compare import Row
from headprune.runs.studies.run_study import SerialExecutor, run_study
from headprune.runs.studies.spec import SHARED, check_alpha_word, study_of
from headprune.runs.studies.study_runs import make_groups
from headprune.search.progress_bars import StudyBar


@dataclass(frozen=True, repr=False)
class CompareResult:
    """Criteria from best to worst, a verdict in sentences, and the trajectories of all runs."""

    out: Path  # the folder of the runs, with comparison.json and report.html
    rows: tuple[Row, ...]
    verdict: tuple[str, ...]  # by how much the best is ahead, and which do not differ significantly
    runs: Mapping[str, Sequence[RunView]] = field(default_factory=dict)  # criterion -> its runs: several for random
    alpha: AlphaChoice | None = None  # that of hies, where it was chosen

    @property
    def best(self) -> str:
        return self.rows[0].name

    @property
    def curves(self) -> dict[str, list[list[Step]]]:
        """Criterion -> the steps of each of its runs."""
        return {name: [run.steps for run in runs_of_criterion] for name, runs_of_criterion in self.runs.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": str(self.out),
            "verdict": list(self.verdict),
            **({} if self.alpha is None else {"alpha": self.alpha.to_json()}),
            "criteria": [row.to_json() for row in self.rows],
        }

    def to_frame(self) -> Any:
        """All curves as one pandas frame, with a line per criterion, run and step; `removed` is a share."""
        return data_frame(
            {"criterion": name, "run": run.name, **row}
            for name, runs_of_criterion in self.runs.items()
            for run in runs_of_criterion
            for row in curve_rows(run.steps)
        )

    def plot(self) -> Any:
        """The curves of the report, as an Altair chart."""
        return plot_runs([run for runs_of_criterion in self.runs.values() for run in runs_of_criterion])

    def __repr__(self) -> str:
        return f"<CompareResult: {', '.join(row.name for row in self.rows)} (best first) in {self.out}>"

    def _repr_html_(self) -> str:
        name, first = self.rows[0].measured.name, self.rows[0]
        if isinstance(first, AtBudget):
            headings = ["criterion", name, "agreement"]
            rows = [_budget_cells(row) for row in self.rows if isinstance(row, AtBudget)]
        else:
            headings = ["criterion", "area", *(f"{name} at {share}" for share in first.metric)]
            rows = [
                [
                    row.name,
                    f"{row.usable_area:.4f}",
                    *(measured_text(name, row.metric[share], row.interval[share]) for share in row.metric),
                ]
                for row in self.rows
                if not isinstance(row, AtBudget)
            ]
        return html_table("Best first", headings, rows, self.verdict)


def _budget_cells(row: AtBudget) -> list[str]:
    name = row.measured.name
    measured = f"{value_text(name, row.metric)} {interval_text(name, row.interval)}".rstrip()
    return [row.name, measured, value_text("agreement", row.agreement)]


def compare(
    model: str | Path,
    data: str | Path,
    criteria: str | Sequence[str],
    *,
    out: str | Path,
    trials: int = 1,
    at: str | Sequence[float] | None = None,
    alpha: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> CompareResult:
    """Run several criteria from the same dense model on the same split of the data, and rank them.

    Every criterion has a run in the folder `out`, as `headprune compare` writes them; an interrupted comparison is
    resumed, and a finished one is read. A criterion may have its own schedule and repair, as in "gnorm@one-shot+lstsq";
    the others use `repair`, by default none, and `schedule`, by default along curves the one that each was published
    with. Of random there are `trials` runs. Curves end at the last unit; with a budget, such as `keep_flops=0.5`, the
    models at the budget are compared. `at` are the percentages of heads removed at which curves are
    compared, such as "10,20,50". `alpha="auto"` chooses the alpha of hies first. `options` are those of the
    command line, with underscores: `calibration_samples=64`, `seed=1`, `metric="f1"`.
    """
    need_report()
    if not isinstance(model, (str, Path)) or not isinstance(data, (str, Path)):
        raise StudyError(
            "compare starts every run from the model and the data on disk; pass the folder of the model "
            "(headprune.save writes it) and the file of the data."
        )
    option_names = ("seed", *BUDGETS, *SHARED)
    for name in options:
        if name not in option_names:
            raise StudyError(f"compare has no option {name!r}; {nearest(name, option_names)}")
    shared = {name: [value] if name in BUDGETS else value for name, value in options.items() if name != "seed"}
    study = study_of(
        {
            **shared,
            "models": [str(model)],
            "data": [str(data)],
            "criteria": split_names(criteria) if isinstance(criteria, str) else list(criteria),
            "seeds": [options.get("seed", 0)],
            "trials": trials,
            "at": at,
        }
    )
    check_alpha_word(alpha, study)
    choice = None
    if alpha is not None:
        study, choice = with_chosen_alpha(study, Path(out), overwrite=overwrite)
    (group,) = groups = make_groups(study, Path(out))
    with StudyBar(len(group.jobs), progress) as bar:
        (result,) = run_study(groups, SerialExecutor(), observer=bar, overwrite=overwrite)
    runs = {row.name: load_runs([Path(out) / name for name in row.runs]) for row in result.rows}
    return CompareResult(Path(out), tuple(result.rows), tuple(verdict_of(result.rows)), runs, choice)
