"""The figures of a report as Altair charts, for the page and for `--figures`.

The page moves through the steps by setting parameters of the charts, such as `step`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from headprune.extras import require
from headprune.measure.curves import shares
from headprune.reports.format import interval_text
from headprune.reports.run_view import Entry, RunView, entries, finite, ranks, scores_of

with require("report", "Figures need"):
    import altair as alt

# Okabe and Ito's palette without black and yellow, which are invisible on a dark or a white page: six colours that can
# be distinguished with every kind of colour vision. Further runs differ in their dashes.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
DASHES = [[1, 0], [6, 3], [2, 2], [10, 3, 2, 3]]
RANDOM_GREY = "#8a8a8a"
KEPT, NEW, REMOVED = "#0072B2", "#D55E00", "rgba(128,128,128,0.22)"
WIDTH, HEIGHT, CELL = 620, 300, 22
BOXES = 16
BAND_OPACITY = 0.12  # of the bands of intervals, which must not hide the lines,
MANY_BANDS_OPACITY = 0.07  # and where there are many
BAND_ROOM = (
    0.2  # share of the curves' range that bands may add on either side: one wide interval must not flatten the curves
)
STATES = ["kept", "removed in this step", "removed before"]


def curve(runs: Sequence[RunView], field: str, *, title: str, axis: str, saved: bool = False) -> alt.LayerChart:
    """A quantity of every step over the share of heads removed. A ring marks where a run stopped; the filled point is
    at the parameters `at_removed` and `at_value`, in the colour `at_colour`. The metric has a band for its interval.
    Steps are dots where they remove very different numbers of heads. A `saved` figure has no point, as nobody can move
    it there, and rings only where a rule chose the step."""
    shown = entries(runs)
    drawn = [entry for entry in shown if not entry.boxes]
    styles = _styles(shown)
    reach = max(shares(run.steps)[-1] for run in runs)
    x = alt.X(
        "removed:Q",
        title=f"share of {counted(runs)} removed",
        axis=alt.Axis(format="%", tickCount=5),
        scale=alt.Scale(domain=[0, reach or 1]),
    )
    bands = _band_rows(drawn) if field == "metric" else []
    y = alt.Y("value:Q", title=axis, scale=alt.Scale(domain=_extent(runs, field, bands), nice=True, zero=False))
    names, ranges = list(styles), list(zip(*styles.values(), strict=True))
    # One name per row: on a phone a wide legend would narrow the curve.
    symbols = {"symbolType": "stroke", "symbolSize": 300, "symbolStrokeWidth": 3, "symbolOpacity": 1}
    legend = alt.Legend(orient="bottom", columns=1, labelLimit=280, **symbols) if len(runs) > 1 else None
    colours = alt.Color("run:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=list(ranges[0])))
    dashes = alt.StrokeDash("run:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=list(ranges[1])))
    layers: list[Any] = []
    if bands:
        layers.append(
            alt.Chart(alt.Data(values=bands), name="bands")
            .mark_area(opacity=BAND_OPACITY if len(drawn) <= 3 else MANY_BANDS_OPACITY, clip=True)
            .encode(x=x, y=alt.Y("low:Q", title=axis), y2="high:Q", color=colours, detail="trial:N")
        )
    for number, entry in enumerate(entry for entry in shown if entry.boxes):
        layers.append(
            alt.Chart(alt.Data(values=_box_rows(entry, field)), name="random" + (f"-{number}" if number else ""))
            .mark_boxplot(orient="vertical", size=9, color=styles[entry.name][0], opacity=0.75, extent="min-max")
            .encode(x=x, y=y)
        )
    if drawn:
        tooltip = [
            alt.Tooltip("trial:N", title="run"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("heads:Q", title="heads left"),
            *([alt.Tooltip("neurons:Q", title="neurons left")] if any(run.has_neurons for run in runs) else []),
            alt.Tooltip("value:Q", title=axis, format=".4f"),
            *([alt.Tooltip("between:N", title="95% interval")] if bands else []),
        ]
        base = alt.Chart(
            alt.Data(values=[row for entry in drawn for run in entry.runs for row in _rows(run, field, entry)])
        ).encode(x=x, y=y, color=colours, tooltip=tooltip)
        thin = alt.condition("datum.thin", alt.value(1.2), alt.value(2))
        layers.append(base.mark_line().encode(strokeDash=dashes, detail="trial:N", strokeWidth=thin))
        uneven = [run for entry in drawn for run in entry.runs if _is_uneven(run)]
        if uneven:  # to show where the curve was measured
            layers.append(base.transform_filter("datum.dot").mark_point(filled=True, size=22, opacity=1))
        ringed = [run for entry in drawn for run in entry.runs if run.stop is not None and (run.chose or not saved)]
        chosen = alt.FieldOneOfPredicate("trial", [run.name for run in ringed])
        layers.append(
            base.transform_filter("datum.stop")
            .transform_filter(chosen)
            .mark_point(shape="circle", size=160, filled=False, strokeWidth=2.5)
        )
    first = runs[0]
    if not saved:
        here = _rows(first, field)[first.shown_first]
        layers.append(
            alt.Chart(alt.Data(values=[{"point": "chosen step"}]))
            .transform_calculate(removed="at_removed", value="at_value")
            .transform_filter("isValid(datum.value)")
            .mark_point(filled=True, size=70, opacity=1, color=alt.ExprRef("at_colour"))
            .encode(x=x, y=y)
            .add_params(
                alt.param(name="at_removed", value=here["removed"]),
                alt.param(name="at_value", value=here["value"]),
                alt.param(name="at_colour", value=colour(runs, first)),
            )
        )
    notes = ["band: 95% interval" if bands else ""]
    notes += ["dots: steps" if drawn and uneven else ""]
    notes += ["ring: where a run stopped" if drawn and ringed else ""]
    notes += ["boxes: runs of random, lowest to highest" if len(drawn) < len(shown) else ""]
    heading = alt.TitleParams(title, subtitle=[note for note in notes if note], anchor="start")
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=heading)


def colour(runs: Sequence[RunView], run: RunView) -> str:
    """The colour of a run among others."""
    shown = entries(runs)
    return _styles(shown)[next(entry.name for entry in shown if run in entry.runs)][0]


def counted(runs: Sequence[RunView]) -> str:
    """The quantity whose share is the x axis of curves."""
    neurons = [run.has_neurons for run in runs]
    return "the FLOPs of heads and neurons" if all(neurons) else "heads, or FLOPs of both," if any(neurons) else "heads"


def mask(run: RunView) -> alt.Chart:
    """Which heads are left after the parameter `step`."""
    legend = alt.Legend(orient="bottom", labelLimit=200)
    chosen = alt.Color("state:N", title=None, legend=legend, scale=alt.Scale(domain=STATES, range=[KEPT, NEW, REMOVED]))
    kept, new, before = (f"'{state}'" for state in STATES)
    removed_at = "datum.removed_at"
    state = f"!isValid({removed_at}) || {removed_at} > step ? {kept} : {removed_at} == step ? {new} : {before}"
    return (
        _grid(run, "'Heads left after step ' + step")
        .transform_calculate(state=state)
        .encode(color=chosen, tooltip=["site:O", "head:O", "state:N"])
        .add_params(alt.param(name="step", value=run.shown_first))
    )


def scores(run: RunView, step: int | None = None) -> alt.Chart:
    """The scores that led to the parameter `step`, the first removal if none is named, shaded by rank."""
    step = min(1, len(run.steps) - 1) if step is None else step
    values = scores_of(run, step)
    shade = alt.Color(
        "rank:Q",
        title="importance by rank, 0 = least",
        scale=alt.Scale(scheme="viridis", domain=[0, 1]),
        legend=alt.Legend(orient="bottom", gradientLength=160, values=[0, 0.5, 1], titleLimit=250),
    )
    return (
        _grid(run, "'Scores that led to step ' + step")
        .transform_calculate(rank="ranks[datum.cell]", score="scores[datum.cell]")
        .encode(
            color=shade,
            tooltip=["site:O", "head:O", alt.Tooltip("score:Q", format=".3~g"), alt.Tooltip("rank:Q", format=".2f")],
        )
        .add_params(
            alt.param(name="step", value=step),
            alt.param(name="scores", value=values),
            alt.param(name="ranks", value=ranks(values)),
        )
        .configure_scale(invalid={"color": {"value": REMOVED}})
    )


def cells(run: RunView) -> list[dict[str, Any]]:
    """The cells of the mask and of the scores."""
    return [
        {"site": head.site, "head": head.index, "cell": cell, "removed_at": run.removed_at.get(head)}
        for cell, head in enumerate(run.heads)
    ]


def _grid(run: RunView, title: str) -> alt.Chart:
    """One row per site, one cell per head. The title is an expression, the run's name a parameter in it."""
    axis, scale = alt.Axis(labelAngle=0, labelOverlap=True), alt.Scale(padding=0.06)
    return (
        alt.Chart(alt.Data(values=cells(run), name="cells"))
        .mark_rect(invalid=None)
        .encode(
            x=alt.X("head:O", title="head", axis=axis, scale=scale),
            y=alt.Y("site:O", title="site", axis=axis, scale=scale),
        )
        .add_params(alt.param(name="run", value=run.name))
        .properties(
            width=alt.Step(CELL),
            height=alt.Step(CELL),
            title=alt.TitleParams(alt.ExprRef(f"[{title}, run]"), anchor="start", limit=340),
        )
    )


def _styles(shown: Sequence[Entry]) -> dict[str, tuple[str, list[int]]]:
    """Colour and dashes of every entry. The first random group, the baseline, is grey."""
    styles: dict[str, tuple[str, list[int]]] = {}
    grey = next((entry for entry in shown if entry.is_random and len(shown) > 1), None)
    others = 0
    for entry in shown:
        if entry is grey:
            styles[entry.name] = RANDOM_GREY, DASHES[0]
            continue
        styles[entry.name] = PALETTE[others % len(PALETTE)], DASHES[others // len(PALETTE) % len(DASHES)]
        others += 1
    return styles


def _extent(runs: Sequence[RunView], field: str, bands: Sequence[dict[str, Any]]) -> list[float]:
    """From the lowest to the highest value, with some room for bands, or where all are equal; 0 to 1 where there is
    none."""
    values = [value for run in runs for step in run.steps if (value := finite(getattr(step, field))) is not None]
    if not values:
        return [0, 1]
    low, high = min(values), max(values)
    span = high - low or 0.25 * (abs(low) or 1)
    band_ends = [*(row["low"] for row in bands), *(row["high"] for row in bands)]
    if band_ends:
        low = max(min(low, *band_ends), low - BAND_ROOM * span)
        high = min(max(high, *band_ends), high + BAND_ROOM * span)
    return [low, high] if low < high else [low - 0.05 * (abs(low) or 1), high + 0.05 * (abs(high) or 1)]


def _rows(run: RunView, field: str, entry: Entry | None = None) -> list[dict[str, Any]]:
    shares_removed, dots = shares(run.steps), _is_uneven(run)
    return [
        {
            "run": run.name if entry is None else entry.name,
            "trial": run.name,
            "thin": entry is not None and len(entry.runs) > 1,
            "step": step.step,
            "heads": step.heads,
            **({"neurons": step.neurons} if run.has_neurons else {}),
            "removed": round(share, 6),
            "value": finite(getattr(step, field)),
            "stop": step.step == run.stop,
            "dot": dots,
            "between": (interval_text(run.metric.name, step.interval) or "unknown") if field == "metric" else None,
        }
        for step, share in zip(run.steps, shares_removed, strict=True)
    ]


def _is_uneven(run: RunView) -> bool:
    """Whether some steps remove many times as many heads as others, as with `rescore auto`."""
    sizes = [before.heads - after.heads for before, after in itertools.pairwise(run.steps)]
    return not run.has_neurons and len(sizes) > 1 and max(sizes) > 3 * min(sizes)


def _band_rows(drawn: Sequence[Entry]) -> list[dict[str, Any]]:
    """The 95 % interval of the metric of every entry with one line; none for runs without intervals."""
    return [
        {"run": entry.name, "trial": run.name, "removed": round(share, 6), "low": low, "high": high}
        for entry in drawn
        for run in entry.runs[: 1 if len(entry.runs) == 1 else 0]
        for step, share in zip(run.steps, shares(run.steps), strict=True)
        if step.interval is not None
        and (low := finite(step.interval.low)) is not None
        and (high := finite(step.interval.high)) is not None
    ]


def _box_rows(entry: Entry, field: str) -> list[dict[str, Any]]:
    """Trials at about sixteen shares of heads removed, as there is no space for a box per step."""
    every = max(1, min(len(run.steps) for run in entry.runs) // BOXES)
    return [
        {"run": entry.name, "removed": row["removed"], "value": row["value"]}
        for run in entry.runs
        for row in _rows(run, field)
        if row["step"] % every == 0 and row["value"] is not None
    ]
