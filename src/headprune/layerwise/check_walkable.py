"""Checks that a model can run layer by layer: the outputs must equal those of the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.errors import HeadpruneError, UnsupportedModelError
from headprune.hooks.layer_calls import NotLayerwiseError
from headprune.hooks.logit_blocks import comparable_outputs, few_logits
from headprune.layerwise.walker import Walker
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task, task_of
from headprune.units import Site, sites_of
from headprune.units.dense_model import changed_module, classes_of, dense_class, dense_config, quiet, structure_of
from headprune.units.families import family_of

DEPTH = 3


def require_walkable(model: PreTrainedModel) -> None:
    """Raise unless a small random twin of this class, whose weights may be on disk, has the same outputs layer by
    layer."""
    kind, config = dense_class(model), dense_config(model.config)
    entry = repr(family_of(config.model_type))  # anyone may register another
    changed = changed_module(model)
    if changed is not None:
        raise UnsupportedModelError(
            f"{changed or kind.__name__} is not as its class builds it, and the removal of units from single layers "
            "cannot be verified on the whole model; use --schedule rounds."
        )
    reason = remembered(
        kind,
        f"layers {entry} {structure_of(config)}",
        lambda: _reason_of_twin(model),
        classes=classes_of(kind, config),
    )
    if reason:
        raise UnsupportedModelError(f"{kind.__name__} cannot run layer by layer: {reason}; use --schedule rounds.")


def _reason_of_twin(model: PreTrainedModel) -> str:
    from headprune.discovery import small_twin

    with torch.device("cpu"), quiet():
        try:
            twin, whole = small_twin(model, DEPTH)
        except UnsupportedModelError as error:
            return f"no small twin of it runs ({error})"
        if not whole:
            return "no small twin of it runs as a whole"
        sites = sites_of(twin, ("heads", "neurons"))
        return reason_against(twin, sites, whole, task_of(twin)) or _removal_fails(twin, sites, whole[0])


def _removal_fails(twin: PreTrainedModel, sites: Sequence[Site], batch: Mapping[str, Any]) -> str:
    """Why units cannot be removed; checked on the twin, as layers on disk are pruned where the whole model does not
    run."""
    units = [site.units()[0] for site in sites if not site.obstacle and len(site.units()) > 1]
    try:
        remove_units(twin, [member for unit in units for member in unit], sites=sites, verify=batch)
    except HeadpruneError as error:
        return f"on a small twin of it, {error}"
    return ""


def is_walkable(
    model: PreTrainedModel, sites: Sequence[Site], batches: Sequence[Mapping[str, Any]], task: Task
) -> bool:
    """Whether this model has the same outputs layer by layer, tested on the first sample."""
    return not reason_against(model, sites, [task.select(batches[0], slice(0, 1))], task, all_logits=False)


def reason_against(
    model: PreTrainedModel,
    sites: Sequence[Site],
    batches: Sequence[Mapping[str, Any]],
    task: Task,
    *,
    all_logits: bool = True,
) -> str:
    """Why these batches cannot run through the layers one by one; empty where they can."""
    model_inputs = dict if all_logits else functools.partial(few_logits, model)
    try:
        walker = Walker(model, sites, batches, task, which=("dense",))
        for layer in walker.layers():
            walker.advance(layer, "dense")
        for number in range(len(batches)):
            expected = comparable_outputs(model, model_inputs(task.inputs(walker.prepared(number))))
            with walker.after_layers("dense", number) as inputs:
                actual = comparable_outputs(model, model_inputs(inputs))
            if not all(map(torch.equal, expected, actual)):
                return "its outputs are different layer by layer"
    except NotLayerwiseError as error:
        return str(error)
    except Exception as error:  # whatever a layer raises when it is called alone
        return f"its layers do not run one by one ({' '.join(str(error).split())[:200]})"
    return ""
