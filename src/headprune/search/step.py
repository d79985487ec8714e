"""A step as a trajectory keeps it: what was removed from a model, and what was measured after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.measure.costs import flops, total_parameters
from headprune.measure.metrics import Measured, agreement
from headprune.measure.quality import Quality
from headprune.measure.trajectory import Step
from headprune.search.schedules.schedule import Removal
from headprune.units import Kind, Site, widest


def describe(
    model: PreTrainedModel,
    sites: Sequence[Site],
    kinds: Sequence[Kind],
    number: int,
    removal: Removal,
    quality: Quality,
    reference: Quality,
    measured: Measured,
    latency: float | None = None,
) -> Step:
    """A step of this number: what was removed from the model, whose sites are these now, and what was measured then."""
    counted = flops(model, sites)
    return Step(
        step=number,
        removed=removal.members,
        score=removal.score,
        metric=measured.value,
        interval=measured.interval,
        outcomes=measured.outcomes,
        agreement=agreement(reference, quality),
        loss=quality.loss,
        units={kind: sum(s.size for s in sites if s.kind == kind) for kind in kinds},
        applied={kind: sum(s.size * s.applications for s in sites if s.kind == kind) for kind in kinds},
        parameters=total_parameters(model),
        flops=counted.units_total,
        model_flops=counted.total,
        compensation=tuple(repair.to_json() for repair in removal.repairs),
        scores=removal.scores,
        latency=latency,
        **_about_neurons(sites, kinds),
    )


def _about_neurons(sites: Sequence[Site], kinds: Sequence[Kind]) -> dict[str, Any]:
    """What a step says of feed-forward layers, where their neurons may go."""
    if "neurons" not in kinds:
        return {}
    attention = [site for site in sites if site.kind == "heads"]
    widths = {site.index: site.size for site in sites if site.kind == "neurons"}
    return {"attention": (len(attention), widest(attention)), "widths": widths}
