"""Writes scores as a table or as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_bytes, write_text
from headprune.criteria.scoring import ScoreResult
from headprune.display import counted
from headprune.errors import DataError
from headprune.extras import require
from headprune.units import Site

PICTURES = ("png", "svg", "pdf")
FORMATS = ("csv", *PICTURES)
CELL = 22  # pixels


def check_target(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if out.suffix.lower().lstrip(".") not in FORMATS:
        raise DataError(f"Scores are written as {', '.join(FORMATS)}, by the ending of the name, not as {out.name}.")
    path_exists(out, DataError)
    if not out.parent.is_dir():
        raise DataError(f"There is no directory {out.parent} to write {out.name} to; create it first.")
    if out.is_dir():
        raise DataError(f"{out} is a directory; name a file in it.")


def write_scores(name: str, result: ScoreResult, out: Path) -> None:
    form = out.suffix.lower().lstrip(".")
    if form == "csv":
        write_text(out, scores_csv(result))
        return
    with require("report", "Pictures need"):
        import vl_convert
    chart = scores_chart(name, result).to_json()
    if form == "png":
        write_bytes(out, vl_convert.vegalite_to_png(chart, scale=2.0))
    elif form == "svg":
        write_text(out, vl_convert.vegalite_to_svg(chart))
    else:
        write_bytes(out, vl_convert.vegalite_to_pdf(chart))


def scores_csv(result: ScoreResult) -> str:
    """A row per head, and per neuron where neurons were scored."""
    scored = [site for site in result.sites if site.kept or site.kind == "heads"]
    lines = [f"site,{'unit' if any(site.kind == 'neurons' for site in scored) else 'head'},path,score"]
    for site in scored:
        values = result.scores[site.index].tolist()
        lines += [
            f"{site.index},{member},{site.path},{'' if math.isnan(values[member]) else format(values[member], '.9g')}"
            for member in range(site.original)
        ]
    return "\n".join(lines) + "\n"


def scores_chart(name: str, result: ScoreResult) -> Any:
    """A cell per head, coloured by rank, as scores of criteria differ by orders of magnitude. Neurons are too many for
    a cell each: a row has the deciles of a layer."""
    with require("report", "Pictures need"):
        import altair as alt
    measured = (
        ""
        if result.metric is None or result.metric_value is None
        else f"; {result.metric.name} {result.metric_value.value:.4g}"
    )
    panels = []
    for kind, cells in (("heads", _head_cells), ("neurons", _decile_cells)):
        sites = [site for site in result.with_scores if site.kind == kind]
        if any(site.kept for site in sites) or len(sites) == len(result.sites):
            subtitle = counted(result.samples, "sample") + measured
            title = alt.TitleParams(f"Scores of {kind} by {name}", subtitle=subtitle, anchor="start")
            panels.append(_panel(cells(result, sites), "head" if kind == "heads" else "decile", title))
    return panels[0] if len(panels) == 1 else alt.hconcat(*panels)


def _panel(rows: list[dict[str, Any]], column: str, title: Any) -> Any:
    import altair as alt

    shade = alt.Color(
        "rank:Q",
        scale=alt.Scale(scheme="viridis", domain=[0, 1]),
        legend=alt.Legend(title="rank", format="%", values=[0, 0.5, 1]),
    )
    return (
        alt.Chart(alt.Data(values=rows), title=title)
        .mark_rect()
        .encode(
            x=alt.X(f"{column}:O", title=column, axis=alt.Axis(labelAngle=0, ticks=False, domain=False)),
            y=alt.Y("site:O", title="site", axis=alt.Axis(ticks=False, domain=False)),
            color=shade,
            tooltip=["site:O", f"{column}:O", alt.Tooltip("score:Q", format=".4g")],
        )
        .properties(width=alt.Step(CELL), height=alt.Step(CELL))
    )


def _head_cells(result: ScoreResult, sites: Sequence[Site]) -> list[dict[str, Any]]:
    return [
        {"site": site, "head": member, "score": value, "rank": rank}
        for site, member, value, rank in _ranked(result, sites)
    ]


def _decile_cells(result: ScoreResult, sites: Sequence[Site]) -> list[dict[str, Any]]:
    """From the least important neuron of a layer, 0, to its most important one, 10."""
    layers: dict[int, list[tuple[float, float]]] = {}
    for site, _, value, rank in _ranked(result, sites):
        layers.setdefault(site, []).append((rank, value))
    return [
        {"site": site, "decile": part, "score": value, "rank": rank}
        for site, values in layers.items()
        for part in range(11)
        for rank, value in [sorted(values)[round(part * (len(values) - 1) / 10)]]
    ]


def _ranked(result: ScoreResult, sites: Sequence[Site]) -> list[tuple[int, int, float, float]]:
    """(site, member, score, rank) of all members that are left, ranks scaled to [0, 1]."""
    cells = [(site.index, member) for site in sites for member in site.kept]
    values = [float(result.scores[cell]) for cell in cells]
    rank_of = {index: rank for rank, index in enumerate(sorted(range(len(cells)), key=values.__getitem__))}
    return [(*cell, values[index], rank_of[index] / max(1, len(cells) - 1)) for index, cell in enumerate(cells)]
