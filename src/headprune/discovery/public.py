"""The functions that other packages call: the attention sites of a model, a small random model of its class, and inputs
that it runs on."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.discovery.attention import Discovery, DiscoveryError, discover_class, twin_of
from headprune.discovery.plain_modules import discover_module
from headprune.discovery.twin import sample_runs, small_config
from headprune.units.dense_model import dense_class, dense_config


def discover(model: nn.Module) -> Discovery:
    """The attention sites of a model: by an experiment on its class, or, where it is no transformers model, on a copy
    of the module."""
    if isinstance(model, PreTrainedModel):
        return discover_class(dense_class(model), model.config)
    return discover_module(model)


def small_twin(model: PreTrainedModel, depth: int) -> tuple[Any, list[dict[str, Any]]]:
    """A narrow random model of the same class with `depth` layers, and inputs for its forward."""
    kind, config = dense_class(model), dense_config(model.config)
    try:
        twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a config class that rejects the small sizes
        raise DiscoveryError(str(error)) from None
    return twin, [run.inputs for run in runs if not run.path]


def whole_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Small inputs on which the forward of the model runs; None where no guess works."""
    return next((run.inputs for run in sample_runs(model) if not run.path), None)
