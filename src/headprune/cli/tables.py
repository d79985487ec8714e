"""Tables and charts for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headprune.cli.points import print_points
from headprune.criteria import Criterion
from headprune.criteria.scoring import ScoreResult
from headprune.measure.comparing import Comparison
from headprune.measure.costs import megabytes
from headprune.measure.inspection import Inspection
from headprune.measure.metrics import SHARES_OF_ONE
from headprune.measure.trajectory import plain
from headprune.report import gates
from headprune.report.words import (
    interval_text,
    measured_text,
    removed_text,
    spread_text,
    stop_text,
    value_text,
    verdict,
    vocabulary_text,
)
from headprune.units import Site
from headprune.units.resolve import left_whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Viridis at six points, dark = unimportant: safe for the colour-blind and readable in grey.
SHADES = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))

GLYPHS = "\u00b7\u2591\u2592\u2593\u2588"  # the same scale where there is no colour

LEAN: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}  # tables that fit 80 columns


def print_inspection(name: str, seen: Inspection, console: Console | None = None) -> None:

    console = console or Console()
    console.print(f"[bold]{escape(name)}[/bold] · {seen.model_type} · {_known_as(seen)}", soft_wrap=True)
    if seen.sites:
        console.print(_attention_table(seen))
        console.print()
    if seen.feed_forward:
        console.print(_feed_forward_table(seen))
        console.print()
    modules = Table(title="Parameters", title_justify="left", **LEAN)
    for heading in ("module", "parameters", "MB", "share"):
        left = heading == "module"
        modules.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for module, count in seen.modules.items():
        modules.add_row(escape(module), f"{count:,}", f"{megabytes(count):.2f}", f"{count / seen.parameters:.1%}")
    modules.add_section()
    modules.add_row("total", f"{seen.parameters:,}", f"{megabytes(seen.parameters):.2f}", "100.0%")
    console.print(modules)
    console.print()
    if seen.sites:
        heads = sum(site.heads for site in seen.sites)
        images = all(site.stack == "vision" for site in seen.sites)
        what = f"an image of {seen.flops.tokens} positions" if images else f"a {seen.flops.tokens}-token input"
        console.print(
            f"Its {heads} heads hold {seen.head_parameters / seen.parameters:.1%} of the parameters and "
            f"{seen.flops.head_share:.1%} of the FLOPs of {what}: the most that removing them all could save."
        )
    if seen.feed_forward:
        neurons, layers = sum(site.size for site in seen.feed_forward), len(seen.feed_forward)
        console.print(
            f"The {neurons:,} neurons of its {layers} feed-forward layers hold "
            f"{seen.neuron_parameters / seen.parameters:.1%} of the parameters and "
            f"{seen.flops.neurons / max(seen.flops.total, 1):.1%} of the FLOPs."
        )
    console.print(escape(seen.proof))
    for said in left_whole(seen.left):
        console.print(f"[yellow]Left whole: {escape(said)}.[/yellow]", soft_wrap=True)
    obstacles = {site.obstacle: site.path for site in seen.sites if site.obstacle}
    for obstacle, path in obstacles.items():
        console.print(f"[yellow]Not removable at {escape(path)}: {escape(obstacle)}.[/yellow]")


def _attention_table(seen: Inspection) -> Table:
    legend = "heads: kept / original · KV: key-value heads · width: of one head · uses: per forward pass"
    shared, table = _site_table("Attention sites", seen.sites, legend, ("kind", "heads", "KV", "width", "uses"))
    for site in seen.sites:
        table.add_row(
            str(site.index),
            site.path.removeprefix(f"{shared}."),
            site.place,
            f"{site.heads} / {site.original_heads}",
            str(site.kv_heads),
            str(site.head_dim),
            str(site.applications),
        )
    return table


def _feed_forward_table(seen: Inspection) -> Table:
    legend = "neurons: kept / original · uses: per forward pass"
    shared, table = _site_table("Feed-forward sites", seen.feed_forward, legend, ("kind", "neurons", "uses"))
    for site in seen.feed_forward:
        table.add_row(
            str(site.index),
            site.path.removeprefix(f"{shared}."),
            site.place,
            f"{site.size:,} / {site.original:,}",
            str(site.applications),
        )
    return table


def _site_table(title: str, sites: Sequence[Site], legend: str, headings: Sequence[str]) -> tuple[str, Table]:
    """An empty table of sites, and what all their paths begin with."""
    shared = _shared_start([site.path for site in sites])
    where = f" in {escape(shared)}" if shared else ""
    table = Table(title=title + where, title_justify="left", caption=legend, caption_justify="left", **LEAN)
    for heading in ("site", "path", *headings):
        # A narrow terminal folds paths, and nothing else: headings and numbers stay whole.
        left = heading in ("path", "kind")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "path", overflow="fold")
    return shared, table


def _known_as(seen: Inspection) -> str:
    return f"{seen.sites[0].family} family" if seen.known_by == "table" and seen.sites else "layout by experiment"


def _shared_start(paths: Sequence[str]) -> str:
    """The modules that all paths begin with, which need not be said in every row."""
    parts = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False))
    return ".".join(words[0] for words in same) if len(paths) > 1 else ""


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, so that stdout stays what was asked for."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(description), total=total)
        yield lambda count: progress.advance(task, count)


def print_criteria(criteria: Sequence[Criterion], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(show_lines=True)
    for heading in ("criterion", "needs", "use", "reference"):
        table.add_column(heading, no_wrap=heading == "criterion")
    for criterion in criteria:
        needs = ", ".join(criterion.needs) or "nothing"
        table.add_row(criterion.name, needs, escape(criterion.use), escape(criterion.reference) or "-")
    console.print(table)
    console.print("Put inverse: before a name to turn its order around; options go in brackets: hies(alpha=0.7).")


def print_scores(model: PreTrainedModel, name: str, result: ScoreResult, console: Console | None = None) -> None:
    """One row per site, one cell per head, shaded by rank; heads that are gone are blank. Of neurons there are too many
    for a cell each: a row has their deciles."""

    console = console or Console()
    on = f"on {result.samples} samples" if result.samples else "from the weights alone"
    console.print(f"[bold]{escape(name)}[/bold] {on}; brighter = more important", highlight=False)
    width = len(str(len(result.sites) - 1))
    for kind, rows in (("heads", _print_heads), ("neurons", _print_neurons)):
        sites = [site for site in result.sites if site.kind == kind]
        if not any(site.kept for site in sites) and (kind == "neurons" or len(sites) < len(result.sites)):
            continue
        rows(result, sites, width, console)
        scores = result.scores.tolist()
        flat = sorted((scores[site.index][member], site.index, member) for site in sites for member in site.kept)
        for what, part in (("least", flat[:5]), ("most", flat[::-1][:5])):
            listed = ", ".join(f"({site}, {member}) {value:.3g}" for value, site, member in part)
            console.print(f"{what} important (site, {kind[:-1]}): {listed}", highlight=False)
    places = "tokens" if model.main_input_name == "input_ids" else "positions"  # patches of images, frames of sounds
    seen = [f"{result.samples} samples", f"{result.tokens} {places}"] if result.samples else []
    console.print(", ".join([*seen, f"{result.seconds:.1f} s"]) + _measured(result), highlight=False, markup=False)


def score_rows(result: ScoreResult) -> list[list[float | None]]:
    """Scores as JSON can hold them: a row per site, as long as its heads, or as its own units where neurons are
    among them, which are thousands."""
    rows = [[plain(value) for value in row] for row in result.scores.tolist()]
    wide = any(site.kind == "neurons" for site in result.sites)
    return [row[: site.original] if wide else row for row, site in zip(rows, result.sites, strict=True)]


def _print_neurons(result: ScoreResult, sites: Sequence[Site], width: int, console: Console) -> None:
    ranks = _ranks(result.scores[sites[0].index :])
    for row, site in zip(ranks, sites, strict=True):
        line = Text(f"site {site.index:>{width}}  ")
        own = row[list(site.kept)].sort().values
        for part in range(11 if site.kept else 0):
            rank = own[round(part * (len(own) - 1) / 10)].item()
            line.append(GLYPHS[round(rank * 4)] * 2 if console.color_system is None else "\u2588" * 2, _shade(rank))
        line.append(f"  {site.size:,} neurons, the least to the most important")
        console.print(line, no_wrap=True, overflow="crop")


def _print_heads(result: ScoreResult, sites: Sequence[Site], width: int, console: Console) -> None:
    heads = max((site.original for site in sites), default=0)
    ranks = _ranks(result.scores[: len(sites), :heads])
    cell = max(1, min(3, (console.width - width - 6) // max(1, heads)))
    named = {3: 1, 2: 2}.get(cell, 5)  # every so many heads have their number above them
    numbers = "".join(f"{head:>{cell * named}}" for head in range(0, heads, named))
    console.print(Text(" " * (width + 5 - cell * (named - 1)) + numbers), no_wrap=True, overflow="crop")
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


def _measured(result: ScoreResult) -> str:
    """What the model is worth as it is, where there are labels to say it."""
    metric, measured = result.metric, result.measured
    if metric is None or measured is None:
        return ""
    return f" · {metric.name} of the model as it is: {measured_text(metric.name, measured.value, measured.interval)}"


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Position of each score among all, scaled to [0, 1]: criteria differ by orders of magnitude, ranks do not."""
    import torch

    there = ~scores.isnan()
    ranks = torch.zeros_like(scores)
    values = scores[there]
    order = torch.empty_like(values)
    order[values.argsort()] = torch.arange(len(values), dtype=values.dtype)
    ranks[there] = order / max(1, len(values) - 1)
    return ranks


def _shade(rank: float) -> Style:
    place = rank * (len(SHADES) - 1)
    low = min(int(place), len(SHADES) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(SHADES[low], SHADES[low + 1], strict=True))
    return Style(color="#{:02x}{:02x}{:02x}".format(*mixed))


def print_run(out: Path, record: Mapping[str, Any], console: Console | None = None) -> None:
    """How a run ended: what was removed, what it cost, what it saved, and where it is."""
    console = console or Console()
    result = record["result"]
    name = result["metric"]
    dense = measured_text(name, result["dense"], result.get("dense_interval"))
    pruned = measured_text(name, result["pruned"], result.get("pruned_interval"))
    console.print(
        f"Removed [bold]{removed_text(result)}[/bold]: {escape(f'{name} {dense} -> ')}[bold]{escape(pruned)}[/bold], "
        f"agreement with the dense model {value_text('agreement', result['agreement'])}",
        highlight=False,
    )
    settings = record["settings"]
    method = f"Criterion {settings['criterion']}, compensation {settings.get('repair', 'none')}"
    if settings.get("gates"):
        said = gates.how(record)
        method = said[0].upper() + said[1:]
    stopped = f" {stop_text(result)}" if stop_text(result) else ""
    console.print(
        f"{method}.{stopped}",
        highlight=False,
        markup=False,
    )
    if vocabulary_text(record):
        console.print(vocabulary_text(record), highlight=False, markup=False)
    saved = record.get("savings")
    print_points(record, out, console)
    if saved:
        console.print(_savings_table(saved))
        if "note" in saved:
            console.print(saved["note"], highlight=False)
    console.print(f"The run is in {escape(str(out))}; the model is in {escape(str(out / 'model'))}.", highlight=False)


def _savings_table(saved: Mapping[str, Any]) -> Table:
    dense, pruned, latency = saved["dense"], saved["pruned"], saved["latency"]
    table = Table(caption=f"latency: median of {latency['repeats']} turns, {latency['threads']} threads")
    for heading in ("", "dense", "pruned", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = [
        *((kind, dense[kind], pruned[kind], ",") for kind in ("heads", "neurons") if kind in dense),
        ("parameters", dense["parameters"], pruned["parameters"], ","),
        ("MB (float32)", dense["megabytes"], pruned["megabytes"], ",.2f"),
        ("FLOPs per sequence", dense["flops"], pruned["flops"], ".3g"),
        ("peak memory MB", dense["peak_memory_megabytes"], pruned["peak_memory_megabytes"], ",.1f"),
    ]
    if dense["megabytes_on_disk"] and pruned["megabytes_on_disk"]:
        rows.append(("MB on disk", dense["megabytes_on_disk"], pruned["megabytes_on_disk"], ",.2f"))
    if "joules_per_1000" in dense and "joules_per_1000" in pruned:
        rows.append(("joules per 1,000", dense["joules_per_1000"], pruned["joules_per_1000"], ",.1f"))
    for key, value in latency.items():
        if key.startswith("batch_"):
            rows.append((f"ms, batch of {key[6:]}", value["dense"], value["pruned"], ",.1f"))
    for what, before, after, form in rows:
        ratio = f"{after / before:.2f}" if before else "-"
        table.add_row(what, format(before, form), format(after, form), ratio)
    return table


def print_comparison(out: Path, rows: Sequence[Comparison], console: Console | None = None) -> None:
    """The table, best first, and what it means: which differences are real."""
    console = console or Console()
    name, until = rows[0].measured.name, rows[0].usable_until
    unit = " in percent" if name in SHARES_OF_ONE else ""
    legend = f"{name}{unit} / agreement with the dense model · [low, high]: 95% interval"
    legend += f" · area: of -log {name}" if rows[0].measured.logarithmic else ""
    legend += " · low..high: over the runs" if any(len(row.runs) > 1 for row in rows) else ""
    table = Table(
        title="Best first",
        title_justify="left",
        caption=escape(legend),
        caption_justify="left",
        **LEAN,
    )
    table.add_column("criterion", overflow="fold", min_width=9)
    table.add_column(f"area to\n{until:.0%} (all)" if until else "area", justify="right", no_wrap=True)
    for share in rows[0].metric:
        table.add_column(f"{share} gone", justify="right", no_wrap=True)
    table.add_column("heads\nwithin\n" + " / ".join(rows[0].removable), justify="right", no_wrap=True)
    for row in rows:
        runs = f" ({len(row.runs)} runs)" if len(row.runs) > 1 else ""
        areas = [f"{row.usable_area:.4f}", f"({row.area:.4f})" if until else ""]
        if row.spread_area is not None:
            areas.append(f"{row.spread_area.low:.2f}..{row.spread_area.high:.2f}")
        table.add_row(
            escape(row.name + runs),
            "\n".join(filter(None, areas)).replace("nan", "-"),
            *(_comparison_cell(row, share) for share in row.metric),
            " / ".join(map(str, row.removable.values())),
        )
    console.print(table)
    console.print()
    for sentence in verdict(rows):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"The runs are in {escape(str(out))}.", highlight=False)


def _comparison_cell(row: Comparison, share: str) -> str:
    """The metric and the agreement, below them the interval, and the spread of several runs."""
    name = row.measured.name

    def short(kind: str, value: float | None) -> str:
        text = value_text(kind, value)
        return f"{100 * value:.1f}" if text.endswith("%") and value is not None else text

    lines = [
        f"{short(name, row.metric[share])} / {short('agreement', row.agreement[share])}",
        interval_text(name, row.interval[share]),
        spread_text(name, row.spread[share]),
    ]
    return escape("\n".join(line for line in lines if line))
