"""The verb `claims`: what the papers say, and what holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli.options import COMPUTE, OUTPUT, Json, Published, print_json, resumable
from headprune.errors import DataError

if TYPE_CHECKING:
    from headprune.papers.ledger import Claim, Finding

COLOURS = {"equal": "green", "holds": "green", "contradicted": "red", "does": "red"}  # by the first word of a verdict


def claims(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAPER]",
            help="greedy-gnorm, hies, gates or headprune, or one claim, with its numbers; all papers without it.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM",
            help="Run the experiment behind one claim, and print its findings.",
            rich_help_panel=COMPUTE,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="With --run: directory of the experiment, which resumes.", rich_help_panel=OUTPUT)
    ] = Path("claims"),
    published: Published = None,
    as_json: Json = False,
) -> None:
    """List the claims of the three papers and of this project, with what their tests came to."""
    from headprune.papers.claims import CLAIMS
    from headprune.papers.ledger import PAPERS, findings_by_claim, read_findings

    if run is not None:
        if name not in (None, run):
            raise DataError("--run takes one claim; leave out the other name.")
        name = run
    chosen = [each for each in CLAIMS if name in (None, each.paper, each.id)]
    if not chosen or (run is not None and run != chosen[0].id):
        raise DataError(
            f"There is no claim and no paper {name!r}; papers are {', '.join(PAPERS)}, and headprune claims lists the "
            "claims."
        )
    if run is None:
        rows = findings_by_claim(chosen, read_findings())
    else:
        from rich.console import Console

        from headprune.cli.preflight import quiet_transformers
        from headprune.papers.claim_runs import run_claim

        quiet_transformers()
        with resumable(out):
            rows = {run: run_claim(chosen[0], out, published=published, console=Console(stderr=as_json))}
    if as_json:
        print_json({"claims": [{**vars(each), "findings": [f.to_json() for f in rows[each.id]]} for each in chosen]})
    elif name is not None and name not in PAPERS:
        _print_one(chosen[0], rows[name])
    else:
        _print_all(chosen, rows)


def _print_all(claims: Sequence[Claim], rows: dict[str, list[Finding]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    for heading in ("claim", "says", "findings"):
        table.add_column(heading, no_wrap=heading == "claim")
    for each in claims:
        verdicts = [f"{_coloured(f.verdict)}{': ' if f.subject else ''}{escape(f.subject)}" for f in rows[each.id]]
        table.add_row(each.id, escape(each.says), "\n".join(verdicts))
    console = Console()
    console.print(table)
    console.print("headprune claims CLAIM shows the numbers of one of them.", highlight=False)


def _print_one(claim: Claim, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from headprune.papers.ledger import PAPERS

    published = f" Published: {claim.published}." if claim.published else ""
    lines = [f"[bold]{claim.id}[/bold] ({PAPERS[claim.paper]}, {claim.place})", escape(claim.says + published)]
    lines += [escape(f"Test: {claim.tested_by}"), ""]
    for finding in findings:
        subject = f" {escape(finding.subject)}:" if finding.subject else ""
        lines.append(f"{_coloured(finding.verdict)}{subject} {escape(finding.sentence)}")
        lines += [f"    {escape(finding.command)}"] if finding.command else []
    Console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _coloured(verdict: str) -> str:
    colour = COLOURS.get(verdict.split()[0])
    return f"[{colour}]{verdict}[/{colour}]" if colour else verdict
