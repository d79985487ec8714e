"""Prints the results of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.table_style import LEAN
from headprune.measure.compare_at_budget import AtBudget
from headprune.measure.intervals import Interval
from headprune.measure.metrics import SHARES_OF_ONE
from headprune.reports.format import measured_text, spread_text, value_text, verdict_at_budget
from headprune.runs.studies.summary import GroupResult, over_seeds, standings


def print_at_budget(out: Path, rows: Sequence[AtBudget], console: Console | None = None) -> None:
    """Print models at the same budget, best first, and which differences are significant."""
    console = console or Console()
    name = rows[0].measured.name
    table = Table(
        title="Best first at this budget",
        title_justify="left",
        caption=escape("[low, high]: 95% interval · left: of the dense model"),
        caption_justify="left",
        **LEAN,
    )
    table.add_column("criterion", overflow="fold", min_width=9)
    for heading in (name, "agreement", "parameters\nleft", "FLOPs\nleft"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        runs = f" ({len(row.runs)} runs)" if len(row.runs) > 1 else ""
        measured = measured_text(name, row.metric, row.interval)
        spread = spread_text(name, row.spread)
        left = ("-" if row.shares[part] is None else f"{row.shares[part]:.1%}" for part in ("parameters", "flops"))
        table.add_row(
            escape("\n".join(filter(None, (row.name + runs, row.schedule)))),
            escape(measured + (f"\n{spread}" if spread else "")),
            value_text("agreement", row.agreement),
            *left,
        )
    console.print(table)
    console.print()
    for sentence in verdict_at_budget(rows):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"The runs are in {escape(str(out))}.", highlight=False)


def print_study(out: Path, results: Sequence[GroupResult], console: Console | None = None) -> None:
    """Print the best of every comparison, and the criteria by mean rank over all of them."""
    console = console or Console()
    table = Table(title="Comparisons", title_justify="left", **LEAN)
    for heading in ("model", "data", "seed", "budget", "best", "value", "then"):
        number = heading in ("seed", "value")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for result in results:
        model, data, seed, budget = map(escape, result.group.labels)
        first = result.rows[0]
        value = (
            measured_text(first.measured.name, first.metric, first.interval)
            if isinstance(first, AtBudget)
            else f"area {first.usable_area:.4f}"
        )
        second = escape(result.rows[1].name) if len(result.rows) > 1 and result.best else "-"
        table.add_row(
            model,
            data,
            seed.removeprefix("seed"),
            budget,
            escape(result.best or "-"),
            escape(value) if result.best else "-",
            second,
        )
    console.print(table)
    console.print()
    overall = Table(title="Criteria over all of them", title_justify="left", **LEAN)
    for heading in ("criterion", "mean rank", "best in"):
        overall.add_column(heading, justify="left" if heading == "criterion" else "right", overflow="fold")
    for standing in standings(results):
        overall.add_row(escape(standing.name), f"{standing.mean_rank:.2f}", f"{standing.best_in} of {standing.groups}")
    console.print(overall)
    _print_over_seeds(console, [mean for mean in over_seeds(results) if mean["seeds"] > 1])
    console.print(
        f"Each comparison has a report; study.json and study.csv in {escape(str(out))} summarise all.", highlight=False
    )


def _print_over_seeds(console: Console, means: Sequence[dict[str, Any]]) -> None:
    """Mean and standard deviation over seeds, below them lowest and highest, at every share removed or at the
    budget."""
    if not means:
        return
    table = Table(
        title=f"Over {means[0]['seeds']} seeds",
        title_justify="left",
        caption="mean ± standard deviation · low..high: over the seeds",
        caption_justify="left",
        **LEAN,
    )
    one_subject = len({(mean["model"], mean["data"], mean["budget"]) for mean in means}) == 1
    shares = list(dict.fromkeys(share for mean in means for share in (mean["at"] or {"budget": None})))
    table.add_column("criterion", overflow="fold", min_width=9)
    for share in shares:
        table.add_column(f"{share} gone" if share != "budget" else "at the budget", justify="right")
    for mean in means:
        subject = [] if one_subject else [" ".join((mean["model"], mean["data"], mean["budget"]))]
        parts = mean["at"] or {"budget": mean}
        cells = [_spread_cell(mean["measured"], parts[share]) if share in parts else "" for share in shares]
        table.add_row(escape("\n".join([mean["name"], mean["schedule"], *subject])), *cells)
    console.print()
    console.print(table)


def _spread_cell(name: str, part: dict[str, float | None]) -> str:
    if part["mean"] is None or part["sd"] is None or part["lowest"] is None or part["highest"] is None:
        return "-"
    percent = name in SHARES_OF_ONE
    scale, digits = (100, 1) if percent else (1, 4)
    spread = spread_text(name, Interval(part["lowest"], part["highest"]))
    return f"{scale * part['mean']:.{digits}f} ± {scale * part['sd']:.{digits}f}\n{spread}"
