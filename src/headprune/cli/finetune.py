"""The verb `finetune`: trains a pruned model on labels and by distillation from the dense one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import Json, Overwrite, Plugin, print_json, resumable, with_options
from headprune.config.groups import DataOptions
from headprune.config.option import from_run, only, values_of
from headprune.config.training import LoraOptions, TrainingOptions
from headprune.runs.plugins import import_plugins
from headprune.training.config import TrainConfig


@with_options(
    from_run(DataOptions),
    only(DataOptions, "data", help="Data to train on: a file, folder or data set, as for prune."),
    TrainingOptions,
    LoraOptions,
)
def finetune(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A finished run of `headprune prune` or `headprune train`.")
    ],
    point: Annotated[
        str | None, typer.Option(help="Train this model of RUN/models instead of RUN/model.", rich_help_panel="Model")
    ] = None,
    no_distill: Annotated[
        bool,
        typer.Option(
            "--no-distill",
            help="Train on labels alone, without the dense model.",
            rich_help_panel="Training",
        ),
    ] = False,
    cycles: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prune and train in this many cycles, each to a part of the target of the run.",
            rich_help_panel="Training",
        ),
    ] = 1,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a run's pruned model on labels and by distillation from the dense model, and keep the best checkpoint."""
    from headprune.cli.preflight import quiet_transformers
    from headprune.data.locations import refuse_missing_data
    from headprune.extras import need_report

    import_plugins(plugin)
    need_report()
    if no_distill:
        options = {**options, "distill": 0.0, "hidden": 0.0}
    config = TrainConfig(**values_of(TrainConfig, options))
    data = options.pop("data")
    refuse_missing_data(data)

    from headprune.cli.progress import live_curve
    from headprune.runs.finetune import run_finetune
    from headprune.runs.recovery_job import RecoveryRequest

    quiet_transformers()
    reading = {name: value for name, value in values_of(DataOptions, options).items() if value is not None}
    request = RecoveryRequest(run=run, data=data, config=config, point=point, rounds=cycles, reading=reading)
    distributed.start()
    with resumable(run / "finetuned"), live_curve("Pruning") as observer:
        record = run_finetune(request, overwrite=overwrite, observer=observer)
    if as_json:
        print_json(_summary_json(run, record))
    else:
        print_recovery(run, record)


def _summary_json(run: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("steps", "best_step", "stopped_early", "seconds", "samples", "rounds", "notes")
    values = {name: record[name]["value"] for name in ("dense", "pruned", "recovered")}
    intervals = {f"{name}_interval": record[name]["interval"] for name in ("dense", "pruned", "recovered")}
    paths = {"run": str(run), "model": str(run / "finetuned" / "model")}
    return {**paths, "metric": record["metric"], **values, **intervals, **{name: record.get(name) for name in names}}


def print_recovery(run: Path, record: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from headprune.reports.format import measured_text
    from headprune.reports.recovery import how

    console, metric = Console(), record["metric"]
    dense, pruned, after = (
        measured_text(metric, record[name]["value"], record[name]["interval"])
        for name in ("dense", "pruned", "recovered")
    )
    console.print(
        f"Recovered: {escape(f'{metric} {pruned} -> ')}[bold]{escape(after)}[/bold]{escape(f' (dense {dense})')}",
        highlight=False,
    )
    for number, cycle in enumerate(record.get("rounds") or (), start=1):
        before, recovered = (
            measured_text(metric, cycle[k]["value"], cycle[k]["interval"]) for k in ("pruned", "recovered")
        )
        console.print(escape(f"Cycle {number}, {cycle['left']} left: {before} -> {recovered}"), highlight=False)
    console.print(how(record), highlight=False, markup=False)
    console.print(f"The model is in {escape(str(run / 'finetuned' / 'model'))}.", highlight=False)
