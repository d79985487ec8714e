"""The figures of a report as Altair charts: what the page shows and what `--figures` writes are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from headprune.report.loading import ReportRun, finite

# Okabe and Ito's palette: tells eight things apart for every kind of colour vision.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
RANDOM_GREY = "#8a8a8a"
WIDTH, HEIGHT = 620, 300


def curve(runs: Sequence[ReportRun], field: str, *, title: str, axis: str) -> alt.LayerChart:
    """A quantity of every step over the share of heads removed; the stop of each run is a ring, and the parameter
    `step` puts a point on the first run's curve. Random runs together are boxes, a few of them grey lines."""
    lines = [run for run in runs if not run.is_random]
    chance = [run for run in runs if run.is_random]
    scale = alt.Scale(zero=False)
    x = alt.X("removed:Q", title="share of heads removed", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    y = alt.Y("value:Q", title=axis, scale=scale)
    layers: list[Any] = []
    if len(chance) >= 3:
        rows = _box_rows(chance, field)
        layers.append(
            alt.Chart(alt.Data(values=rows), name="random")
            .mark_boxplot(size=9, color=RANDOM_GREY, opacity=0.75, extent="min-max")
            .encode(x=x, y=y)
        )
    drawn = lines + (chance if len(chance) < 3 else [])
    names = [run.name for run in drawn]
    colours = alt.Color(
        "run:N",
        title="run",
        scale=alt.Scale(domain=names, range=[PALETTE[i % len(PALETTE)] for i in range(len(names))]),
        legend=alt.Legend(orient="bottom", columns=4) if len(runs) > 1 else None,
    )
    rows = [row for run in drawn for row in _rows(run, field)]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=x,
        y=y,
        color=colours,
        tooltip=[
            alt.Tooltip("run:N"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("heads:Q", title="heads left"),
            alt.Tooltip("value:Q", title=axis, format=".4f"),
        ],
    )
    if rows:
        layers.append(base.mark_line(interpolate="linear", strokeWidth=2))
        layers.append(
            base.transform_filter("datum.stop").mark_point(shape="circle", size=150, filled=False, strokeWidth=2.5)
        )
    first = (drawn or list(runs))[0]
    step = alt.param(name="step", value=first.stopped_at)
    marked = alt.Chart(alt.Data(values=_rows(first, field))).encode(x=x, y=y)
    layers.append(
        marked.transform_filter("datum.step == step")
        .mark_point(filled=True, size=90, color="#D55E00", opacity=1)
        .add_params(step)
    )
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def mask(run: ReportRun) -> alt.Chart:
    """Which heads are left at the stop."""
    gone = {tuple(head) for step in run.steps[: run.stopped_at + 1] for head in step.removed}
    rows = [
        {"site": site, "head": head, "state": "removed" if (site, head) in gone else "kept"}
        for site, heads in enumerate(shape(run))
        for head in range(heads)
    ]
    colour = alt.Color("state:N", scale=alt.Scale(domain=["kept", "removed"], range=["#0072B2", "#dcdcdc"]), title=None)
    return _grid(rows, colour, f"heads kept by {run.name}, step {run.stopped_at}")


def scores(run: ReportRun, step: int = 1) -> alt.Chart:
    """The scores that led to a step, shaded by rank."""
    matrix = run.steps[step].scores
    rows = []
    if matrix is not None:
        values = sorted(v for row in matrix.tolist() for v in row if v == v)
        rank = {value: place / max(1, len(values) - 1) for place, value in enumerate(values)}
        rows = [
            {"site": s, "head": h, "rank": rank.get(value), "score": finite(value)}
            for s, row in enumerate(matrix.tolist())
            for h, value in enumerate(row)
            if h < shape(run)[s]
        ]
    colour = alt.Color("rank:Q", scale=alt.Scale(scheme="viridis", domain=[0, 1]), title="rank (1 = most important)")
    return _grid(rows, colour, f"scores of {run.name} before step {step}")


def _grid(rows: list[dict[str, Any]], colour: alt.Color, title: str) -> alt.Chart:
    cell = 22
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("site:O", title="site"),
            color=colour,
            tooltip=["site:O", "head:O", *(["score:Q"] if rows and "score" in rows[0] else [])],
        )
        .properties(width=alt.Step(cell), height=alt.Step(cell), title=title)
    )


def shape(run: ReportRun) -> list[int]:
    """Original heads of each site, from the widest thing the run knows about them."""
    if run.result:
        return [len(row) for row in run.result["mask"]]
    widest: dict[int, int] = {}
    for step in run.steps:
        for head in step.removed:
            widest[head.site] = max(widest.get(head.site, 0), head.index + 1)
        if step.scores is not None:
            return [step.scores.shape[1]] * step.scores.shape[0]
    return [widest.get(site, 0) for site in range(max(widest, default=-1) + 1)]


def _rows(run: ReportRun, field: str) -> list[dict[str, Any]]:
    total = max(1, run.steps[0].heads)
    return [
        {
            "run": run.name,
            "step": step.step,
            "heads": step.heads,
            "removed": (total - step.heads) / total,
            "value": finite(getattr(step, field)),
            "stop": step.step == run.stopped_at,
        }
        for step in run.steps
    ]


def _box_rows(runs: Sequence[ReportRun], field: str) -> list[dict[str, Any]]:
    """Trials at about sixteen shares of heads removed: a box per step would be a wall."""
    count = min(len(run.steps) for run in runs)
    every = max(1, count // 16)
    return [
        {**row, "removed": round(row["removed"], 6)}
        for run in runs
        for row in _rows(run, field)
        if row["step"] % every == 0 and row["value"] is not None
    ]
