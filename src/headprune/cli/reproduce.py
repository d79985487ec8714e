"""The verb `reproduce`: repeats the results of a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.options import OUTPUT, Json, print_json, resumable, with_options
from headprune.config.groups import ComputeOptions, DataOptions, ModelOptions
from headprune.config.option import only
from headprune.errors import DataError

# The options of each paper, beside --out.
PAPERS = {
    "greedy-gnorm": ("model", "data", "published", "runs"),
    "hies": ("model", "data", "seeds", "long"),
    "all-attention": ("data", "scale", "seed"),
}


@with_options(
    only(
        ModelOptions,
        "model",
        default=None,
        help="greedy-gnorm: model folder to measure figure 2 on; the demo's by default. hies: model folder to test it "
        "on, instead of small models that are trained here.",
    ),
    only(
        DataOptions,
        "data",
        default=None,
        required=False,
        help="greedy-gnorm: data file for figure 2. hies: data file of --model, or alone an npz file of images. "
        "all-attention: text file to train on; the help texts of Python's standard library by default.",
    ),
    only(ComputeOptions, "seed", default=None, help="all-attention: seed of weights, batches and gates."),
)
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="greedy-gnorm: the tables and figures of arXiv 2602.04491. hies: HIES of arXiv 2510.13832 against its "
            "baselines, on models that are trained here. all-attention: the comparison of arXiv 2110.03252 with small "
            "models, trained here in about 20 minutes."
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
        typer.Option(help="all-attention: multiplies the numbers of steps, 1 by default.", rich_help_panel="Training"),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="hies: seeds of the calibration samples, separated by commas, 0,1,2,3,4 by default.",
            rich_help_panel="Compute",
        ),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="hies: also SmolLM2-135M, in hours.", rich_help_panel="Compute")
    ] = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Repeat the results of a paper: from its configurations, its published data, runs of headprune, or models trained
    here."""
    from rich.console import Console

    from headprune.cli.preflight import quiet_transformers

    if paper not in PAPERS:
        raise DataError(f"There is no reproduction of {paper!r}; there are: {', '.join(PAPERS)}.")
    model, data, seed = options["model"], options["data"], options["seed"]
    given = {
        "model": model,
        "data": data,
        "published": published,
        "runs": runs,
        "scale": scale,
        "seed": seed,
        "seeds": seeds,
        "long": long or None,
    }
    unsupported = [f"--{name}" for name, value in given.items() if value is not None and name not in PAPERS[paper]]
    if unsupported:
        raise DataError(f"{paper} has no option {' or '.join(unsupported)}; leave it out.")
    console = Console(stderr=as_json)
    if paper == "all-attention":
        from headprune.papers.all_attention import reproduce_all_attention

        quiet_transformers()
        with resumable(out):
            files, rows = reproduce_all_attention(
                out, data=data, scale=1.0 if scale is None else scale, seed=seed or 0, console=console
            )
        if as_json:
            print_json({"out": str(out), "files": [str(file) for file in files], "rows": rows})
        return
    if paper == "hies":
        from headprune.papers.hies import reproduce_hies
        from headprune.papers.hies.plan import Settings
        from headprune.runs.studies.spec import parse_seeds

        quiet_transformers()
        settings = Settings() if seeds is None else Settings(seeds=tuple(parse_seeds(seeds)))
        with resumable(out):
            done = reproduce_hies(out, model=model, data=data, settings=settings, long=long, console=console)
        if as_json:
            print_json(
                {
                    "out": str(out),
                    "files": [str(file) for file in done.files],
                    "findings": [finding.to_json() for finding in done.findings],
                }
            )
        return
    if (model is None) != (data is None):
        raise DataError("Figure 2 needs both --model and --data, or neither.")

    from headprune.papers import reproduce_greedy_gnorm

    quiet_transformers()
    figure2 = None if model is None or data is None else (model, data)
    files = reproduce_greedy_gnorm(out, published=published, runs=runs, figure2=figure2, console=console)
    if as_json:
        print_json({"out": str(out), "files": [str(file) for file in files]})
