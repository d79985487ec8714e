"""The command line: parse, call, print. Everything it does can be done from Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.compare import compare
from headprune.cli.export import export
from headprune.cli.options import (
    Json,
    Model,
    Overwrite,
    Plugin,
    Samples,
    experiment_of,
    print_json,
    resumable,
    with_options,
)
from headprune.cli.processes import as_one
from headprune.cli.renamed import RenamedOptions
from headprune.cli.reproduce import reproduce
from headprune.cli.train import train
from headprune.cli.training import finetune
from headprune.errors import HeadpruneError
from headprune.runs.plugins import import_plugins
from headprune.search.config import BUDGETS

# What is about budgets alone.
OF_BUDGETS = (
    *(*BUDGETS, "latency_batch", "latency_tokens", "threads", "units", "method", "rounds", "round_to", "widths"),
)
# What decides how a model is pruned, and not how it is scored.
NOT_OF_SCORE = (
    *(name for name in OF_BUDGETS if name != "units"),
    *("repair", "keep", "max_drop", "knee", "explore", "schedule", "rescore", "every", "min_per_site", "metric"),
    "memory",
    *("calibration", "calibration_samples", "evaluation_samples", "same_data", "vocabulary", "activations_on_disk"),
)

app = typer.Typer(
    cls=RenamedOptions,
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


# Verbs that several processes do together; any other is done by the first of them.
TOGETHER = ("score", "prune", "compare", "finetune", "train")


@app.callback()
def headprune(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    if distributed.launched() and context.invoked_subcommand not in TOGETHER and not distributed.launched_first():
        raise typer.Exit


@app.command()
def inspect(
    model: Model,
    tokens: Annotated[int | None, typer.Option(min=1, help="Sequence length to count FLOPs and time for.")] = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="Time its layers by their heads and width, on this machine.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once: 1 by default for --latency, 32 for --plan.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for --latency; as many as torch takes if not given.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure times again, even if they are known.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what memory and passes over the data each schedule would need instead.")
    ] = False,
    calibration_samples: Annotated[int, typer.Option(min=1, help="Samples to score and repair on, for --plan.")] = 128,
    evaluation_samples: Annotated[
        int | None, typer.Option(min=1, help="Samples to evaluate on, for --plan; as many by default.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of each, for --plan.")] = 128,
    dtype: Annotated[str, typer.Option(help="Precision to compute in, for --plan.")] = "float32",
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

    structure = load_structure(model)
    if plan:
        from headprune.cli.plan import show_plan

        asked = (calibration_samples, evaluation_samples, max_length, batch_size, dtype)
        show_plan(model, structure, *asked, as_json=as_json)
        return
    seen = inspect_model(structure, tokens=tokens)
    if not latency:
        print_json(seen.to_json()) if as_json else print_inspection(model, seen)
        return

    from headprune.cli.latency import print_latency
    from headprune.measure.latency import latency_table

    table = latency_table(structure, batch_size=batch_size or 1, length=tokens, threads=threads, fresh=fresh)
    if as_json:
        print_json({**seen.to_json(), "latency": table.to_json()})
    else:
        print_inspection(model, seen)
        print_latency(table)


@app.command()
def criteria(plugin: Plugin = None, as_json: Json = False) -> None:
    """List the criteria: what each needs, when to use it, and where it comes from."""
    from headprune.cli.tables import print_criteria
    from headprune.criteria import REGISTRY

    import_plugins(plugin)
    if as_json:
        fields = ("name", "reference", "use")
        rows = [{**{f: getattr(kind, f) for f in fields}, "needs": kind().needs} for kind in REGISTRY.values()]
        print_json({"criteria": rows})
    else:
        print_criteria([kind() for kind in REGISTRY.values()])


@app.command()
def methods(plugin: Plugin = None, as_json: Json = False) -> None:
    """List the published methods that --method takes: what each is made of, and where it comes from."""
    from headprune.search.methods import METHODS

    import_plugins(plugin)
    if as_json:
        fields = ("name", "reference", "use")
        print_json(
            {"methods": [{**{f: getattr(one, f) for f in fields}, **one.settings()} for one in METHODS.values()]}
        )
    else:
        from headprune.cli.methods import print_methods

        print_methods(list(METHODS.values()))


@app.command()
@with_options(*NOT_OF_SCORE)
def score(
    model: Model,
    samples: Samples = None,
    plugin: Plugin = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the scores here: .csv, or a picture: .png, .svg, .pdf.")
    ] = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Score every head of a model, or neuron, on some data, and draw the scores as a heat map."""
    from headprune.cli.early import check_early, quiet_transformers

    import_plugins(plugin)
    check_early(model, options)

    from headprune.cli.tables import print_scores, progress_bar, score_rows
    from headprune.criteria.scoring import score as score_model
    from headprune.measure.trajectory import plain
    from headprune.report.scores import check_target, write_scores
    from headprune.runs.subject import load_subject

    quiet_transformers()
    experiment = experiment_of(model, options)
    chosen = experiment.criterion
    if out is not None:
        check_target(out)
    distributed.start()
    with distributed.fail_together():
        subject = load_subject(experiment)
        examples = subject.examples.sample(samples, experiment.seed)
        subject.check_labels(chosen, experiment.labels)
    with progress_bar(f"Scoring by {chosen}", len(examples)) as advance:
        result = score_model(
            subject.model,
            examples.batches(experiment.batch_size, full=chosen.by_batch),
            criterion=chosen,
            labels=experiment.labels,  # type: ignore[arg-type]  # the config refuses other words
            task=subject.task,
            progress=advance,
            units=experiment.units,
        )
    if out is not None:
        distributed.on_main(lambda: write_scores(str(chosen), result, out))
    if as_json:
        measured = result.measured
        print_json(
            {
                "criterion": str(chosen),
                "samples": result.samples,
                "tokens": result.tokens,
                "seconds": result.seconds,
                "accuracy": result.accuracy,
                "metric": None if result.metric is None else result.metric.name,
                "value": None if measured is None else plain(measured.value),
                "interval": None if measured is None or measured.interval is None else list(measured.interval),
                "loss": result.loss,
                "scores": score_rows(result),
                **({"kinds": [site.kind for site in result.sites]} if experiment.units != ("heads",) else {}),
            }
        )
    else:
        print_scores(subject.model, str(chosen), result)
        if out is not None:
            typer.echo(f"Scores are in {out}.")


@app.command()
@with_options()
def prune(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory of the run; an interrupted one goes on.")],
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Remove heads, or heads and neurons, step by step, measure the model after each, and save the result."""
    from headprune.cli.early import check_early, quiet_transformers

    import_plugins(plugin)
    check_early(model, options, reports=True)

    from headprune.cli.live import live_curve
    from headprune.cli.tables import print_run
    from headprune.runs.experiment import run_experiment

    quiet_transformers()
    experiment = experiment_of(model, options)
    distributed.start()
    measure = None if experiment.budget is None else experiment.budget.measure
    with resumable(out), live_curve(f"Pruning by {experiment.criterion}", measure) as on_step:
        record = run_experiment(experiment, out, overwrite=overwrite, on_step=on_step, on_layer=on_step.layer)
    result = record["result"]
    if as_json:
        fields = ("heads_before", "heads_after", "units", "metric", "dense", "pruned", "agreement", "step", "rule")
        intervals = ("dense_interval", "pruned_interval")
        shares = (record.get("savings") or {}).get("shares")
        points = {"points": record["points"]} if record.get("points") else {}
        said = {name: result.get(name) for name in (*fields, *intervals)}
        print_json({"run": str(out), **said, "shares": shares, **points})
    else:
        print_run(out, record)


app.command()(compare)
app.command()(finetune)
app.command()(train)
app.command()(export)


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


app.command()(reproduce)


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
        with as_one():
            app()
    except HeadpruneError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
