"""The verb `train`: trains gates that learn which units to remove."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.finetune import print_recovery
from headprune.cli.options import Json, Model, Overwrite, Plugin, RunFolder, print_json, resumable, with_options
from headprune.config.groups import ComputeOptions, DataOptions, EvaluationOptions, ModelOptions
from headprune.config.option import only, values_of
from headprune.config.training import GateBudgetOptions, GateOptions, TrainingOptions
from headprune.runs.plugins import import_plugins
from headprune.search.config import Experiment
from headprune.training.config import TrainConfig
from headprune.training.gate_config import GateConfig

INPUT_GROUPS = (ModelOptions, DataOptions, EvaluationOptions, only(ComputeOptions, "device"))


@with_options(*INPUT_GROUPS, GateBudgetOptions, GateOptions, TrainingOptions, defaults={"gate_rate": None})
def train(
    model: Model,
    out: RunFolder,
    eval_data: Annotated[
        str | None,
        typer.Option(
            help="Data to evaluate on; by default a tenth of --data is held out.", rich_help_panel="Evaluation"
        ),
    ] = None,
    finetune_epochs: Annotated[
        float, typer.Option(min=0, help="Epochs after the removal; 0 for none.", rich_help_panel="Training")
    ] = 1.0,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model with gates that learn which heads, or neurons, to remove; remove these, and fine-tune."""
    from headprune.cli.preflight import check_early, quiet_transformers
    from headprune.data.locations import refuse_missing_data

    import_plugins(plugin)
    check_early(model, {"data": options["data"], "keep": options["keep"]}, reports=True)
    if eval_data is not None:
        refuse_missing_data(eval_data)
    gate_options = values_of(GateConfig, options)
    if options["gate_rate"] is None:  # set once the number of steps is known
        del gate_options["rate"]
    gates = GateConfig(**gate_options)
    config = TrainConfig(**values_of(TrainConfig, options))

    from headprune.cli.progress import live_curve
    from headprune.runs.train_gates import TrainRequest, run_training

    quiet_transformers()
    input_settings = {name: value for group in INPUT_GROUPS for name, value in values_of(group, options).items()}
    request = TrainRequest(
        experiment=Experiment(model=model, seed=config.seed, batch_size=config.batch_size, **input_settings),
        gates=gates,
        config=config,
        evaluation=eval_data,
        finetune_epochs=finetune_epochs,
        explicit_rate=options["gate_rate"] is not None,
    )
    distributed.start()
    with resumable(out), live_curve("Learned gates") as observer:
        record = run_training(request, out, overwrite=overwrite, observer=observer)
    if as_json:
        print_json(_summary_json(out, record))
        return

    from headprune.cli.run_summary import print_run

    print_run(out, record)
    if "recovery" in record:
        print_recovery(out, record["recovery"])


def _summary_json(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    result, recovery = record["result"], record.get("recovery")
    names = ("units", "metric", "dense", "pruned", "dense_interval", "pruned_interval", "agreement", "rule")
    summary = {"run": str(out), **{name: result.get(name) for name in names}, "gates": record["gates"]}
    if recovery is None:
        return {**summary, "recovered": None, "model": str(out / "model")}
    after = recovery["recovered"]
    return {
        **summary,
        "recovered": after["value"],
        "recovered_interval": after["interval"],
        "model": str(out / "finetuned" / "model"),
    }
