"""Figures of the metric against time, size and FLOPs, with the dense model and the points of budgets marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headprune.extras import require
from headprune.reports.budget_points import Point, points_of
from headprune.reports.figures import PALETTE, colour
from headprune.reports.format import interval_text
from headprune.reports.run_view import RunView, finite

with require("report", "Figures need"):
    import altair as alt

# By the share on the x axis of a figure: its title, and the label of the axis.
MEASURES = {
    "latency": ("time", "time, of the dense model's"),
    "parameters": ("size", "parameters, of the dense model's"),
    "flops": ("FLOPs", "FLOPs, of the dense model's"),
}
WIDTH, HEIGHT = 280, 220
MARKED = PALETTE[1]
TICKS = [0, 0.25, 0.5, 0.75, 1]
ROOM = 0.08  # of the range of values, above and below


def with_budget(runs: Sequence[RunView]) -> list[RunView]:
    """The runs with points of a budget."""
    return [run for run in runs if points_of(run.record)]


def figures(runs: Sequence[RunView]) -> dict[str, alt.LayerChart]:
    """A small figure per measure that was measured; none where no run has a budget."""
    shown = with_budget(runs)
    result = {}
    for measure, (title, axis) in MEASURES.items():
        steps = [row for run in shown for row in _steps(run, measure)]
        marked = [row for run in shown for row in _marked(run, measure)]
        if any(row["mark"] == "point" for row in marked):
            colours_by_run = {run.name: colour(runs, run) for run in shown}
            result[f"family-{measure}"] = _figure(shown, steps, marked, colours_by_run, title, axis)
    return result


def shares_left(run: RunView, measure: str) -> list[float | None]:
    """The share of the dense model that every step leaves, None where it is not known."""
    first = run.steps[0]
    if measure == "parameters":
        return [step.parameters / first.parameters if first.parameters else None for step in run.steps]
    if measure == "flops":
        whole = first.model_flops
        return [step.model_flops / whole if whole and step.model_flops else None for step in run.steps]
    timed = any(step.latency is not None for step in run.steps)
    return [step.latency if step.step else 1.0 if timed else None for step in run.steps]


def _figure(
    runs: Sequence[RunView],
    steps: list[dict[str, Any]],
    marked: list[dict[str, Any]],
    colours_by_run: dict[str, str],
    title: str,
    axis: str,
) -> alt.LayerChart:
    name = runs[0].metric.name
    farthest = max([1.0, *(row["share"] for row in [*steps, *marked])])
    ticks = alt.Axis(format="%", values=TICKS) if farthest <= 1.1 else alt.Axis(format="%", tickCount=4)
    x = alt.X("share:Q", title=axis, axis=ticks, scale=alt.Scale(domain=[0, farthest]))
    y = alt.Y("value:Q", title=name, scale=alt.Scale(domain=_extent([*steps, *marked]), zero=False))
    colours = alt.Color(
        "run:N", legend=None, scale=alt.Scale(domain=list(colours_by_run), range=list(colours_by_run.values()))
    )
    tooltip = [
        *([alt.Tooltip("run:N")] if len(runs) > 1 else []),
        alt.Tooltip("label:N", title="model"),
        alt.Tooltip("share:Q", title=title, format=".1%"),
        alt.Tooltip("value:Q", title=name, format=".4f"),
        alt.Tooltip("between:N", title="95% interval"),
    ]
    path = alt.Chart(alt.Data(values=steps)).encode(x=x, y=y, color=colours, tooltip=tooltip)
    marks = alt.Chart(alt.Data(values=marked)).encode(x=x, y=y, tooltip=tooltip)
    point_colour: Any = colours if len(runs) > 1 else alt.value(MARKED)  # several runs differ in their colours
    layers: list[Any] = []
    if steps:
        bars = path.transform_filter("isValid(datum.low) && !datum.marked").mark_rule(opacity=0.4, clip=True)
        layers += [
            bars.encode(y=alt.Y("low:Q"), y2="high:Q"),
            path.mark_line(strokeWidth=1.8).encode(order="step:Q"),
            path.mark_point(filled=True, size=22, opacity=1),
        ]
    bars = marks.transform_filter("isValid(datum.low)").mark_rule(opacity=0.7, strokeWidth=1.5, clip=True)
    layers.append(bars.encode(y=alt.Y("low:Q"), y2="high:Q", color=point_colour))
    dense = marks.transform_filter("datum.mark == 'dense'")
    layers.append(dense.mark_point(shape="diamond", filled=True, size=130, opacity=1, color="currentColor"))
    chosen = marks.transform_filter("datum.mark == 'point'")
    layers.append(chosen.mark_point(filled=True, size=110, opacity=1).encode(color=point_colour))
    # Where the metric falls as the model shrinks there is space above the curve on the left; where it rises, below it.
    below = not runs[0].metric.higher_is_better
    words = marks.mark_text(align="right", dx=-8, dy=13 if below else -10, fontSize=11, clip=False)
    layers.append(words.encode(text="label:N", color=alt.value("currentColor")))
    heading = alt.TitleParams(f"{name} against {title}", anchor="start")
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=heading)


def _steps(run: RunView, measure: str) -> list[dict[str, Any]]:
    marked = {0, *(point.step for point in points_of(run.record))}
    return [
        {
            **_row(run, f"step {step.step}", step.step, share, step.metric, step.interval),
            "marked": step.step in marked,
        }
        for step, share in zip(run.steps, shares_left(run, measure), strict=True)
        if share is not None and finite(step.metric) is not None
    ]


def _marked(run: RunView, measure: str) -> list[dict[str, Any]]:
    """The dense model and the points, with shares of the journal, or those that were measured at the end."""
    first, known = run.steps[0], shares_left(run, measure)
    rows = [{**_row(run, "dense", 0, 1.0, first.metric, first.interval), "mark": "dense"}]
    for point in points_of(run.record):
        share = _share(point, known, measure)
        if share is not None and point.metric is not None:
            rows.append({**_row(run, point.short, point.step, share, point.metric, point.interval), "mark": "point"})
    return [row for row in rows if row["value"] is not None]


def _share(point: Point, known: Sequence[float | None], measure: str) -> float | None:
    share = known[point.step] if point.step < len(known) else None
    return share if share is not None else point.shares.get(measure)


def _row(run: RunView, label: str, step: int, share: float, value: float, interval: Any) -> dict[str, Any]:
    low, high = (None, None) if interval is None else (finite(interval[0]), finite(interval[1]))
    known = low is not None and high is not None
    return {
        "run": run.name,
        "label": label,
        "step": step,
        "share": round(share, 4),
        "value": finite(value),
        "low": low if known else None,
        "high": high if known else None,
        "between": interval_text(run.metric.name, interval) or "unknown",
    }


def _extent(rows: Sequence[dict[str, Any]]) -> list[float]:
    """From the lowest to the highest value, with space for the bars of intervals."""
    values = [row["value"] for row in rows]
    bar_ends = [end for row in rows for end in (row["low"], row["high"]) if end is not None]
    low, high = min(values), max(values)
    span = high - low or 0.25 * (abs(low) or 1)
    # One wide bar must not flatten the curve.
    low, high = max(min([low, *bar_ends]), low - span), min(max([high, *bar_ends]), high + span)
    return [low - ROOM * span, high + ROOM * span]
