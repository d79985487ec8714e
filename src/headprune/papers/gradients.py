"""Figure 2: the change of the gradients of all layers after one removal, measured on a real model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headprune.criteria.scoring import score
from headprune.errors import MissingPackageError
from headprune.extras import need_demo, require
from headprune.measure.diagnostics import GradientChange, gradient_change
from headprune.papers import langid
from headprune.papers.figures import HEADING, VERMILION, apply_style
from headprune.runs.loading import RunInputs, load_run_inputs
from headprune.search.config import Experiment
from headprune.tasks import task_of
from headprune.units import Site, resolve, widest

with require("report", "Figures need"):
    import altair as alt

SAMPLES, BATCH, SEED = 64, 32, 0
DEMO_NAME = "all-MiniLM-L6-v2 with a fitted language classifier"
TRAINING_STRINGS = 640  # strings to fit the classifier of the demo on
MAX_GRID = 16  # cells along a side of a heat map
ROLES = ("Query", "Key", "Value")
CELL = 7  # pixels


@dataclass(frozen=True)
class MeasuredChange:
    name: str
    samples: int
    change: GradientChange
    chosen: bool  # whether Greedy-Gnorm chose the head, and not the user


def measure_change(task: RunInputs, name: str, *, head: tuple[int, int] | None = None) -> MeasuredChange:
    """Remove a head, by default the one that Greedy-Gnorm would remove first, and compare the weight gradients of all
    sites."""
    examples = task.examples.sample(SAMPLES, SEED)
    batches = examples.batches(BATCH)
    sites = resolve(task.model)
    removed = [head] if head is not None else _first_unit(task, batches, sites)
    grid = min(MAX_GRID, widest(sites))  # one row of a heat map per head, where there are few enough
    return MeasuredChange(name, len(examples), gradient_change(task.model, batches, removed, grid=grid), head is None)


def change_by_site(task: RunInputs, name: str) -> dict[str, Any]:
    """The numbers of figure 2 for the ledger: the change relative to the norm before, by site, for Q, K and V."""
    measured = measure_change(task, name)
    return {
        "subject": name,
        "samples": measured.samples,
        "removed": [list(head) for head in measured.change.removed],
        "relative": [[round(value, 4) for value in row] for row in measured.change.relative.tolist()],
    }


def _first_unit(
    task: RunInputs, batches: Sequence[Mapping[str, Any]], sites: Sequence[Site]
) -> Iterable[tuple[int, int]]:
    scores = score(task.model, batches, criterion="gnorm").scores
    lowest = int(torch.where(scores.isnan(), torch.inf, scores).argmin())
    site, head = divmod(lowest, scores.shape[1])
    return sites[site].unit(head)


def load_task(model: str | Path, data: str | Path) -> RunInputs:
    return load_run_inputs(Experiment(model=str(model), data=str(data), seed=SEED))


def demo_task() -> RunInputs | None:
    """The pretrained model and the data of the demo; None where their packages are not installed.

    The classifier is fitted by least squares, which takes seconds where fine-tuning takes minutes.
    """
    try:
        need_demo()
    except MissingPackageError:
        return None
    model = langid.pretrained()
    with tempfile.TemporaryDirectory() as folder:
        data = langid.prepare_data(Path(folder))
        training_examples, examples = (
            langid.read(model, data / name).sample(count, SEED)
            for name, count in (("train.tsv", TRAINING_STRINGS), ("dev.tsv", SAMPLES))
        )
    langid.fit_classifier(model, training_examples.batches(BATCH))
    return RunInputs(model, task_of(model), examples)


def figure2(measured: MeasuredChange) -> alt.TopLevelMixin:
    """A heat map per site and role: where the weight gradient changed, and the change relative to its norm."""
    removed = measured.change.removed
    sites = {head.site for head in removed}
    count = len(measured.change.grids)
    largest = float(measured.change.grids.max())
    rows = [
        alt.hconcat(
            *(_map(measured, site, role, largest, site in sites, number == 0) for role in range(3)),
            spacing=6,
        )
        for number, site in enumerate(range(count))
    ]
    # Many sites are arranged in two columns, so that the figure fits on a page.
    half = -(-count // 2) if count > 6 else count
    columns = [alt.vconcat(*rows[start : start + half], spacing=8) for start in range(0, count, half)]
    head_names = ", ".join(f"{head.index}" for head in removed)
    title = alt.TitleParams(
        f"Change of the weight gradients after removing head {head_names} of site {min(sites)}",
        subtitle=[
            f"{measured.name}, {measured.samples} samples"
            + ("; it is the head that Greedy-Gnorm removes first." if measured.chosen else "."),
            "A map is one gradient matrix, pooled: heads from top to bottom, inputs from left to right.",
            "Per cent: norm of the change / norm of the gradient before the removal.",
        ],
        fontSize=HEADING,
    )
    return apply_style(alt.hconcat(*columns, spacing=30).properties(title=title))


def _map(measured: MeasuredChange, site: int, role: int, largest: float, pruned: bool, first: bool) -> Any:
    grid = measured.change.grids[site, role]
    rows = [
        {"row": row, "column": column, "change": value}
        for row, values in enumerate(grid.tolist())
        for column, value in enumerate(values)
    ]
    share = f"{float(measured.change.relative[site, role]):.0%}"
    colour = alt.Color(
        "change:Q",
        scale=alt.Scale(scheme="viridis", domain=[0, largest], type="sqrt"),
        legend=alt.Legend(title=["Mean absolute", "change"], format=".2~g", gradientLength=120, tickCount=4),
    )
    label = ["Site " + str(site), "(pruned)"] if pruned else ["Site " + str(site)]
    left = alt.Axis(
        title=label,
        titleAngle=0,
        titleAlign="right",
        titleFontWeight="bold" if pruned else "normal",
        titleColor=VERMILION if pruned else "black",
        labels=False,
        ticks=False,
        domain=False,
    )
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_rect()
        .encode(
            alt.X("column:O", axis=None),
            alt.Y("row:O", axis=left if role == 0 else None),
            colour,
        )
        .properties(
            width=CELL * grid.shape[1],
            height=CELL * grid.shape[0],
            title=alt.TitleParams(
                f"{ROLES[role]} {share}" if first else share,
                fontSize=10,
                anchor="middle",
                offset=3,
                fontWeight="normal",
            ),
        )
    )
