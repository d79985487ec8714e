"""The verb that exports models to other runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.options import COLUMNS, Json, Overwrite, Plugin, print_json, with_options
from headprune.runs.plugins import import_plugins


@with_options(declared=None, of_the_run=(*COLUMNS, "task", "batch_size", "max_length", "processor"))
def export(
    model: Annotated[str, typer.Argument(help="A run, a folder of one of its models, another model, or a hub name.")],
    to: Annotated[str, typer.Option(help="Where it is to run: onnx, openvino, gguf or torch.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    quantize: Annotated[str | None, typer.Option(help="Weights in fewer bits: int8; for gguf q8_0 or q4_0.")] = None,
    data: Annotated[
        str | None, typer.Option(help="What to check it on; the run's own evaluation samples by default.")
    ] = None,
    dense: Annotated[
        str | None, typer.Option(help="Model to compare times with; the one that the run started from by default.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Check on this many samples, drawn by the seed.")] = None,
    metric: Annotated[str | None, typer.Option(help="What is measured; the run's metric by default.")] = None,
    max_drop: Annotated[
        float | None, typer.Option(min=0, help="Drop of the metric that quantising may cost; its interval by default.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads that times are taken with.")] = 1,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Write a model for another runtime, check it there against PyTorch, and time it beside the dense model."""
    from headprune.cli.early import quiet_transformers
    from headprune.data.places import refuse_missing_data

    import_plugins(plugin)
    if data is not None:
        refuse_missing_data(data)

    from headprune.runs.exports import ExportRequest, run_export

    quiet_transformers()
    request = ExportRequest(
        place=model,
        to=to,
        out=out,
        quantize=quantize,
        data=data,
        dense=dense,
        samples=samples,
        metric=metric,
        max_drop=max_drop,
        threads=threads,
        reading=options,
    )
    record = run_export(request, overwrite=overwrite)
    if as_json:
        print_json({"out": str(out), **record})
    else:
        print_export(out, record)


def lines(record: Mapping[str, Any]) -> list[str]:
    """What was measured, in sentences."""
    from headprune.report.words import measured_text
    from headprune.runtimes.check import WRITING
    from headprune.runtimes.spec import TOKENS

    checked, times, size = record["check"], record["latency"], record["megabytes"]
    found = []
    if checked["metric"] is not None:
        theirs, ours = (
            measured_text(checked["metric"], checked[who]["value"], checked[who]["interval"])
            for who in ("exported", "pytorch")
        )
        found.append(f"{checked['metric']} {theirs} on {checked['samples']} samples, where PyTorch has {ours}.")
    allowed = "" if checked["tolerance"] is None else f" (allowed: {checked['tolerance']:g})"
    found.append(f"Outputs differ from PyTorch's by at most {checked['difference']:.2g} of their size{allowed}.")
    if checked["tokens"] is not None:
        found.append(f"Of {TOKENS} tokens that it writes, {checked['tokens']} are PyTorch's.")
    if record.get("form") == "plain" and record["task"] in WRITING:
        found.append("It remembers nothing of earlier tokens: what this model keeps of them is not keys and values.")
    threads = "1 thread" if times["threads"] == 1 else f"{times['threads']} threads"
    for name, one in times.items():
        if isinstance(one, dict):
            what, _, number = name.partition("_")
            said = f"a batch of {number}" if what == "batch" else f"writing {number} tokens"
            before = f"{one['dense']:.2f} -> " if "dense" in one else ""
            faster = f", {one['speedup']:.2f} times as fast" if "speedup" in one else ""
            found.append(f"Milliseconds for {said}: {before}{one['pruned']:.2f}{faster} ({threads}).")
    before = f"{size['dense']:.1f} -> " if "dense" in size else ""
    return [*found, f"Megabytes: {before}{size['pruned']:.1f}."]


def print_export(out: Path, record: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for line in lines(record):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(f"The model is in {escape(str(out))}; {escape(str(out / 'run.py'))} runs it.", highlight=False)
