"""The verb `evaluate`: measures a model on data that was not used to calibrate, train or select it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli.options import Json, Plugin, print_json, with_options
from headprune.config.groups import ComputeOptions, DataOptions, EvaluationOptions, MeasuringOptions, ModelOptions
from headprune.config.option import from_run, only
from headprune.display import counted
from headprune.runs.plugins import import_plugins

if TYPE_CHECKING:
    from headprune.measure.evaluation import EvaluateResult


@with_options(
    from_run(ModelOptions),
    from_run(DataOptions),
    from_run(ComputeOptions),
    only(DataOptions, "data", help="Data to evaluate on, as for prune; rows that the run has used are left out."),
    MeasuringOptions,
    only(EvaluationOptions, "metric", help="Metric; by default that of the run, or of the task."),
)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run, a folder of one of its models, another model, or a hub name."),
    ],
    plugin: Plugin = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Measure a model and its dense model on data that was not used to prune it, with 95% intervals."""
    from headprune.checkpoint.paths import model_in, refuse_missing_model
    from headprune.cli.preflight import quiet_transformers
    from headprune.data.locations import refuse_missing_data

    import_plugins(plugin)
    refuse_missing_data(options["data"])
    for path in (model, options["dense"]):
        if path is not None:
            refuse_missing_model(model_in(path))

    from headprune.cli.progress import live_phases
    from headprune.runs.evaluate import evaluate as evaluate_model

    quiet_transformers()
    with live_phases(f"Evaluating {model}"):
        result = evaluate_model(model, progress=False, **options)
    if as_json:
        print_json(result.to_json())
    else:
        print_evaluation(result)


def print_evaluation(result: EvaluateResult) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from headprune.reports.format import difference_text, interval_text, measured_text, value_text

    console, name = Console(), result.metric.name
    table = Table(caption=escape("[low, high]: 95% interval"), caption_justify="left")
    table.add_column("", overflow="fold")
    for heading in (name, "loss", "parameters"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        measured = measured_text(name, row.value, row.interval)
        label = f"{row.name} (dense)" if row is result.dense else row.name
        table.add_row(escape(label), escape(measured), loss, f"{row.parameters:,}")
    console.print(table)
    sentences = [f"Evaluated on {counted(result.samples, 'sample')} of {result.data}."]
    if result.difference is not None:
        relation = "differs from" if result.difference.real else "cannot be told apart from"
        gap = difference_text(result.metric, result.difference)
        sentences.append(f"Paired over the samples, the model {relation} the dense one: {gap}.")
    if result.agreement is not None:
        interval = interval_text("agreement", result.agreement_interval)
        sentences.append(
            f"Agreement with the dense model: {value_text('agreement', result.agreement)} {interval}".rstrip()
        )
    if result.dense is None:
        sentences.append("It is not compared with a dense model; name one with --dense.")
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)
