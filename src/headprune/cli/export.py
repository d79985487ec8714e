"""The verb `export`: writes a model for another runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.options import OUTPUT, Json, Overwrite, Plugin, print_json, with_options
from headprune.config.groups import (
    ComputeOptions,
    DataOptions,
    EvaluationOptions,
    LatencyOptions,
    MeasuringOptions,
    ModelOptions,
    StopOptions,
)
from headprune.config.option import check_number, from_run, only
from headprune.display import counted
from headprune.errors import ExportError
from headprune.runs.plugins import import_plugins

CHECKS = (
    *only(
        DataOptions,
        "data",
        default=None,
        required=False,
        help="Data to check it on; by default the run's evaluation samples.",
    ),
    *only(
        MeasuringOptions,
        "dense",
        help="Model to compare times with; by default the one that the run started from.",
    ),
    *only(MeasuringOptions, "samples", help="Check on this many samples, drawn by the seed."),
    *only(EvaluationOptions, "metric", help="Metric to check it by; the run's by default."),
    *only(
        StopOptions,
        "max_drop",
        help="Drop of the metric that is allowed by quantisation; its interval by default.",
    ),
    *only(LatencyOptions, "threads", default=1, help="Threads for timing."),
)


@with_options(from_run(ModelOptions), from_run(DataOptions), from_run(only(ComputeOptions, "batch_size")), CHECKS)
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, a folder of one of its models, another model, or a hub name.")
    ],
    to: Annotated[
        str,
        typer.Option(help="Runtime to export to: onnx, openvino, gguf or torch.", rich_help_panel=OUTPUT),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write, created once the export has passed its check; by default RUN/exports/RUNTIME, "
            "for a model of a run.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights in fewer bits: 'int8'; for gguf 'q8_0' or 'q4_0'.", rich_help_panel=OUTPUT),
    ] = None,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Write a model for another runtime, check its outputs against PyTorch, and time it against the dense model."""
    from headprune.cli.preflight import quiet_transformers
    from headprune.data.locations import refuse_missing_data

    import_plugins(plugin)
    checks = {option.name: options.pop(option.name) for option in CHECKS}
    if checks["data"] is not None:
        refuse_missing_data(checks["data"])
    if checks["max_drop"] is not None:
        check_number("--max-drop", checks["max_drop"], least=0, error=ExportError)

    from headprune.runs.exports import ExportRequest, run_export

    quiet_transformers()
    request = ExportRequest(
        source=model,
        to=to,
        out=out,
        quantize=quantize,
        reading=options,
        **checks,
    )
    record = run_export(request, overwrite=overwrite)
    if as_json:
        print_json({"out": str(request.target), **record})
    else:
        print_export(request.target, record)


def lines(record: Mapping[str, Any]) -> list[str]:
    """The measurements, in sentences."""
    from headprune.exports.check_outputs import GENERATIVE_TASKS
    from headprune.exports.runtime import TOKENS
    from headprune.reports.format import measured_text

    checked, times, size = record["check"], record["latency"], record["megabytes"]
    sentences = []
    if checked["metric"] is not None:
        theirs, ours = (
            measured_text(checked["metric"], checked[who]["value"], checked[who]["interval"])
            for who in ("exported", "pytorch")
        )
        samples = counted(checked["samples"], "sample")
        sentences.append(f"{checked['metric']} {theirs} on {samples}, where PyTorch has {ours}.")
    allowed = "" if checked["tolerance"] is None else f" (allowed: {checked['tolerance']:g})"
    sentences.append(f"Outputs differ from PyTorch's by at most {checked['difference']:.2g} of their size{allowed}.")
    if checked["tokens"] is not None:
        sentences.append(f"Of {TOKENS} generated tokens, {checked['tokens']} equal those of PyTorch.")
    if record.get("form") == "plain" and record["task"] in GENERATIVE_TASKS:
        sentences.append("It has no KV cache, as this model has other states than keys and values.")
    threads = counted(times["threads"], "thread")
    for name, milliseconds in times.items():
        if isinstance(milliseconds, dict):
            kind, _, number = name.partition("_")
            workload = f"a batch of {number}" if kind == "batch" else f"generating {number} tokens"
            before = f"{milliseconds['dense']:.2f} -> " if "dense" in milliseconds else ""
            faster = f", {milliseconds['speedup']:.2f} times as fast" if "speedup" in milliseconds else ""
            sentences.append(f"Milliseconds for {workload}: {before}{milliseconds['pruned']:.2f}{faster} ({threads}).")
    before = f"{size['dense']:.1f} -> " if "dense" in size else ""
    return [*sentences, f"Megabytes: {before}{size['pruned']:.1f}."]


def print_export(out: Path, record: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for line in lines(record):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(f"The model is in {escape(str(out))}; {escape(str(out / 'run.py'))} runs it.", highlight=False)
