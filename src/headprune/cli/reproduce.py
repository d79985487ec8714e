"""The verb `reproduce`: repeats the results of a paper, each with options of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headprune.cli.options import COMPUTE, OUTPUT, Json, Published, Seeds, Trials, print_json, resumable, with_options
from headprune.config.groups import DataOptions, ModelOptions
from headprune.config.option import only
from headprune.errors import DataError
from headprune.runs.studies.spec import parse_seeds

app = typer.Typer(
    help="Repeat the results of a paper: from its configurations, its published data, runs of headprune, or models "
    "trained here.",
    no_args_is_help=True,
)
Out = Annotated[Path, typer.Option(help="Directory for the tables and figures.", rich_help_panel=OUTPUT)]
Scale = Annotated[float, typer.Option(help="Multiplies the numbers of training steps.", rich_help_panel="Training")]


def _own(model: str, data: str) -> tuple[Any, Any]:
    """The options --model and --data, which are optional here, with these help texts."""
    return only(ModelOptions, "model", default=None, help=model), _own_data(data)


def _own_data(text: str) -> Any:
    return only(DataOptions, "data", default=None, required=False, help=text)


@app.command("greedy-gnorm")
@with_options(
    *_own(
        "Model to measure figure 2 on, the demo's by default; with --run, in place of the paper's.",
        "Data file for figure 2; with --run, a table with the columns of the paper's data set, in its place.",
    )
)
def greedy_gnorm(
    out: Out,
    published: Published = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="Runs of headprune, to draw figures 3 to 5 from.", rich_help_panel="Data"),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="SITE,HEAD",
            help="The head whose removal figure 2 shows, such as 0,3; by default the one that Greedy-Gnorm removes "
            "first.",
            rich_help_panel="Model",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead of tables and figures, make all runs of this model of the paper (bert, albert, roberta or "
            "xlm-roberta), which --runs then draws.",
            rich_help_panel=COMPUTE,
        ),
    ] = None,
    trials: Trials = None,
    aggregation: Annotated[
        str | None,
        typer.Option(
            help="With --run: sample, the paper's formula and the default, or batch, the notebooks' computation.",
            rich_help_panel="Criteria",
        ),
    ] = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """The tables and figures of Greedy-Gnorm, arXiv 2602.04491, or the runs behind them."""
    console = Console(stderr=as_json)
    model, data = options["model"], options["data"]
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

    from headprune.cli.preflight import quiet_transformers
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


@app.command()
@with_options(
    *_own(
        "Model to test it on, in place of small ones that are trained here.",
        "Data file for the model; without a model, an npz file of images, on which a small ViT is trained.",
    )
)
def hies(
    out: Out,
    seeds: Seeds = None,
    long: Annotated[
        bool, typer.Option("--long", help="Also SmolLM2-135M, which takes hours.", rich_help_panel="Model")
    ] = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """HIES, arXiv 2510.13832, against its baselines, scored once on dense models; in about 30 minutes."""
    from headprune.cli.preflight import quiet_transformers
    from headprune.papers.hies import reproduce_hies
    from headprune.papers.hies.plan import Settings

    quiet_transformers()
    settings = Settings() if seeds is None else Settings(seeds=tuple(parse_seeds(seeds)))
    with resumable(out):
        done = reproduce_hies(out, settings=settings, long=long, console=Console(stderr=as_json), **options)
    if as_json:
        findings = [finding.to_json() for finding in done.findings]
        print_json({"out": str(out), "files": [str(file) for file in done.files], "findings": findings})


@app.command("all-attention")
@with_options(_own_data("Text file to train on; the help texts of Python's standard library by default."))
def all_attention(
    out: Out,
    scale: Scale = 1.0,
    seeds: Seeds = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Learned gates, arXiv 2110.03252, on small models that are trained here, in about 20 minutes for each seed."""
    from headprune.papers.all_attention import reproduce_all_attention

    _train(reproduce_all_attention, out, as_json, scale=scale, seeds=parse_seeds(seeds or "0"), **options)


@app.command()
@with_options()
def gates(out: Out, scale: Scale = 1.0, seeds: Seeds = None, as_json: Json = False) -> None:
    """Learned gates on a small encoder-decoder, as in arXiv 1905.09418, in about 2 minutes for each seed."""
    from headprune.papers.translation_gates import reproduce_gates

    _train(reproduce_gates, out, as_json, scale=scale, seeds=parse_seeds(seeds or "0"))


def _train(reproduce: Callable[..., Any], out: Path, as_json: bool, **settings: Any) -> None:
    from headprune.cli.preflight import quiet_transformers

    quiet_transformers()
    with resumable(out):
        files, rows = reproduce(out, console=Console(stderr=as_json), **settings)
    if as_json:
        print_json({"out": str(out), "files": [str(file) for file in files], "rows": rows})
