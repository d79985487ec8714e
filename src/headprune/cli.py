"""The command line: parse, call, print. Everything it does can be done from Python."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from headprune.errors import HeadpruneError

app = typer.Typer(
    help="Find the attention heads of a transformer that do not matter, and remove them from the weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "A local folder or a hub name."
JSON_HELP = "Print JSON on stdout and nothing else there."
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.callback()
def headprune(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    model: Model,
    tokens: Annotated[int | None, typer.Option(min=1, help="Sequence length to count FLOPs for.")] = None,
    as_json: Json = False,
) -> None:
    """Show where a model's heads are, and the most that removing them could save. Reads the config alone."""
    from headprune.checkpoint import load_structure
    from headprune.inspection import inspect as inspect_model
    from headprune.tables import print_inspection

    seen = inspect_model(load_structure(model), tokens=tokens)
    if as_json:
        print_json(seen.to_json())
    else:
        print_inspection(model, seen)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Run the command line; a wrong input is one sentence on stderr and exit code 2."""
    try:
        app()
    except HeadpruneError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
