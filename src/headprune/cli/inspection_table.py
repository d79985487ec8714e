"""Prints the sites and parameters of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.table_style import LEAN
from headprune.measure.costs import megabytes
from headprune.measure.inspection import Inspection
from headprune.units import Site
from headprune.units.resolve import left_whole


def print_inspection(name: str, inspection: Inspection, console: Console | None = None) -> None:
    console = console or Console()
    console.print(
        f"[bold]{escape(name)}[/bold] · {inspection.model_type} · {_layout_source(inspection)}", soft_wrap=True
    )
    if inspection.sites:
        console.print(_attention_table(inspection))
        console.print()
    if inspection.feed_forward:
        console.print(_feed_forward_table(inspection))
        console.print()
    modules = Table(title="Parameters", title_justify="left", **LEAN)
    for heading in ("module", "parameters", "MB", "share"):
        left = heading == "module"
        modules.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for module, count in inspection.modules.items():
        modules.add_row(escape(module), f"{count:,}", f"{megabytes(count):.2f}", f"{count / inspection.parameters:.1%}")
    modules.add_section()
    modules.add_row("total", f"{inspection.parameters:,}", f"{megabytes(inspection.parameters):.2f}", "100.0%")
    console.print(modules)
    console.print()
    if inspection.sites:
        heads = sum(site.heads for site in inspection.sites)
        images = all(site.stack == "vision" for site in inspection.sites)
        input_text = (
            f"an image of {inspection.flops.tokens} positions" if images else f"a {inspection.flops.tokens}-token input"
        )
        console.print(
            f"Its {heads} heads hold {inspection.head_parameters / inspection.parameters:.1%} of the parameters and "
            f"{inspection.flops.head_share:.1%} of the FLOPs of {input_text}: the most that removing all could save."
        )
    if inspection.feed_forward:
        neurons, layers = sum(site.size for site in inspection.feed_forward), len(inspection.feed_forward)
        console.print(
            f"The {neurons:,} neurons of its {layers} feed-forward layers hold "
            f"{inspection.neuron_parameters / inspection.parameters:.1%} of the parameters and "
            f"{inspection.flops.neurons / max(inspection.flops.total, 1):.1%} of the FLOPs."
        )
    console.print(escape(inspection.proof))
    for text in left_whole(inspection.left):
        console.print(f"[yellow]Not pruned: {escape(text)}.[/yellow]", soft_wrap=True)
    obstacles = {site.obstacle: site.path for site in inspection.sites if site.obstacle}
    for obstacle, path in obstacles.items():
        console.print(f"[yellow]Not removable at {escape(path)}: {escape(obstacle)}.[/yellow]")


def _attention_table(inspection: Inspection) -> Table:
    legend = "heads: kept / original · KV: key-value heads · width: of one head · uses: per forward pass"
    shared, table = _site_table("Attention sites", inspection.sites, legend, ("kind", "heads", "KV", "width", "uses"))
    for site in inspection.sites:
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


def _feed_forward_table(inspection: Inspection) -> Table:
    legend = "neurons: kept / original · uses: per forward pass"
    shared, table = _site_table("Feed-forward sites", inspection.feed_forward, legend, ("kind", "neurons", "uses"))
    for site in inspection.feed_forward:
        table.add_row(
            str(site.index),
            site.path.removeprefix(f"{shared}."),
            site.place,
            f"{site.size:,} / {site.original:,}",
            str(site.applications),
        )
    return table


def _site_table(title: str, sites: Sequence[Site], legend: str, headings: Sequence[str]) -> tuple[str, Table]:
    """An empty table of sites, and the common prefix of their paths."""
    shared = _common_prefix([site.path for site in sites])
    where = f" in {escape(shared)}" if shared else ""
    table = Table(title=title + where, title_justify="left", caption=legend, caption_justify="left", **LEAN)
    for heading in ("site", "path", *headings):
        # In a narrow terminal only paths are folded.
        left = heading in ("path", "kind")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "path", overflow="fold")
    return shared, table


def _layout_source(inspection: Inspection) -> str:
    return (
        f"{inspection.sites[0].family} family"
        if inspection.known_by == "table" and inspection.sites
        else "layout discovered"
    )


def _common_prefix(paths: Sequence[str]) -> str:
    """The common prefix of all paths, which is shown once."""
    parts = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False))
    return ".".join(words[0] for words in same) if len(paths) > 1 else ""
