"""The verb `inspect`: shows the sites of a model, and what removing its heads could save."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headprune.cli.options import Json, Model, Plugin, print_json, with_options
from headprune.config.groups import (
    CalibrationOptions,
    ComputeOptions,
    EvaluationOptions,
    LatencyOptions,
    ModelOptions,
)
from headprune.config.option import only
from headprune.runs.plugins import import_plugins


@with_options(
    only(ModelOptions, "max_length", help="Tokens per sample, for --plan."),
    only(CalibrationOptions, "calibration_samples", default=128, help="Calibration samples, for --plan."),
    only(EvaluationOptions, "evaluation_samples", help="Evaluation samples, for --plan; as many by default."),
    only(LatencyOptions, "threads", help="Threads for --latency; as many as torch uses by default."),
    only(ComputeOptions, "dtype", help="Precision to compute in, for --plan: float32, bfloat16 or float16."),
    only(
        ComputeOptions,
        "batch_size",
        default=None,
        help="Sequences at once: by default 1 for --latency, 32 for --plan.",
    ),
)
def inspect(
    model: Model,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequence length for FLOPs and time; by default 128 (or the maximum of the model, if that is less), "
            "the patches of an image, or the frames of a recording.",
            rich_help_panel="Model",
        ),
    ] = None,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency", help="Time its layers by heads and width, on this machine.", rich_help_panel="Compute"
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure times again, even if they are cached.", rich_help_panel="Compute"),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Forecast memory and passes over the data of each schedule instead.",
            rich_help_panel="Forecast",
        ),
    ] = False,
    plugin: Plugin = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show a model's sites, and the most that removing its heads could save. Reads only the config."""
    from headprune.checkpoint.paths import refuse_missing_structure

    import_plugins(plugin)
    refuse_missing_structure(model)

    from headprune.checkpoint.save_load import load_structure
    from headprune.cli.inspection_table import print_inspection
    from headprune.measure.inspection import inspect as inspect_model

    structure = load_structure(model)
    if plan:
        from headprune.cli.forecast_table import show_plan

        names = ("calibration_samples", "evaluation_samples", "max_length", "batch_size", "dtype")
        show_plan(model, structure, *(options[name] for name in names), as_json=as_json)
        return
    inspection = inspect_model(structure, tokens=tokens)
    if not latency:
        print_json(inspection.to_json()) if as_json else print_inspection(model, inspection)
        return

    from headprune.cli.latency_table import print_latency
    from headprune.measure.latency import latency_table

    batch, threads = options["batch_size"] or 1, options["threads"]
    table = latency_table(structure, batch_size=batch, length=tokens, threads=threads, fresh=fresh)
    if as_json:
        print_json({**inspection.to_json(), "latency": table.to_json()})
    else:
        print_inspection(model, inspection)
        print_latency(table)
