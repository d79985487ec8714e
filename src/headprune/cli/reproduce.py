"""The verb `reproduce`: repeats the results of a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.options import OUTPUT, Json, print_json, resumable, with_options
from headprune.config.groups import DataOptions, ModelOptions
from headprune.config.option import only
from headprune.errors import DataError

# The options that each has, besides --out and --json.
OPTIONS_OF_PAPER = {
    "greedy-gnorm": ("published", "runs", "model", "data"),
    "all-attention": ("data", "scale", "seeds"),
    "gates": ("scale", "seeds"),
}


@with_options(
    only(
        ModelOptions,
        "model",
        default=None,
        help="greedy-gnorm: model folder to measure figure 2 on; the demo's by default.",
    ),
    only(
        DataOptions,
        "data",
        default=None,
        required=False,
        help="greedy-gnorm: data file for figure 2. all-attention: text file to train on; the help texts of Python's "
        "standard library by default.",
    ),
)
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="greedy-gnorm: the tables and figures of arXiv 2602.04491. all-attention: the comparison of arXiv "
            "2110.03252 with small models, trained here in about 20 minutes for each seed. gates: learned gates on an "
            "encoder-decoder, as in arXiv 1905.09418, in about 2 minutes for each seed."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for the tables and figures.", rich_help_panel=OUTPUT)],
    published: Annotated[
        Path | None,
        typer.Option(
            help="greedy-gnorm: the authors' result files, to draw figures 3 to 5 from.", rich_help_panel="Data"
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="greedy-gnorm: runs of headprune, to draw figures 3 to 5 from.", rich_help_panel="Data"),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="all-attention, gates: multiplies the numbers of steps, 1 by default.", rich_help_panel="Training"
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="all-attention, gates: seeds of weights, batches and gates, separated by commas; 0 by default. Over "
            "several, tables have means and standard deviations.",
            rich_help_panel="Training",
        ),
    ] = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Repeat the results of a paper: from its configurations, its published data, runs of headprune, or models trained
    here."""
    from rich.console import Console

    from headprune.cli.preflight import quiet_transformers

    if paper not in OPTIONS_OF_PAPER:
        raise DataError(f"There is no reproduction of {paper!r}; there are: {', '.join(OPTIONS_OF_PAPER)}.")
    model, data = options["model"], options["data"]
    given = {"published": published, "runs": runs, "model": model, "data": data, "scale": scale, "seeds": seeds}
    unsupported = [
        f"--{name}" for name, value in given.items() if value is not None and name not in OPTIONS_OF_PAPER[paper]
    ]
    if unsupported:
        raise DataError(f"{paper} has no option {' or '.join(unsupported)}; leave it out.")
    console = Console(stderr=as_json)
    if paper == "all-attention":
        from headprune.papers.all_attention import reproduce_all_attention

        quiet_transformers()
        with resumable(out):
            files, rows = reproduce_all_attention(
                out, data=data, scale=1.0 if scale is None else scale, seeds=_numbers(seeds or "0"), console=console
            )
        if as_json:
            print_json({"out": str(out), "files": [str(file) for file in files], "rows": rows})
        return
    if paper == "gates":
        from headprune.papers.translation_gates import reproduce_gates

        quiet_transformers()
        with resumable(out):
            files, rows = reproduce_gates(
                out, scale=1.0 if scale is None else scale, seeds=_numbers(seeds or "0"), console=console
            )
        if as_json:
            print_json({"out": str(out), "files": [str(file) for file in files], "rows": rows})
        return
    if (model is None) != (data is None):
        raise DataError("Figure 2 needs both --model and --data, or neither.")

    from headprune.papers import reproduce_greedy_gnorm

    quiet_transformers()
    figure2 = None if model is None or data is None else (model, data)
    files = reproduce_greedy_gnorm(out, published=published, runs=runs, figure2=figure2, console=console)
    if as_json:
        print_json({"out": str(out), "files": [str(file) for file in files]})


def _numbers(seeds: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in seeds.split(","))
    except ValueError:
        raise DataError(f"--seeds takes whole numbers separated by commas, such as 0,1,2, not {seeds!r}.") from None
