"""A chart of the widths of feed-forward layers, in the colours of the mask of heads."""

from __future__ import annotations

from typing import Any

from headprune.extras import require
from headprune.reports.figures import CELL, KEPT, NEW, REMOVED, STATES
from headprune.reports.run_view import RunView

with require("report", "Figures need"):
    import altair as alt

STRIP = 190  # pixels of a layer of its dense width


def widths(run: RunView) -> alt.LayerChart:
    """The neurons left after the parameter `step`: a bar per layer, relative to its dense width. The parameters `left`
    and `before` are the widths after the step and before it."""
    kept, new, _ = (f"datum.state == '{state}'" for state in STATES)
    base = (
        alt.Chart(alt.Data(values=bars(run), name="layers"))
        .transform_calculate(now="left[datum.row]", was="before[datum.row]")
        .transform_calculate(
            start=f"({kept} ? 0 : {new} ? datum.now : datum.was) / datum.dense",
            end=f"({kept} ? datum.now : {new} ? datum.was : datum.dense) / datum.dense",
            label="datum.now ? format(datum.now, ',') : 'empty'",
            neurons="format(datum.now, ',') + ' of ' + format(datum.dense, ',')",
        )
        .encode(y=alt.Y("layer:O", title="feed-forward layer", axis=alt.Axis(labelOverlap=True), scale=_spaced()))
    )
    axis = alt.Axis(format="%", values=[0, 0.5, 1], grid=False)
    x = alt.X("start:Q", title="share of its neurons", axis=axis, scale=alt.Scale(domain=[0, 1]))
    legend = alt.Legend(orient="bottom", labelLimit=200)
    colours = alt.Color(
        "state:N", title=None, legend=legend, scale=alt.Scale(domain=STATES, range=[KEPT, NEW, REMOVED])
    )
    strip = base.mark_bar().encode(
        x=x, x2="end:Q", color=colours, tooltip=["layer:O", "site:O", "neurons:N", "state:N"]
    )
    number = (
        base.transform_filter(kept)
        .transform_calculate(end="1")
        .mark_text(align="left", dx=6, fontSize=11, clip=False)
        .encode(
            x=alt.X("end:Q"),
            text="label:N",
            color=alt.condition("datum.now", alt.value("currentColor"), alt.value(NEW)),
        )
    )
    now, before = at(run, run.shown_first)
    return (
        alt.layer(strip, number)
        .add_params(
            alt.param(name="step", value=run.shown_first),
            alt.param(name="left", value=now),
            alt.param(name="before", value=before),
            alt.param(name="run", value=run.name),
        )
        .properties(
            width=STRIP,
            height=alt.Step(CELL),
            padding={"left": 5, "top": 5, "bottom": 5, "right": 50},
            title=alt.TitleParams(alt.ExprRef("['Neurons left after step ' + step, run]"), anchor="start", limit=340),
        )
    )


def bars(run: RunView) -> list[dict[str, Any]]:
    """Three parts of every layer, one for each state."""
    return [
        {"site": site, "layer": row, "row": row, "dense": dense, "state": state}
        for row, (site, dense) in enumerate(run.widths[0].items())
        for state in STATES
    ]


def at(run: RunView, step: int) -> tuple[list[int], list[int]]:
    """The widths of all layers after a step, and before it."""
    return list(run.widths[step].values()), list(run.widths[max(0, step - 1)].values())


def _spaced() -> alt.Scale:
    return alt.Scale(padding=0.06)
