"""Whether a model can be walked through layer by layer: what comes out must be what the model gives at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.batches import rows_of
from headprune.cache import remembered
from headprune.errors import HeadpruneError, UnsupportedModelError
from headprune.hooks.calls import UnfollowableError
from headprune.hooks.logits import compared, few_logits
from headprune.layerwise.walker import Walker
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task, task_of
from headprune.units import Site, sites_of
from headprune.units.dense import dense_class, dense_config, quiet, structure_of
from headprune.units.families import family_of

DEPTH = 3


def require_walkable(model: PreTrainedModel) -> None:
    """Raise unless a small random twin of this class, which may be on disk, gives the same layer by layer."""
    kind, config = dense_class(model), dense_config(model.config)
    entry = repr(family_of(config.model_type))  # anyone may register another
    reason = remembered(kind, f"layers {entry} {structure_of(config)}", lambda: _reason_of_twin(model))
    if reason:
        raise UnsupportedModelError(
            f"{kind.__name__} cannot be gone through layer by layer: {reason}; use --schedule rounds."
        )


def _reason_of_twin(model: PreTrainedModel) -> str:
    from headprune.discovery import DiscoveryError, small_twin

    with torch.device("cpu"), quiet():
        try:
            twin, whole = small_twin(model, DEPTH)
        except DiscoveryError as error:
            return f"no small twin of it runs ({error})"
        if not whole:
            return "no small twin of it runs as a whole"
        sites = sites_of(twin, ("heads", "neurons"))
        return reason_against(twin, sites, whole, task_of(twin)) or _removal_fails(twin, sites, whole[0])


def _removal_fails(twin: PreTrainedModel, sites: Sequence[Site], batch: Mapping[str, Any]) -> str:
    """Why units cannot be removed; layers that come from a disk are pruned where no model runs as a whole."""
    units = [site.units()[0] for site in sites if not site.obstacle and len(site.units()) > 1]
    try:
        remove_units(twin, [member for unit in units for member in unit], sites=sites, verify=batch)
    except HeadpruneError as error:
        return f"on a small twin of it, {error}"
    return ""


def is_walkable(
    model: PreTrainedModel, sites: Sequence[Site], batches: Sequence[Mapping[str, Any]], task: Task
) -> bool:
    """Whether this model gives the same layer by layer, tried on the first sample."""
    return not reason_against(model, sites, [rows_of(batches[0], slice(0, 1))], task, all_logits=False)


def reason_against(
    model: PreTrainedModel,
    sites: Sequence[Site],
    batches: Sequence[Mapping[str, Any]],
    task: Task,
    *,
    all_logits: bool = True,
) -> str:
    """Why these batches cannot be taken through the layers one by one; empty where they can."""
    asked = dict if all_logits else functools.partial(few_logits, model)
    try:
        walker = Walker(model, sites, batches, task, which=("dense",))
        for layer in walker.layers():
            walker.advance(layer, "dense")
        for number in range(len(batches)):
            expected = compared(model, asked(task.inputs(walker.prepared(number))))
            with walker.behind("dense", number) as inputs:
                actual = compared(model, asked(inputs))
            if not all(map(torch.equal, expected, actual)):
                return "its layers one by one give something else than the model"
    except UnfollowableError as error:
        return str(error)
    except Exception as error:  # whatever a layer says to what it is given out of its turn
        return f"its layers do not run one by one ({' '.join(str(error).split())[:200]})"
    return ""
