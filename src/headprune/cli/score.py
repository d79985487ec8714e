"""The verb `score`: scores every head, or neuron, by one criterion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import distributed
from headprune.cli.options import OUTPUT, Json, Model, Plugin, print_json, with_options
from headprune.config.groups import (
    ComputeOptions,
    CriterionOptions,
    DataOptions,
    MeasuringOptions,
    ModelOptions,
    ScoringOptions,
)
from headprune.config.option import only, values_of
from headprune.runs.plugins import import_plugins
from headprune.search.config import InputConfig, PruneConfig


@with_options(
    ModelOptions,
    DataOptions,
    only(CriterionOptions, "criterion"),
    ScoringOptions,
    ComputeOptions,
    only(MeasuringOptions, "samples"),
)
def score(
    model: Model,
    plugin: Plugin = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the scores here: .csv, or a heat map: .png, .svg, .pdf.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Score every head of a model, or neuron, on some data, and draw the scores as a heat map."""
    from headprune.cli.preflight import check_early, quiet_transformers

    import_plugins(plugin)
    check_early(model, options)

    from headprune.cli.progress import live_phases
    from headprune.cli.score_map import print_scores, score_rows
    from headprune.criteria.scoring import score as score_model
    from headprune.measure.trajectory import finite_or_none
    from headprune.reports.scores import check_target, write_scores
    from headprune.runs.loading import load_run_inputs

    quiet_transformers()
    input_config = InputConfig(model=model, **values_of(InputConfig, options))
    config = PruneConfig(**{name: options[name] for name in ("criterion", "units", "labels", "task")})
    if out is not None:
        check_target(out)
    distributed.start()
    with live_phases(f"Scoring by {config.criterion}"):
        with distributed.fail_together():
            inputs = load_run_inputs(input_config)
            examples = inputs.examples.sample(options["samples"], input_config.seed)
            inputs.check_labels(config.criterion, config.labels)
        result = score_model(
            inputs.model,
            examples.batches(input_config.batch_size, full=config.criterion.by_batch),
            criterion=config.criterion,
            labels=config.labels,  # type: ignore[arg-type]  # checked by the config
            task=inputs.task,
            progress=False,  # the display shows the phases
            units=config.units,
        )
    if out is not None:
        distributed.on_main(lambda: write_scores(str(config.criterion), result, out))
    if as_json:
        metric_value = result.metric_value
        print_json(
            {
                "criterion": str(config.criterion),
                "samples": result.samples,
                "tokens": result.tokens,
                "seconds": result.seconds,
                "accuracy": result.accuracy,
                "metric": None if result.metric is None else result.metric.name,
                "value": None if metric_value is None else finite_or_none(metric_value.value),
                "interval": None
                if metric_value is None or metric_value.interval is None
                else list(metric_value.interval),
                "loss": result.loss,
                "token_loss": result.token_loss,
                "scores": score_rows(result),
                **({"unreached": dict(result.unreached)} if result.unreached else {}),
                **({"kinds": [site.kind for site in result.sites]} if config.units != ("heads",) else {}),
            }
        )
    else:
        print_scores(inputs.model, str(config.criterion), result)
        if out is not None:
            typer.echo(f"Scores are in {out}.")
