"""Figures 3, 4 and 5 as Altair charts, in the colour-blind safe palette of Okabe and Ito."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.extras import require
from headprune.papers.figure_data import CRITERIA, Panel

with require("report", "Figures need"):
    import altair as alt

BLUE, SKY, VERMILION, ORANGE, GREY = "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#999999"
COLOURS = {"gnorm": BLUE, "inverse:gnorm": SKY, "entropy": VERMILION, "inverse:entropy": ORANGE}
DASHES = {"gnorm": [1, 0], "inverse:gnorm": [5, 3], "entropy": [1, 0], "inverse:entropy": [5, 3]}
RANDOM = "Random (box: quartiles, line: range)"
DENSE = "Dense model"
WIDTH, HEIGHT, COLUMNS = 330, 200, 2
HEADING = 16  # font size of the title of a figure
CELL = 20  # pixels of one head


def figure3(panels: Sequence[Panel], source: str) -> alt.TopLevelMixin | None:
    """Accuracy over heads removed, one panel per model, one line per criterion; None where there are no curves."""
    with_curves = [panel for panel in panels if panel.curves]
    if not with_curves:
        return None
    criteria = [name for name in CRITERIA if any(name in panel.curves for panel in with_curves)]
    metrics = " or ".join(dict.fromkeys(panel.metric for panel in with_curves))
    return _arrange(
        [_curves(panel, criteria) for panel in with_curves],
        f"{metrics.capitalize()} as heads are removed, by the criterion that chooses them",
        f"Dotted: where pruning stops. {source}",
    )


def _curves(panel: Panel, criteria: Sequence[str]) -> alt.LayerChart:
    rows = [
        {"removed": removed, "value": value, "criterion": CRITERIA[name]}
        for name in sorted(criteria, key=lambda name: name.startswith("inverse:"))  # dashed lines on top of solid ones
        for removed, value in panel.curves.get(name, ())
    ]
    domain = [CRITERIA[name] for name in criteria]
    colour = alt.Scale(domain=domain, range=[COLOURS[name] for name in criteria])
    dash = alt.Scale(domain=domain, range=[DASHES[name] for name in criteria])
    legend = alt.Legend(
        title=None, orient="bottom", symbolType="stroke", symbolSize=500, symbolStrokeWidth=3, labelLimit=300
    )
    lines = (
        alt.Chart(_data(rows))
        .mark_line(strokeWidth=2, point={"size": 18} if _sparse(panel) else False)
        .encode(
            _removed_axis(panel),
            _value_axis(panel),
            color=alt.Color("criterion:N", scale=colour, legend=legend),
            strokeDash=alt.StrokeDash("criterion:N", scale=dash, legend=legend),
        )
    )
    return alt.layer(lines, *_stop_rule(panel)).properties(title=panel.title, width=WIDTH, height=HEIGHT)


def figure4(panels: Sequence[Panel], source: str) -> alt.TopLevelMixin | None:
    """Random trials as boxes with the Greedy-Gnorm line on top, one panel per model; None where there are no trials."""
    with_trials = [panel for panel in panels if panel.trials]
    if not with_trials:
        return None
    return _arrange(
        [_boxes(panel) for panel in with_trials],
        "Greedy-Gnorm against heads removed at random",
        "A box holds the middle half of the random trials; its line reaches from the worst to the best. Dashed: the "
        f"dense model. {source}",
    )


def _boxes(panel: Panel) -> alt.LayerChart:
    boxes = box_rows(panel.trials, panel.heads)
    line = [{"removed": r, "value": v, "what": CRITERIA["gnorm"]} for r, v in panel.curves.get("gnorm", ())]
    scale = alt.Scale(domain=[CRITERIA["gnorm"], RANDOM, DENSE], range=[BLUE, ORANGE, "#555555"])
    legend = alt.Legend(title=None, orient="bottom", symbolType="square", symbolSize=150, labelLimit=300)
    colour = alt.Color("what:N", scale=scale, legend=legend)
    dense = [{"dense": value, "what": DENSE} for value in _dense_values(panel)]
    base = alt.Chart(_data(boxes))
    layers = [
        alt.Chart(_data(dense))
        .mark_rule(strokeDash=[6, 4], strokeWidth=1.5)
        .encode(_value_axis(panel, "dense"), color=colour),
        base.mark_rule(strokeWidth=1).encode(
            _removed_axis(panel), _value_axis(panel, "low"), alt.Y2("high"), color=colour
        ),
        base.mark_rect(fillOpacity=0.55, strokeWidth=1, stroke="#7a5200").encode(
            alt.X("left:Q"), alt.X2("right"), alt.Y("lower:Q"), alt.Y2("upper"), color=colour
        ),
        base.mark_rule(strokeWidth=1.5, color="#4d3300").encode(alt.X("left:Q"), alt.X2("right"), alt.Y("middle:Q")),
    ]
    if line:
        layers.append(
            alt.Chart(_data(line))
            .mark_line(strokeWidth=2.5, point={"size": 18} if _sparse(panel) else False)
            .encode(_removed_axis(panel), _value_axis(panel), color=colour)
        )
    count = max(len(values) for values in panel.trials.values())
    title = f"{panel.title}, {count} random trial{'s' if count > 1 else ''}"
    return alt.layer(*layers).properties(title=title, width=WIDTH, height=HEIGHT)


def _dense_values(panel: Panel) -> list[float]:
    """What was measured before the first removal, once."""
    start = dict(panel.curves.get("gnorm", ())).get(0)
    values = panel.trials.get(0, ()) if start is None else (start,)
    return list(values[:1])


def box_rows(trials: Mapping[int, Sequence[float]], heads: int) -> list[dict[str, Any]]:
    """Per number of heads removed: range, quartiles and median of the trials, and the edges of its box."""
    counts = sorted(removed for removed, values in trials.items() if values)
    if len(counts) > 33:  # runs may measure after every head: boxes would overlap
        step = -(-heads // 24)
        counts = [removed for removed in counts if removed % step == 0 or removed == heads]
    gap = min((b - a for a, b in itertools.pairwise(counts)), default=heads)
    rows = []
    for removed in counts:
        values = list(trials[removed])
        if len(values) > 1:
            lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
        else:
            lower = middle = upper = values[0]
        rows.append(
            {
                "removed": removed,
                "left": removed - 0.3 * gap,
                "right": removed + 0.3 * gap,
                "low": min(values),
                "lower": lower,
                "middle": middle,
                "upper": upper,
                "high": max(values),
                "what": RANDOM,
            }
        )
    return rows


def figure5(panels: Sequence[Panel], source: str) -> alt.TopLevelMixin | None:
    """The masks where pruning stops, one panel per model; None where there are none."""
    with_masks = [panel for panel in panels if panel.mask]
    if not with_masks:
        return None
    return _arrange(
        [_mask(panel) for panel in with_masks],
        "Heads that are kept where pruning stops",
        f"One square per head and layer. {source}",
    )


def _mask(panel: Panel) -> alt.Chart:
    """A row per layer: of a site that several layers share, the same row for each of them."""
    mask = panel.mask or []
    layers = [bits for bits in mask for _ in range(panel.uses)]
    rows = [
        {"layer": layer, "head": head, "state": "kept" if bit else "removed"}
        for layer, bits in enumerate(layers)
        for head, bit in enumerate(bits)
    ]
    kept, heads = sum(sum(bits) for bits in mask), sum(len(bits) for bits in mask)
    title = f"{panel.title}: {kept} of {heads} heads kept"
    if panel.uses > 1:
        title += f", each used in {panel.uses} layers"
    # A vertical axis title does not fit beside few rows.
    axis = alt.Axis(title="Layer", labelOverlap=True, ticks=False)
    if len(layers) < 4:
        axis = alt.Axis(title="Layer", titleAngle=0, titleAlign="right", titleBaseline="middle", ticks=False)
    colour = alt.Color(
        "state:N",
        scale=alt.Scale(domain=["kept", "removed"], range=[BLUE, "#E3E3E3"]),
        legend=alt.Legend(title=None, orient="bottom", symbolType="square", symbolSize=200),
    )
    return (
        alt.Chart(_data(rows))
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            alt.X("head:O", title="Head", axis=alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)),
            alt.Y("layer:O", axis=axis),
            colour,
        )
        .properties(
            title=title,
            width=CELL * max(len(bits) for bits in mask),
            height=min(CELL, 400 // len(layers) + 1) * len(layers),
        )
    )


def _data(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    return alt.InlineData(values=list(rows))


def _sparse(panel: Panel) -> bool:
    """Whether a curve has few points, which are then marked: there are no measurements between them."""
    return max((len(curve) for curve in panel.curves.values()), default=0) <= 40


def _removed_axis(panel: Panel) -> alt.X:
    axis = alt.Axis(values=[round(panel.heads * part / 6) for part in range(7)], format="d", grid=False)
    scale = alt.Scale(domain=[-0.03 * panel.heads, 1.03 * panel.heads], nice=False)
    return alt.X("removed:Q", title=f"Heads removed, of {panel.heads}", axis=axis, scale=scale)


def _value_axis(panel: Panel, name: str = "value") -> alt.Y:
    percent = panel.metric in ("accuracy", "f1")
    scale = alt.Scale(domain=[0, 1]) if percent else alt.Scale(zero=False)
    axis = alt.Axis(format="%", tickCount=6) if percent else alt.Axis()
    return alt.Y(f"{name}:Q", title=panel.metric.capitalize(), scale=scale, axis=axis)


def _stop_rule(panel: Panel) -> list[alt.Chart]:
    if panel.stop is None:
        return []
    rule = alt.Chart(_data([{"removed": panel.stop}])).mark_rule(strokeDash=[2, 3], color="#555555")
    return [rule.encode(_removed_axis(panel))]


def _arrange(charts: Sequence[Any], title: str, subtitle: str) -> alt.TopLevelMixin:
    grid = alt.concat(*charts, columns=COLUMNS, spacing=28)
    return apply_style(grid.properties(title=alt.TitleParams(title, subtitle=subtitle, fontSize=HEADING)))


def apply_style(chart: Any) -> alt.TopLevelMixin:
    """The common style of all figures: readable in print, on white."""
    return (
        chart.configure(background="white", padding=12, font="DejaVu Sans, Arial, sans-serif")
        .configure_title(anchor="start", fontSize=13, subtitleFontSize=11, subtitleColor="#444444", offset=10)
        .configure_axis(labelFontSize=11, titleFontSize=11, titleFontWeight="normal", gridColor="#ECECEC")
        .configure_legend(labelFontSize=11)
        .configure_view(stroke=None)
    )
