"""The verbs that train: recovery of pruned models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import COLUMNS, Json, Overwrite, Plugin, print_json, resumable, with_options
from headprune.recovery.config import TrainConfig
from headprune.runs.plugins import import_plugins

EVERY = 10  # seconds between lines where there is no terminal


@with_options(declared=TrainConfig, of_the_run=COLUMNS)
def finetune(
    run: Annotated[Path, typer.Argument(help="A run of `headprune prune` or `train` that came to its end.")],
    data: Annotated[str, typer.Option(help="What to train on: a file, folder or data set, as for `headprune prune`.")],
    point: Annotated[str | None, typer.Option(help="Recover this one of RUN/models instead of RUN/model.")] = None,
    no_distill: Annotated[bool, typer.Option("--no-distill", help="Learn from labels alone.")] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="Prune and recover by turns: the run's target in this many parts.")
    ] = 1,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a run's pruned model on labels and on what the dense model says, and keep the best."""
    from headprune.cli.early import quiet_transformers
    from headprune.data.places import refuse_missing_data
    from headprune.extras import need_report

    import_plugins(plugin)
    need_report()
    asked = {name: options.pop(name) for name in COLUMNS}
    if no_distill:
        options = {**options, "distill": 0.0, "hidden": 0.0}
    config = TrainConfig(**options)
    refuse_missing_data(data)

    from headprune.cli.live import live_curve
    from headprune.runs.finetune import run_finetune
    from headprune.runs.request import Request

    quiet_transformers()
    reading = {name: value for name, value in asked.items() if value is not None}
    request = Request(run=run, data=data, config=config, point=point, rounds=rounds, reading=reading)
    distributed.start()
    with resumable(run / "finetuned"), training_progress() as tell:
        if rounds == 1:
            record = run_finetune(request, overwrite=overwrite, tell=tell)
        else:
            with live_curve("Pruning") as curve:
                record = run_finetune(request, overwrite=overwrite, tell=tell, on_step=curve, on_round=curve.start)
    if as_json:
        print_json(_for_machines(run, record))
    else:
        print_recovery(run, record)


def _for_machines(run: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("steps", "best_step", "stopped_early", "seconds", "samples", "rounds", "notes")
    values = {name: record[name]["value"] for name in ("dense", "pruned", "recovered")}
    intervals = {f"{name}_interval": record[name]["interval"] for name in ("dense", "pruned", "recovered")}
    where = {"run": str(run), "model": str(run / "finetuned" / "model")}
    return {**where, "metric": record["metric"], **values, **intervals, **{name: record[name] for name in names}}


def print_recovery(run: Path, record: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from headprune.report.recovery import how
    from headprune.report.words import measured_text

    console, metric = Console(), record["metric"]
    dense, pruned, after = (
        measured_text(metric, record[name]["value"], record[name]["interval"])
        for name in ("dense", "pruned", "recovered")
    )
    console.print(
        f"Recovered: {escape(f'{metric} {pruned} -> ')}[bold]{escape(after)}[/bold]{escape(f' (dense {dense})')}",
        highlight=False,
    )
    for number, one in enumerate(record["rounds"], start=1):
        before, then = (measured_text(metric, one[k]["value"], one[k]["interval"]) for k in ("pruned", "recovered"))
        console.print(escape(f"Round {number}, {one['left']} left: {before} -> {then}"), highlight=False)
    console.print(how(record), highlight=False, markup=False)
    console.print(f"The model is in {escape(str(run / 'finetuned' / 'model'))}.", highlight=False)


@contextmanager
def training_progress() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """One line on stderr that says where a training is: in place on a terminal, now and then elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    last = time.monotonic()

    def line(said: Mapping[str, Any]) -> str:
        shown = {"loss": "loss", "eval_metric": "metric on held-out data"}
        parts = [f"{word} {said[name]:.4g}" for name, word in shown.items() if name in said]
        return f"Training: step {said['step']} of {said['steps']}" + "".join(f", {part}" for part in parts)

    def tell(said: Mapping[str, Any]) -> None:
        nonlocal last
        if "loss" not in said and "eval_metric" not in said:
            return
        now = time.monotonic()
        if console.is_terminal or now - last > EVERY:
            last = now
            console.print(line(said), end="\r" if console.is_terminal else "\n", highlight=False, soft_wrap=True)

    yield tell
