"""The verb `reproduce`: repeats the results of a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.options import OUTPUT, Json, print_json, resumable, with_options
from headprune.config.groups import ComputeOptions, DataOptions, ModelOptions
from headprune.config.option import only
from headprune.errors import DataError

PAPERS = ("greedy-gnorm", "all-attention")


@with_options(
    only(
        ModelOptions,
        "model",
        default=None,
        help="greedy-gnorm: model to measure figure 2 on, the demo's by default; with --run, in place of the paper's.",
    ),
    only(
        DataOptions,
        "data",
        default=None,
        required=False,
        help="greedy-gnorm: data file for figure 2; with --run, a table with the columns of the paper's data set, in "
        "its place. all-attention: text file to train on; the help texts of Python's "
        "standard library by default.",
    ),
    only(ComputeOptions, "seed", default=None, help="all-attention: seed of weights, batches and gates."),
)
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="greedy-gnorm: the tables and figures of arXiv 2602.04491. all-attention: the comparison of arXiv "
            "2110.03252 with small models, trained here in about 20 minutes."
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
    head: Annotated[
        str | None,
        typer.Option(
            metavar="SITE,HEAD",
            help="greedy-gnorm: the head whose removal figure 2 shows, such as 0,3; by default the one that "
            "Greedy-Gnorm removes first.",
            rich_help_panel="Model",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="greedy-gnorm: instead of tables and figures, make all runs of this model of the paper (bert, albert, "
            "roberta or xlm-roberta), which --runs then draws.",
            rich_help_panel="Model",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --run: runs of random; by default as many as the authors'.", rich_help_panel="Criteria"
        ),
    ] = None,
    aggregation: Annotated[
        str | None,
        typer.Option(
            help="With --run: sample, the paper's formula and the default, or batch, the notebooks' computation.",
            rich_help_panel="Criteria",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="all-attention: multiplies the numbers of steps, 1 by default.", rich_help_panel="Training"),
    ] = None,
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
    # Options that only one of the two has.
    own = {"published": published, "runs": runs, "model": model, "head": head}
    options_of_run = {"run": run, "trials": trials, "aggregation": aggregation}
    options_of_paper = {**own, **options_of_run}, {"scale": scale, "seed": seed}
    unsupported = [
        f"--{name}" for name, value in options_of_paper[paper == "greedy-gnorm"].items() if value is not None
    ]
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
    if run is not None:
        _make_runs(
            out,
            console,
            as_json,
            others={"published": published, "runs": runs, "head": head},
            key=run,
            checkpoint=model,
            source=data,
            trials=trials,
            aggregation=aggregation or "sample",
        )
        return
    if trials is not None or aggregation is not None:
        raise DataError("--trials and --aggregation belong to --run; name a model of the paper, such as --run bert.")
    if (model is None) != (data is None):
        raise DataError("Figure 2 needs both --model and --data, or neither.")

    from headprune.papers import reproduce_greedy_gnorm

    quiet_transformers()
    figure2 = None if model is None or data is None else (model, data)
    files = reproduce_greedy_gnorm(
        out, published=published, runs=runs, figure2=figure2, head=_parse_head(head), console=console
    )
    if as_json:
        print_json({"out": str(out), "files": [str(file) for file in files]})


def _parse_head(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        site, head = (int(part) for part in text.split(","))
    except ValueError:
        raise DataError(f"--head is the number of a site and of a head, such as 0,3, not {text!r}.") from None
    return site, head


def _make_runs(out: Path, console: Any, as_json: bool, *, others: Mapping[str, Any], key: str, **settings: Any) -> None:
    """All runs of one of the paper's models."""
    refused = [f"--{name}" for name, value in others.items() if value is not None]
    if refused:
        raise DataError(
            f"--run only makes runs, so it has no {' or '.join(refused)}; leave it out, or leave --run out."
        )

    from headprune.cli.preflight import quiet_transformers
    from headprune.papers.protocol import run_protocol

    quiet_transformers()
    with resumable(out):
        folder = run_protocol(key, out, **settings)
    command = f"headprune reproduce greedy-gnorm --runs {out} --out DIR"
    console.print(f"The runs are in {folder}; {command} draws them.", highlight=False, soft_wrap=True)
    if as_json:
        print_json({"out": str(out), "runs": str(folder)})
