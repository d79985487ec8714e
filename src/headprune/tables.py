"""Tables and charts for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.costs import megabytes
from headprune.inspection import Inspection


def print_inspection(name: str, seen: Inspection, console: Console | None = None) -> None:
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
            site.kind,
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
