"""What other rooms ask discovery for: the attention of a model, a small random model of its class, and inputs that it
runs on."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.discovery.attention import Discovery, DiscoveryError, discover_class, twin_of
from headprune.discovery.plain_modules import discover_module
from headprune.discovery.twin import sample_runs, small_config
from headprune.units.dense import dense_class, dense_config


def discover(model: nn.Module) -> Discovery:
    """The attention of a model: by an experiment on its class, or, where it is no transformers model, on itself."""
    if isinstance(model, PreTrainedModel):
        return discover_class(dense_class(model), model.config)
    return discover_module(model)


def small_twin(model: PreTrainedModel, depth: int) -> tuple[Any, list[dict[str, Any]]]:
    """A narrow random model of the class of this one, with so many layers, and inputs that it runs on as a whole."""
    kind, config = dense_class(model), dense_config(model.config)
    try:
        twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what a config says to sizes it did not expect
        raise DiscoveryError(str(error)) from None
    return twin, [run.inputs for run in runs if not run.path]


def whole_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Small inputs on which the model runs as a whole; None where none were found."""
    return next((run.inputs for run in sample_runs(model) if not run.path), None)
