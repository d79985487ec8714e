"""Scores to files: a table, or the heat map as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.criteria.scoring import ScoreResult
from headprune.errors import DataError
from headprune.extras import needed
from headprune.store.files import is_there, write_bytes, write_text
from headprune.units import resolve

PICTURES = ("png", "svg", "pdf")
FORMATS = ("csv", *PICTURES)
CELL = 22  # pixels


def check_target(out: Path) -> None:
    """Refuse a place that cannot be written to, before anything is computed."""
    if out.suffix.lower().lstrip(".") not in FORMATS:
        raise DataError(f"Scores are written as {', '.join(FORMATS)}, by the ending of the name, not as {out.name}.")
    is_there(out, DataError)
    if not out.parent.is_dir():
        raise DataError(f"There is no directory {out.parent} to write {out.name} to; make it first.")
    if out.is_dir():
        raise DataError(f"{out} is a directory; name a file in it.")


def write_scores(model: PreTrainedModel, name: str, result: ScoreResult, out: Path) -> None:
    form = out.suffix.lower().lstrip(".")
    if form == "csv":
        write_text(out, scores_csv(model, result))
        return
    with needed("report", "Pictures need"):
        import vl_convert
    chart = scores_chart(model, name, result).to_json()
    if form == "png":
        write_bytes(out, vl_convert.vegalite_to_png(chart, scale=2.0))
    elif form == "svg":
        write_text(out, vl_convert.vegalite_to_svg(chart))
    else:
        write_bytes(out, vl_convert.vegalite_to_pdf(chart))


def scores_csv(model: PreTrainedModel, result: ScoreResult) -> str:
    lines = ["site,head,path,score"]
    for site in resolve(model):
        for member in range(site.original):
            value = f"{result.scores[site.index, member].item():.9g}" if member in site.kept else ""
            lines.append(f"{site.index},{member},{site.path},{value}")
    return "\n".join(lines) + "\n"


def scores_chart(model: PreTrainedModel, name: str, result: ScoreResult) -> Any:
    """A cell per head, coloured by rank, since criteria differ by orders of magnitude and ranks do not."""
    with needed("report", "Pictures need"):
        import altair as alt
    cells = [(site.index, member) for site in resolve(model) for member in site.kept]
    values = [float(result.scores[cell]) for cell in cells]
    places = {place: rank for rank, place in enumerate(sorted(range(len(cells)), key=values.__getitem__))}
    rows = [
        {"site": site, "head": member, "score": value, "rank": places[place] / max(1, len(cells) - 1)}
        for place, ((site, member), value) in enumerate(zip(cells, values, strict=True))
    ]
    said = (
        ""
        if result.metric is None or result.measured is None
        else f"; {result.metric.name} {result.measured.value:.4g}"
    )
    title = alt.TitleParams(f"Scores of heads by {name}", subtitle=f"{result.samples} samples{said}", anchor="start")
    shade = alt.Color(
        "rank:Q",
        scale=alt.Scale(scheme="viridis", domain=[0, 1]),
        legend=alt.Legend(title="rank", format="%", values=[0, 0.5, 1]),
    )
    return (
        alt.Chart(alt.Data(values=rows), title=title)
        .mark_rect()
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, ticks=False, domain=False)),
            y=alt.Y("site:O", title="site", axis=alt.Axis(ticks=False, domain=False)),
            color=shade,
            tooltip=["site:O", "head:O", alt.Tooltip("score:Q", format=".4g")],
        )
        .properties(width=alt.Step(CELL), height=alt.Step(CELL))
    )
