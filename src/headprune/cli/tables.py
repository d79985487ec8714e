"""Tables and charts for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.criteria import Criterion
    from headprune.criteria.scoring import ScoreResult
    from headprune.measure.inspection import Inspection
    from headprune.runs.compare import Comparison

# Viridis at six points, dark = unimportant: safe for the colour-blind and readable in grey.
SHADES = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))

GLYPHS = "\u00b7\u2591\u2592\u2593\u2588"  # the same scale where there is no colour


def print_inspection(name: str, seen: Inspection, console: Console | None = None) -> None:
    from headprune.measure.costs import megabytes

    console = console or Console()
    console.print(f"[bold]{escape(name)}[/bold] · {seen.model_type} · {seen.sites[0].family} family")
    sites = Table(
        title="Attention sites",
        title_justify="left",
        caption="heads: kept / original · KV: key-value heads · width: of one head · uses: per forward pass",
        caption_justify="left",
    )
    for heading in ("site", "path", "kind", "heads", "KV", "width", "uses"):
        sites.add_column(heading, justify="left" if heading in ("path", "kind") else "right", no_wrap=True)
    for site in seen.sites:
        sites.add_row(
            str(site.index),
            site.path,
            site.place,
            f"{site.heads} / {site.original_heads}",
            str(site.kv_heads),
            str(site.head_dim),
            str(site.applications),
        )
    console.print(sites)
    modules = Table(title="Parameters", title_justify="left")
    for heading in ("module", "parameters", "MB", "share"):
        modules.add_column(heading, justify="left" if heading == "module" else "right")
    for module, count in seen.modules.items():
        modules.add_row(module, f"{count:,}", f"{megabytes(count):.2f}", f"{count / seen.parameters:.1%}")
    modules.add_section()
    modules.add_row("total", f"{seen.parameters:,}", f"{megabytes(seen.parameters):.2f}", "100.0%")
    console.print(modules)
    heads = sum(site.heads for site in seen.sites)
    console.print(
        f"Its {heads} heads hold {seen.head_parameters / seen.parameters:.1%} of the parameters and "
        f"{seen.flops.head_share:.1%} of the FLOPs of a {seen.flops.tokens}-token input: the most that removing them "
        "all could save."
    )
    obstacles = {site.obstacle: site.path for site in seen.sites if site.obstacle}
    for obstacle, path in obstacles.items():
        console.print(f"[yellow]Not removable at {escape(path)}: {escape(obstacle)}.[/yellow]")


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
    """One row per site, one cell per head, shaded by rank; heads that are gone are blank."""
    from headprune.units import resolve

    console = console or Console()
    sites = resolve(model)
    ranks = _ranks(result.scores)
    width = len(str(len(sites) - 1))
    console.print(f"[bold]{escape(name)}[/bold] on {result.samples} samples; brighter = more important")
    console.print(Text(" " * (width + 5) + "".join(f"{head:>3}" for head in range(result.scores.shape[1]))))
    for site in sites:
        row = Text(f"site {site.index:>{width}}")
        for head in range(site.original_heads):
            if head in site.kept:
                rank = ranks[site.index, head].item()
                row.append(
                    f"  {GLYPHS[round(rank * 4)]}" if console.color_system is None else "\u2588" * 3, _shade(rank)
                )
            else:
                row.append("   ")
        console.print(row, no_wrap=True, overflow="crop")
    flat = [(result.scores[site.index, head].item(), site.index, head) for site in sites for head in site.kept]
    flat.sort()
    for what, part in (("least", flat[:5]), ("most", flat[::-1][:5])):
        listed = ", ".join(f"({site}, {head}) {value:.3g}" for value, site, head in part)
        console.print(f"{what} important (site, head): {listed}", highlight=False)
    accuracy = "" if result.accuracy is None else f" · accuracy of the model as it is: {result.accuracy:.2%}"
    console.print(
        f"{result.samples} samples, {result.tokens} tokens, {result.seconds:.1f} s{accuracy}", highlight=False
    )


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
    removed = result["heads_before"] - result["heads_after"]
    name = result["metric"]
    console.print(
        f"Removed [bold]{removed} of {result['heads_before']}[/bold] heads: {name} {_value(name, result['dense'])} -> "
        f"[bold]{_value(name, result['pruned'])}[/bold], agreement with the dense model "
        f"{_value('agreement', result['agreement'])}",
        highlight=False,
    )
    compensate = record["settings"].get("compensate", "none")
    console.print(
        f"Criterion {record['settings']['criterion']}, compensation {compensate}.", highlight=False, markup=False
    )
    saved = record.get("savings")
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
        ("heads", dense["heads"], pruned["heads"], ","),
        ("parameters", dense["parameters"], pruned["parameters"], ","),
        ("MB (float32)", dense["megabytes"], pruned["megabytes"], ",.2f"),
        ("FLOPs per sequence", dense["flops"], pruned["flops"], ".3g"),
        ("peak memory MB", dense["peak_memory_megabytes"], pruned["peak_memory_megabytes"], ",.1f"),
    ]
    if dense["megabytes_on_disk"] and pruned["megabytes_on_disk"]:
        rows.append(("MB on disk", dense["megabytes_on_disk"], pruned["megabytes_on_disk"], ",.2f"))
    for key, value in latency.items():
        if key.startswith("batch_"):
            rows.append((f"ms, batch of {key[6:]}", value["dense"], value["pruned"], ",.1f"))
    for what, before, after, form in rows:
        ratio = f"{after / before:.2f}" if before else "-"
        table.add_row(what, format(before, form), format(after, form), ratio)
    return table


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if metric in ("accuracy", "agreement", "f1") else f"{value:.4g}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_comparison(out: Path, rows: Sequence[Comparison], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title="Best first", title_justify="left")
    table.add_column("criterion", no_wrap=True)
    table.add_column("area", justify="right")
    for share in rows[0].metric:
        table.add_column(f"{share} gone\nmetric / agree", justify="right")
    for drop in rows[0].removable:
        table.add_column(f"heads\nwithin {drop}", justify="right")
    for row in rows:
        runs = f" ({len(row.runs)} runs)" if len(row.runs) > 1 else ""
        pairs = [f"{_short(row.metric[share])} / {_short(row.agreement[share])}" for share in row.metric]
        table.add_row(row.name + runs, f"{row.area:.4f}", *pairs, *map(str, row.removable.values()))
    console.print(table)
    console.print(f"The runs are in {escape(str(out))}.", highlight=False)
