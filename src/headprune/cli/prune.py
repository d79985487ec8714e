"""The verb `prune`: one run."""

from __future__ import annotations

from typing import Any

from headprune import distributed
from headprune.cli.options import (
    Json,
    Model,
    Overwrite,
    Plugin,
    RunFolder,
    print_json,
    resumable,
    say_resumed,
    with_options,
)
from headprune.config.groups import (
    BudgetOptions,
    CalibrationOptions,
    ComputeOptions,
    CriterionOptions,
    DataOptions,
    EvaluationOptions,
    LatencyOptions,
    MemoryOptions,
    ModelOptions,
    PruningOptions,
    ScoringOptions,
    StopOptions,
    VocabularyOptions,
)
from headprune.config.option import only, values_of
from headprune.config.training import TrainingOptions
from headprune.runs.plugins import import_plugins
from headprune.search.config import Experiment


@with_options(
    *(ModelOptions, DataOptions, CalibrationOptions, StopOptions, BudgetOptions, LatencyOptions),
    *(CriterionOptions, ScoringOptions, PruningOptions, VocabularyOptions),
    *(EvaluationOptions, ComputeOptions, MemoryOptions),
    only(TrainingOptions, "report_to", help="Integration to log steps to: tensorboard, trackio, wandb, ..."),
)
def prune(
    model: Model,
    out: RunFolder,
    plugin: Plugin = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Remove heads, or heads and neurons, step by step, measure the model after each, and save the result."""
    from headprune.cli.preflight import check_early, quiet_transformers

    import_plugins(plugin)
    check_early(model, options, reports=True)

    from headprune.cli.progress import live_curve, with_logger
    from headprune.cli.run_summary import print_run
    from headprune.runs.experiment import run_experiment

    quiet_transformers()
    experiment = Experiment(model=model, **values_of(Experiment, options))
    distributed.start()
    measure = None if experiment.budget is None else experiment.budget.measure
    if not overwrite:
        say_resumed(out)
    with (
        resumable(out),
        live_curve(f"Pruning by {experiment.criterion}", measure) as curve,
        with_logger(curve, options["report_to"], out) as observer,
    ):
        record = run_experiment(experiment, out, overwrite=overwrite, observer=observer)
    result = record["result"]
    if as_json:
        fields = ("heads_before", "heads_after", "units", "metric", "dense", "pruned", "agreement", "step", "rule")
        intervals = ("dense_interval", "pruned_interval")
        shares = (record.get("savings") or {}).get("shares")
        points = {"points": record["points"]} if record.get("points") else {}
        summary = {name: result.get(name) for name in (*fields, *intervals)}
        unreached = {"unreached": result["unreached"]} if result.get("unreached") else {}
        print_json({"run": str(out), **summary, "shares": shares, **points, **unreached})
    else:
        print_run(out, record)
