"""Prints scores: of heads as a heat map, of neurons by their deciles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.text import Text

from headprune.criteria.scoring import ScoreResult
from headprune.display import counted
from headprune.measure.trajectory import finite_or_none
from headprune.reports.format import (
    measured_text,
)
from headprune.units import Site

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Viridis at six points, dark = unimportant: safe for the colour-blind and readable in grey.
SHADES = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))

GLYPHS = "\u00b7\u2591\u2592\u2593\u2588"  # the same scale where there is no colour


def print_scores(model: PreTrainedModel, name: str, result: ScoreResult, console: Console | None = None) -> None:
    """Print one row per site with one cell per head, shaded by rank; removed heads are blank. Of neurons a row has the
    deciles."""

    console = console or Console()
    on = f"on {counted(result.samples, 'sample')}" if result.samples else "from the weights alone"
    console.print(f"[bold]{escape(name)}[/bold] {on}; brighter = more important", highlight=False)
    width = len(str(len(result.sites) - 1))
    for kind, rows in (("heads", _print_heads), ("neurons", _print_neurons)):
        sites = [site for site in result.with_scores if site.kind == kind]
        if not any(site.kept for site in sites) and (kind == "neurons" or len(sites) < len(result.sites)):
            continue
        rows(result, sites, width, console)
        scores = result.scores.tolist()
        flat = sorted((scores[site.index][member], site.index, member) for site in sites for member in site.kept)
        for what, part in (("least", flat[:5]), ("most", flat[::-1][:5])):
            entries = ", ".join(f"({site}, {member}) {value:.3g}" for value, site, member in part)
            console.print(f"{what} important (site, {kind[:-1]}): {entries}", highlight=False)
    position = "token" if model.main_input_name == "input_ids" else "position"  # patches of images, frames of audio
    parts = [counted(result.samples, "sample"), counted(result.tokens, position)] if result.samples else []
    console.print(", ".join([*parts, f"{result.seconds:.1f} s"]) + _metric_text(result), highlight=False, markup=False)


def score_rows(result: ScoreResult) -> list[list[float | None]]:
    """Scores for JSON: a row per site, padded to the widest site, or, with neurons, as long as the site is wide."""
    rows = [[finite_or_none(value) for value in row] for row in result.scores.tolist()]
    wide = any(site.kind == "neurons" for site in result.sites)
    return [row[: site.original] if wide else row for row, site in zip(rows, result.sites, strict=True)]


def _print_neurons(result: ScoreResult, sites: Sequence[Site], width: int, console: Console) -> None:
    ranks = _ranks(result.scores[sites[0].index :])
    for row, site in zip(ranks, sites, strict=True):
        line = Text(f"site {site.index:>{width}}  ")
        values = row[list(site.kept)].sort().values
        for part in range(11 if site.kept else 0):
            rank = values[round(part * (len(values) - 1) / 10)].item()
            line.append(GLYPHS[round(rank * 4)] * 2 if console.color_system is None else "\u2588" * 2, _shade(rank))
        line.append(f"  {site.size:,} neurons, the least to the most important")
        console.print(line, no_wrap=True, overflow="crop")


def _print_heads(result: ScoreResult, sites: Sequence[Site], width: int, console: Console) -> None:
    heads = max((site.original for site in sites), default=0)
    ranks = _ranks(result.scores[: len(sites), :heads])
    cell = max(1, min(3, (console.width - width - 6) // max(1, heads)))
    heads_per_number = {3: 1, 2: 2}.get(cell, 5)  # heads per number in the heading
    numbers = "".join(f"{head:>{cell * heads_per_number}}" for head in range(0, heads, heads_per_number))
    console.print(Text(" " * (width + 5 - cell * (heads_per_number - 1)) + numbers), no_wrap=True, overflow="crop")
    for site in sites:
        row = Text(f"site {site.index:>{width}}")
        for head in range(site.original):
            if head in site.kept:
                rank = ranks[site.index, head].item()
                glyph = GLYPHS[round(rank * 4)].rjust(cell) if console.color_system is None else "\u2588" * cell
                row.append(glyph, _shade(rank))
            else:
                row.append(" " * cell)
        console.print(row, no_wrap=True, overflow="crop")


def _metric_text(result: ScoreResult) -> str:
    """The metric of the model as it is, where there are labels."""
    metric, metric_value = result.metric, result.metric_value
    if metric is None or metric_value is None:
        return ""
    value = measured_text(metric.name, metric_value.value, metric_value.interval)
    return f" · {metric.name} of the model as it is: {value}"


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Ranks of scores, scaled to [0, 1], as scores of criteria differ by orders of magnitude."""
    import torch

    present = ~scores.isnan()
    ranks = torch.zeros_like(scores)
    values = scores[present]
    order = torch.empty_like(values)
    order[values.argsort()] = torch.arange(len(values), dtype=values.dtype)
    ranks[present] = order / max(1, len(values) - 1)
    return ranks


def _shade(rank: float) -> Style:
    position = rank * (len(SHADES) - 1)
    low = min(int(position), len(SHADES) - 2)
    mixed = (round(a + (b - a) * (position - low)) for a, b in zip(SHADES[low], SHADES[low + 1], strict=True))
    return Style(color="#{:02x}{:02x}{:02x}".format(*mixed))
