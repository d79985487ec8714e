"""The command line: parse, call, print. Everything it does can be done from Python."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli.options import (
    BatchSize,
    Calibration,
    CalibrationSamples,
    Compensate,
    Data,
    Dtype,
    EvaluationSamples,
    Every,
    Json,
    Keep,
    LabelColumn,
    Labels,
    MaxDrop,
    MaxLength,
    MetricName,
    MinPerSite,
    Model,
    Overwrite,
    PairColumn,
    Plugin,
    Processor,
    SameData,
    Samples,
    Schedule,
    Seed,
    Split,
    TextColumn,
    experiment_of,
    import_plugins,
    print_json,
    resumable,
)
from headprune.errors import HeadpruneError
from headprune.store.files import write_text

app = typer.Typer(
    help="Find the attention heads of a transformer that do not matter, and remove them from the weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(asked: bool) -> None:
    if asked:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.callback()
def headprune(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: Model,
    tokens: Annotated[int | None, typer.Option(min=1, help="Sequence length to count FLOPs for.")] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Show where a model's heads are, and the most that removing them could save. Reads the config alone."""
    from headprune.store.places import refuse_missing_structure

    import_plugins(plugin)
    refuse_missing_structure(model)

    from headprune.cli.tables import print_inspection
    from headprune.measure.inspection import inspect as inspect_model
    from headprune.store.checkpoint import load_structure

    seen = inspect_model(load_structure(model), tokens=tokens)
    if as_json:
        print_json(seen.to_json())
    else:
        print_inspection(model, seen)


@app.command()
def criteria(plugin: Plugin = None, as_json: Json = False) -> None:
    """List the criteria: what each needs, when to use it, and where it comes from."""
    from headprune.cli.tables import criterion_needs, print_criteria
    from headprune.criteria import REGISTRY

    import_plugins(plugin)
    if as_json:
        fields = ("name", "reference", "use")
        rows = [
            {**{f: getattr(kind, f) for f in fields}, "needs": criterion_needs(kind())} for kind in REGISTRY.values()
        ]
        print_json({"criteria": rows})
    else:
        print_criteria([kind() for kind in REGISTRY.values()])


@app.command()
def score(
    model: Model,
    data: Data,
    criterion: Annotated[
        str, typer.Option(help="Name as in `headprune criteria`; inverse:NAME; options as in 'hies(alpha=0.7)'.")
    ] = "gnorm",
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    split: Split = None,
    labels: Labels = "given",
    samples: Samples = None,
    seed: Seed = 0,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    processor: Processor = None,
    dtype: Dtype = "float32",
    plugin: Plugin = None,
    out: Annotated[Path | None, typer.Option(help="Also write the scores to this csv file.")] = None,
    as_json: Json = False,
) -> None:
    """Score every head of a model on some data, and draw the scores as a heat map."""
    from headprune.cli.early import check_early, quiet_transformers
    from headprune.criteria import make
    from headprune.errors import DataError

    import_plugins(plugin)
    check_early(model, data=[data], criteria=[criterion])
    chosen = make(criterion)
    if out is not None and not out.parent.is_dir():
        raise DataError(f"There is no directory {out.parent} to write {out.name} to; make it first.")

    from headprune.cli.tables import print_scores, progress_bar, scores_csv
    from headprune.criteria.scoring import score as score_model
    from headprune.data import Columns
    from headprune.runs.subject import load_task

    quiet_transformers()
    task = load_task(
        model,
        data,
        columns=Columns(text_column, pair_column, label_column),
        split=split,
        processor=processor,
        max_length=max_length,
        dtype=dtype,
        seed=seed,
    )
    examples = task.examples.sample(samples, seed)
    task.check_labels(chosen, labels)
    with progress_bar(f"Scoring by {chosen}", len(examples)) as advance:
        result = score_model(
            task.model,
            examples.batches(batch_size),
            criterion=chosen,
            labels=labels,  # type: ignore[arg-type]  # score refuses other words itself
            progress=advance,
        )
    if out is not None:
        write_text(out, scores_csv(task.model, result))
    if as_json:
        print_json(
            {
                "criterion": str(chosen),
                "samples": result.samples,
                "tokens": result.tokens,
                "seconds": result.seconds,
                "accuracy": result.accuracy,
                "loss": result.loss,
                "scores": [[None if math.isnan(value) else value for value in row] for row in result.scores.tolist()],
            }
        )
    else:
        print_scores(task.model, str(chosen), result)
        if out is not None:
            typer.echo(f"Scores are in {out}.")


@app.command()
def prune(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Directory of the run; an interrupted one goes on.")],
    criterion: Annotated[str, typer.Option(help="Name as in `headprune criteria`.")] = "repair",
    compensate: Compensate = "lstsq",
    keep: Keep = None,
    max_drop: MaxDrop = None,
    knee: Annotated[bool, typer.Option("--knee", help="Stop at the inflection point of the full curve.")] = False,
    explore: Annotated[bool, typer.Option("--explore", help="Follow the curve to its end, past the stop.")] = False,
    schedule: Schedule = "greedy",
    every: Every = 1,
    min_per_site: MinPerSite = 0,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    split: Split = None,
    calibration: Calibration = None,
    calibration_samples: CalibrationSamples = 128,
    evaluation_samples: EvaluationSamples = None,
    same_data: SameData = False,
    metric: MetricName = None,
    labels: Labels = "given",
    seed: Seed = 0,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    processor: Processor = None,
    dtype: Dtype = "float32",
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Remove heads from a model step by step, measure it after each, and save the result."""
    options = locals()
    from headprune.cli.early import check_early, quiet_transformers

    import_plugins(plugin)
    check_early(model, data=[data, calibration], criteria=[criterion], keep=keep, reports=True)

    from headprune.cli.live import live_curve
    from headprune.cli.tables import print_run
    from headprune.runs.experiment import run_experiment

    quiet_transformers()
    experiment = experiment_of(options)
    with resumable(out), live_curve(f"Pruning by {criterion}") as on_step:
        record = run_experiment(experiment, out, overwrite=overwrite, on_step=on_step)
    result = record["result"]
    if as_json:
        fields = ("heads_before", "heads_after", "metric", "dense", "pruned", "agreement", "step")
        print_json({"run": str(out), **{name: result[name] for name in fields}})
    else:
        print_run(out, record)


@app.command()
def compare(
    model: Model,
    data: Data,
    criteria: Annotated[
        str,
        typer.Option(
            help="Names with commas between them, such as gnorm,his,inverse:gnorm; with a compensation of its own: "
            "gnorm+lstsq."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for one run per criterion; interrupted ones go on.")],
    trials: Annotated[int, typer.Option(min=1, help="Runs of random, with different seeds.")] = 1,
    compensate: Compensate = "none",
    alpha: Annotated[str | None, typer.Option(help="'sweep' picks the alpha of hies on the calibration data.")] = None,
    schedule: Schedule = "greedy",
    every: Every = 1,
    min_per_site: MinPerSite = 0,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    split: Split = None,
    calibration: Calibration = None,
    calibration_samples: CalibrationSamples = 128,
    evaluation_samples: EvaluationSamples = None,
    same_data: SameData = False,
    metric: MetricName = None,
    labels: Labels = "given",
    seed: Seed = 0,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    processor: Processor = None,
    dtype: Dtype = "float32",
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run several criteria from the same dense model on the same data, and say which is best."""
    options = locals()
    from headprune.cli.early import check_early, quiet_transformers, without_compensation
    from headprune.criteria.registry import split_names
    from headprune.errors import CriterionError

    import_plugins(plugin)
    names = without_compensation(split_names(criteria))
    check_early(model, data=[data, calibration], criteria=names, reports=True)

    from headprune.cli.live import live_curve
    from headprune.cli.tables import print_comparison
    from headprune.runs.compare import check_sweep, expand, sweep_alpha, with_alpha, write_comparison
    from headprune.runs.compare import compare as compare_criteria

    quiet_transformers()
    experiment = experiment_of(options)
    names = expand(split_names(criteria), compensate)
    if alpha not in (None, "sweep"):
        raise CriterionError(
            f"--alpha takes the word sweep, not {alpha!r}; one value goes into the name: hies(alpha=0.7)."
        )
    swept = replace(experiment, compensate=check_sweep(names, compensate)) if alpha == "sweep" else None
    with resumable(out):
        if swept is not None:
            best, areas = sweep_alpha(swept)
            listed = ", ".join(f"{a:g}: {area:.4f}" for a, area in areas.items())
            typer.echo(f"alpha of hies = {best:g}, by weighted area on the calibration data ({listed})", err=True)
            names = with_alpha(names, best)
        with live_curve("Comparing") as on_step:
            rows = compare_criteria(
                experiment, names, out, trials=trials, overwrite=overwrite, on_run=on_step.start, on_step=on_step
            )
    write_comparison(out, rows)
    if as_json:
        print_json({"runs": str(out), "criteria": [row.to_json() for row in rows]})
    else:
        print_comparison(out, rows)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or a directory of runs as compare writes it.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Also write every figure here, as png, svg and pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained page about runs: curves, masks step by step, savings, and how they were made."""
    from headprune.extras import need_report

    need_report()

    from headprune.report.page import write_report

    write_report(runs, out, figure_folder=figures)
    if as_json:
        print_json({"report": str(out), "figures": None if figures is None else str(figures)})
    else:
        typer.echo(f"The report is in {out}." + (f" The figures are in {figures}." if figures else ""))


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="greedy-gnorm: the tables and figures of arXiv 2602.04491.")],
    out: Annotated[Path, typer.Option(help="Directory for the tables and figures.")],
    published: Annotated[
        Path | None, typer.Option(help="The authors' result files, to draw figures 3 to 5 from.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Runs of this tool, to draw figures 3 to 5 from.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder to measure figure 2 on; the demo's by default.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data file for figure 2.")] = None,
    as_json: Json = False,
) -> None:
    """Write the tables and figures of a paper, from its configurations, its published data, or runs of this tool."""
    from rich.console import Console

    from headprune.cli.early import quiet_transformers
    from headprune.errors import DataError

    if paper != "greedy-gnorm":
        raise DataError(f"There is no reproduction of {paper!r}; there is: greedy-gnorm.")
    if (model is None) != (data is None):
        raise DataError("Figure 2 needs both --model and --data, or neither.")

    from headprune.papers import reproduce_greedy_gnorm

    quiet_transformers()
    figure2 = None if model is None or data is None else (model, data)
    files = reproduce_greedy_gnorm(
        out, published=published, runs=runs, figure2=figure2, console=Console(stderr=as_json)
    )
    if as_json:
        print_json({"out": str(out), "files": [str(file) for file in files]})


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the demo's model, data and runs.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Fine-tune a small real model to tell 20 languages apart, prune it, and compare with random."""
    from rich.console import Console

    from headprune.cli.early import quiet_transformers
    from headprune.extras import need_demo, need_report

    need_demo()
    need_report()

    from headprune.cli.demo import run_demo

    quiet_transformers()
    with resumable(out):
        rows = run_demo(out, Console(stderr=as_json))
    if as_json:
        print_json({"runs": str(out / "runs"), "criteria": [row.to_json() for row in rows]})


def main() -> None:
    """Run the command line; a wrong input is one sentence on stderr and exit code 2."""
    try:
        app()
    except HeadpruneError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
