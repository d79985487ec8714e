"""Creates a step of a trajectory: what was removed from a model, and what was measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.measure.costs import flops, total_parameters
from headprune.measure.metrics import MetricValue, agreement
from headprune.measure.predictions import Predictions
from headprune.measure.trajectory import Step
from headprune.search.schedules.schedule import Removal
from headprune.units import Kind, Site, widest


def describe(
    model: PreTrainedModel,
    sites: Sequence[Site],
    kinds: Sequence[Kind],
    number: int,
    removal: Removal,
    predictions: Predictions,
    reference: Predictions,
    metric_value: MetricValue,
    latency: float | None = None,
) -> Step:
    """The step of this number; `sites` are those of the model after the removal."""
    flop_count = flops(model, sites)
    return Step(
        step=number,
        removed=removal.members,
        score=removal.score,
        metric=metric_value.value,
        interval=metric_value.interval,
        per_sample=metric_value.per_sample,
        agreement=agreement(reference, predictions),
        loss=predictions.loss,
        units={kind: sum(s.size for s in sites if s.kind == kind) for kind in kinds},
        applied={kind: sum(s.size * s.applications for s in sites if s.kind == kind) for kind in kinds},
        parameters=total_parameters(model),
        flops=flop_count.units_total,
        model_flops=flop_count.total,
        repairs=tuple(repair.to_json() for repair in removal.repairs),
        scores=removal.scores,
        latency=latency,
        **_neuron_fields(sites, kinds),
    )


def _neuron_fields(sites: Sequence[Site], kinds: Sequence[Kind]) -> dict[str, Any]:
    """Fields about feed-forward layers, where neurons are pruned."""
    if "neurons" not in kinds:
        return {}
    attention = [site for site in sites if site.kind == "heads"]
    widths = {site.index: site.size for site in sites if site.kind == "neurons"}
    return {"attention": (len(attention), widest(attention)), "widths": widths}
