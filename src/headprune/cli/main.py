"""The program `headprune`: its verbs, and the handling of errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headprune import distributed
from headprune.cli import reproduce
from headprune.cli.claims import claims
from headprune.cli.compare import compare
from headprune.cli.distributed import as_one
from headprune.cli.evaluate import evaluate
from headprune.cli.export import export
from headprune.cli.finetune import finetune
from headprune.cli.inspect import inspect
from headprune.cli.options import OUTPUT, Json, Plugin, print_json, resumable
from headprune.cli.prune import prune
from headprune.cli.renamed_options import RenamedOptions
from headprune.cli.score import score
from headprune.cli.train import train
from headprune.errors import HeadpruneError
from headprune.runs.plugins import import_plugins

app = typer.Typer(
    cls=RenamedOptions,
    help="Remove attention heads and neurons from a Hugging Face transformer, and save a smaller, faster model that "
    "plain transformers loads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version_callback(requested: bool) -> None:
    if requested:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


# Verbs that several processes run together; any other is run by the first of them.
DISTRIBUTED_VERBS = ("score", "prune", "compare", "finetune", "train")


@app.callback()
def headprune(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=version_callback)
    ] = False,
) -> None:
    if (
        distributed.launched()
        and context.invoked_subcommand not in DISTRIBUTED_VERBS
        and not distributed.launched_first()
    ):
        raise typer.Exit


app.command()(inspect)


@app.command()
def criteria(plugin: Plugin = None, as_json: Json = False) -> None:
    """List the criteria: their published schedules, inputs, uses and references."""
    from headprune.cli.listings import print_criteria
    from headprune.criteria import REGISTRY

    import_plugins(plugin)
    if as_json:
        fields = ("name", "schedule", "reference", "use")
        rows = [{**{f: getattr(kind, f) for f in fields}, "needs": kind().needs} for kind in REGISTRY.values()]
        print_json({"criteria": rows})
    else:
        print_criteria([kind() for kind in REGISTRY.values()])


@app.command()
def methods(plugin: Plugin = None, as_json: Json = False) -> None:
    """List the published methods of --method: their settings and references."""
    from headprune.search.methods import METHODS

    import_plugins(plugin)
    if as_json:
        fields = ("name", "reference", "use")
        print_json(
            {
                "methods": [
                    {**{f: getattr(method, f) for f in fields}, **method.settings()} for method in METHODS.values()
                ]
            }
        )
    else:
        from headprune.cli.listings import print_methods

        print_methods(list(METHODS.values()))


app.command()(score)
app.command()(prune)
app.command()(compare)
app.command()(finetune)
app.command()(train)
app.command()(evaluate)
app.command()(export)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or a directory of runs as compare writes it.")],
    out: Annotated[Path, typer.Option(help="The page to write.", rich_help_panel=OUTPUT)] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(help="Also write every figure here, as png, svg and pdf.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a self-contained HTML page about runs: curves, masks step by step, savings, and settings."""
    from headprune.extras import need_report

    need_report()

    from headprune.reports.page import write_report

    write_report(runs, out, figure_folder=figures)
    if as_json:
        print_json({"report": str(out), "figures": None if figures is None else str(figures)})
    else:
        typer.echo(f"The report is in {out}." + (f" The figures are in {figures}." if figures else ""))


app.add_typer(reproduce.app, name="reproduce")
app.command()(claims)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for the demo's model, data and runs.", rich_help_panel=OUTPUT)
    ] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Fine-tune a small real model, prune its heads by a criterion and at random, and make it twice as fast."""
    from rich.console import Console

    from headprune.cli.preflight import quiet_transformers
    from headprune.extras import need_demo, need_report

    need_demo()
    need_report()

    from headprune.cli.demo import run_demo

    quiet_transformers()
    with resumable(out):
        result = run_demo(out, Console(stderr=as_json))
    if as_json:
        fast = {name: result.fast["result"][name] for name in ("units", "metric", "dense", "pruned")}
        print_json(
            {
                "runs": str(out / "runs"),
                "criteria": [row.to_json() for row in result.curves],
                "fast": {"run": str(out / "fast"), **fast, "shares": result.fast["savings"]["shares"]},
            }
        )


def main() -> None:
    """Run the command line; an error of the input is one sentence on stderr and exit code 2."""
    try:
        with as_one():
            app()
    except HeadpruneError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
