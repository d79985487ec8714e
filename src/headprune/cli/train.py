"""The verb that trains learned gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import COLUMNS, Json, Model, Overwrite, Plugin, print_json, resumable, with_options
from headprune.cli.training import print_recovery, training_progress
from headprune.gates.config import GateConfig
from headprune.recovery.config import TrainConfig
from headprune.runs.plugins import import_plugins
from headprune.search.config import Experiment, option

# What of an experiment is asked for: how data is read, and what is measured.
READING = ("data", *COLUMNS, "evaluation_samples", "metric", "task", "max_length", "processor", "device")
# Names that gates and training both have, or that are made otherwise here.
RENAMED = {"warmup": "gate_warmup", "rate": "gate_rate"}
OWN_RATE = option(
    None,
    "Learning rate of gates, as a multiple of the model's; the paper's 10, or as much as takes a gate from open to "
    "closed in so short a training.",
    word=float,
)


def _fields() -> list[tuple[str, Any, Any]]:
    """The options of the verb, in the order of the help: data, gates, training."""

    def copied(field: Any, name: str | None = None) -> tuple[str, Any, Any]:
        return name or field.name, Any, dataclasses.field(default=field.default, metadata=field.metadata)

    reading = {field.name: field for field in dataclasses.fields(Experiment)}
    gates = [copied(field, RENAMED.get(field.name)) for field in dataclasses.fields(GateConfig)]
    return [
        *(copied(reading[name]) for name in READING),
        *((name, kind, OWN_RATE if name == "gate_rate" else field) for name, kind, field in gates),
        *(copied(field) for field in dataclasses.fields(TrainConfig) if field.name != "lora"),
    ]


TrainOptions = dataclasses.make_dataclass("TrainOptions", _fields(), kw_only=True)


@with_options(declared=TrainOptions)
def train(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory of the run; an interrupted one goes on.")],
    evaluation: Annotated[
        str | None, typer.Option(help="Data to evaluate on; a tenth of --data is held back for it by default.")
    ] = None,
    finetune_epochs: Annotated[float, typer.Option(min=0, help="Epochs after the removal; 0 for none.")] = 1.0,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model with gates that learn which heads, or neurons, can go; remove those, and fine-tune."""
    from headprune.cli.early import check_early, quiet_transformers
    from headprune.data.places import refuse_missing_data

    import_plugins(plugin)
    check_early(model, {"data": options["data"], "keep": options["keep"]}, reports=True)
    if evaluation is not None:
        refuse_missing_data(evaluation)
    gates = _gates(options)
    config = TrainConfig(**_of(TrainConfig, options))

    from headprune.cli.live import live_curve
    from headprune.runs.training import Training, run_training

    quiet_transformers()
    reading = {name: options[name] for name in READING}
    experiment = Experiment(model=model, seed=config.seed, batch_size=config.batch_size, **reading)
    asked = Training(
        experiment=experiment,
        gates=gates,
        config=config,
        evaluation=evaluation,
        finetune_epochs=finetune_epochs,
        own_rate=options["gate_rate"] is not None,
    )
    distributed.start()
    with resumable(out), training_progress() as tell, live_curve("Learned gates") as curve:
        record = run_training(asked, out, overwrite=overwrite, on_step=curve, tell=tell)
    if as_json:
        print_json(_for_machines(out, record))
        return

    from headprune.cli.tables import print_run

    print_run(out, record)
    if "recovery" in record:
        print_recovery(out, record["recovery"])


def _gates(options: Mapping[str, Any]) -> GateConfig:
    given = {
        name: options[RENAMED.get(name, name)] for name in (field.name for field in dataclasses.fields(GateConfig))
    }
    if isinstance(given["keep"], str):
        given["keep"] = _parsed("keep", given["keep"])
    if given["rate"] is None:
        del given["rate"]
    return GateConfig(**given)


def _parsed(name: str, text: str) -> Any:
    (field,) = (field for field in dataclasses.fields(GateConfig) if field.name == name)
    return field.metadata["parse"](text)


def _of(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options}


def _for_machines(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    result, recovery = record["result"], record.get("recovery")
    names = ("units", "metric", "dense", "pruned", "dense_interval", "pruned_interval", "agreement", "rule")
    said = {"run": str(out), **{name: result.get(name) for name in names}, "gates": record["gates"]}
    if recovery is None:
        return {**said, "recovered": None, "model": str(out / "model")}
    after = recovery["recovered"]
    return {
        **said,
        "recovered": after["value"],
        "recovered_interval": after["interval"],
        "model": str(out / "finetuned" / "model"),
    }
