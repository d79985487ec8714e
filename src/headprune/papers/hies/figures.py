"""The figures of `headprune reproduce hies`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from headprune.extras import require
from headprune.papers.figures import BLUE, GREY, ORANGE, SKY, VERMILION, apply_style
from headprune.papers.hies.outcome import Outcome
from headprune.papers.hies.plan import HIES, NAMES

with require("report", "Figures need"):
    import altair as alt

GREEN, PURPLE, YELLOW, BLACK, NAVY = "#009E73", "#CC79A7", "#F0E442", "#000000", "#4B4B8F"
COLOURS = dict(zip(NAMES, (BLUE, NAVY, VERMILION, GREY, YELLOW, PURPLE, ORANGE, SKY, GREEN, BLACK), strict=True))
WIDTH, HEIGHT, COLUMNS = 300, 200, 2
TITLES = {"metric": "Accuracy", "stability": "Share of predictions equal to the dense model's"}


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "accuracy": _curves(outcomes, "metric"),
        "stability": _curves(outcomes, "stability"),
        "alpha": _alphas(outcomes),
        "scores": _scatter(outcomes),
        "heads": _heads(outcomes),
        "alpha-curves": _alpha_curves(outcomes),
    }


def _curves(outcomes: Sequence[Outcome], measure: str) -> Any:
    """Lines through the means over seeds, with the range over seeds of HIES and HIS as bands."""
    panels = []
    for outcome in outcomes:
        start = outcome.about["dense"] if measure == "metric" else 1.0
        rows = []
        for name in NAMES:
            rows.append({"removed": 0.0, "value": start, "low": start, "high": start, "criterion": name})
            for share in outcome.shares:
                values = [cell[measure] for cell in outcome.cells(name, share)]
                low, high = min(values), max(values)
                mean = statistics.fmean(values)
                rows.append({"removed": share, "value": mean, "low": low, "high": high, "criterion": name})
        colour = alt.Color(
            "criterion:N",
            scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
            legend=alt.Legend(
                title=None, orient="bottom", columns=5, symbolType="stroke", symbolStrokeWidth=3, symbolOpacity=1
            ),
        )
        axis = alt.X("removed:Q", title="share of heads removed", axis=alt.Axis(format="%"))
        data = alt.Data(values=rows)
        lines = (
            alt.Chart(data)
            .mark_line(point={"size": 16}, strokeWidth=2)
            .encode(
                axis,
                alt.Y("value:Q", title=None, axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
                color=colour,
            )
        )
        bands = (
            alt.Chart(data)
            .transform_filter(alt.FieldOneOfPredicate("criterion", [HIES, "HIS"]))
            .mark_area(opacity=0.15)
            .encode(axis, alt.Y("low:Q", title=None), alt.Y2("high:Q"), color=colour)
        )
        panels.append(alt.layer(bands, lines).properties(title=outcome.title, width=WIDTH, height=HEIGHT))
    text = f"{TITLES[measure]} as heads are removed, scored once on the dense model"
    return _arrange(panels, text, "Mean over seeds; bands of HIES and HIS: range over seeds.")


def _alphas(outcomes: Sequence[Outcome]) -> Any:
    rows = [
        {"alpha": float(alpha), "area": statistics.fmean(values), "model": outcome.title}
        for outcome in outcomes
        for alpha, values in outcome.alpha_areas().items()
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True, strokeWidth=2)
        .encode(
            alt.X("alpha:Q", title="alpha: 0 is attention entropy alone"),
            alt.Y("area:Q", title="weighted area", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", legend=alt.Legend(title=None, orient="bottom", columns=2, labelLimit=400)),
        )
        .properties(width=2 * WIDTH, height=HEIGHT)
    )
    return _arrange([chart], "Accuracy of HIES on the validation samples by alpha", "Mean over seeds.")


def _scatter(outcomes: Sequence[Outcome]) -> Any:
    """A point per head: its importance and its entropy, of the first seed."""
    panels = []
    for outcome in outcomes:
        scores = outcome.results[0]["scores"]
        rows = [
            {"importance": his, "entropy": -ae, "layer": layer}
            for layer, (row, other) in enumerate(zip(scores["HIS"], scores["AE"], strict=True))
            for his, ae in zip(row, other, strict=True)
            if his is not None and ae is not None
        ]
        panels.append(
            alt.Chart(alt.Data(values=rows))
            .mark_circle(size=45, opacity=0.8)
            .encode(
                alt.X("entropy:Q", title="attention entropy (nats)", scale=alt.Scale(zero=False)),
                alt.Y("importance:Q", title="HIS"),
                color=alt.Color("layer:O", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title="site")),
            )
            .properties(title=outcome.title, width=WIDTH, height=HEIGHT)
        )
    return _arrange(panels, "Importance and attention entropy of every head", "Scores of the first seed.", share=False)


def _heads(outcomes: Sequence[Outcome]) -> Any:
    """A square per head, as dark as the share of seeds in which it is removed: by HIS on the left, by HIES on the
    right."""
    panels = []
    for outcome in outcomes:
        share = outcome.shares[len(outcome.shares) // 2]
        for name in ("HIS", HIES):
            cells = outcome.cells(name, share)
            rows = []
            for site, heads in enumerate(outcome.heads()):
                for head in sorted(heads):
                    gone = statistics.fmean(head not in [*cell["kept"].values()][site] for cell in cells)
                    rows.append({"site": site, "head": head, "removed": gone})
            panels.append(
                alt.Chart(alt.Data(values=rows))
                .mark_rect(stroke="white")
                .encode(
                    alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
                    alt.Y("site:O", title="site", sort="descending"),
                    alt.Color(
                        "removed:Q",
                        scale=alt.Scale(scheme="blues", domain=[0, 1]),
                        legend=alt.Legend(title="removed", format="%"),
                    ),
                )
                .properties(title=f"{outcome.title}: {name}, {share:.0%} removed", width=WIDTH, height=HEIGHT)
            )
    return _arrange(panels, "Which heads are removed", "Share of the seeds in which a head is removed.", share=False)


def _alpha_curves(outcomes: Sequence[Outcome]) -> Any:
    """Accuracy on the validation samples by the best, the median and the worst alpha, by weighted area."""
    panels = []
    for outcome in outcomes:
        curves = outcome.alpha_curves()
        areas = {alpha: statistics.fmean(values) for alpha, values in outcome.alpha_areas().items()}
        ranked = sorted(curves, key=lambda alpha: areas[alpha])
        named = {"best": ranked[-1], "median": ranked[len(ranked) // 2], "worst": ranked[0]}
        rows = [
            {"removed": share, "value": value, "alpha": f"{what}: {alpha}"}
            for what, alpha in named.items()
            for share, value in zip(outcome.shares, curves[alpha], strict=True)
        ]
        panels.append(
            alt.Chart(alt.Data(values=rows))
            .mark_line(point=True, strokeWidth=2)
            .encode(
                alt.X("removed:Q", title="share of heads removed", axis=alt.Axis(format="%")),
                alt.Y("value:Q", title=None, axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
                color=alt.Color(
                    "alpha:N",
                    scale=alt.Scale(domain=[f"{w}: {a}" for w, a in named.items()], range=[BLUE, GREY, VERMILION]),
                    legend=alt.Legend(title="alpha", orient="bottom"),
                ),
            )
            .properties(title=outcome.title, width=WIDTH, height=HEIGHT)
        )
    text = "Accuracy of HIES on the validation samples by the best, the median and the worst alpha"
    return _arrange(panels, text, "Mean over seeds.", share=False)


def _arrange(panels: Sequence[Any], title: str, note: str, *, share: bool = True) -> Any:
    chart = alt.concat(*panels, columns=COLUMNS)
    if not share:
        chart = chart.resolve_scale(color="independent")
    return apply_style(chart.properties(title=alt.TitleParams(title, subtitle=note, anchor="start")))
