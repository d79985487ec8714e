"""A class of models is followed layer by layer only if a small random twin gives the same this way as at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.discovery.discover import NoTwinError, twin_of
from headprune.discovery.twin import small_config
from headprune.errors import UnsupportedModelError
from headprune.hooks.calls import UnfollowableError
from headprune.hooks.outputs import evaluating
from headprune.search.sweep.follow import Follower, InMemory
from headprune.tasks import task_of
from headprune.units import sites_of
from headprune.units.dense import dense_class, dense_config, quiet, structure_of

DEPTH = 3


def require_followable(model: PreTrainedModel) -> None:
    """Raise unless going through the layers of this class one by one is proven to give what the model gives."""
    kind, config = dense_class(model), dense_config(model.config)
    reason = remembered(kind, "layers " + structure_of(config), lambda: _reason(kind, config))
    if reason:
        raise UnsupportedModelError(
            f"{kind.__name__} cannot be gone through layer by layer: {reason}; use --schedule rounds."
        )


def _reason(kind: Any, config: Any) -> str:
    """Why it cannot; empty where it can."""
    with torch.device("cpu"), quiet():
        return _tried(kind, config)


def _tried(kind: Any, config: Any) -> str:
    try:
        twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=DEPTH))
    except (NoTwinError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"no small twin of it runs ({error})"
    whole = [run.inputs for run in runs if run.path == ""]
    if not whole:
        return "no small twin of it runs as a whole"
    task = task_of(twin)
    try:
        follower = Follower(twin, sites_of(twin, ("heads", "neurons")), whole, task, InMemory(), which=("dense",))
        for layer in follower.layers():
            follower.advance(layer, "dense")
        for number, given in enumerate(whole):
            with torch.no_grad(), evaluating(twin):
                expected = twin(**task.inputs(task.prepare(given, torch.device("cpu"))))
            with follower.behind("dense", number) as inputs:
                output = twin(**inputs)
            if not torch.equal(task.logits(output), task.logits(expected)):
                return "its layers one by one give something else than the model"
    except UnfollowableError as error:
        return str(error)
    except Exception as error:  # whatever a layer says to what it is given out of its turn
        return f"its layers do not run one by one ({' '.join(str(error).split())[:200]})"
    return ""
