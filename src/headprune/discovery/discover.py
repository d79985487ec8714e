"""The functions that other packages call: the sites of a model, a small random model of its class, and inputs that it
runs on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from headprune.discovery.attention import Discovery, DiscoveryError, discover_class, twin_of
from headprune.discovery.plain_modules import discover_module
from headprune.discovery.sites_from_layouts import DenseSite, site_of
from headprune.discovery.twin import sample_runs, small_config
from headprune.errors import UnsupportedModelError
from headprune.hooks.module_paths import submodule
from headprune.hooks.torch_attention import original_class
from headprune.units.attention import HOW_TO_REGISTER, refuse_bad_record, stack_of
from headprune.units.dense_model import dense_class, dense_config
from headprune.units.linear import refuse_computed
from headprune.units.placeholders import Bias, Zeros
from headprune.units.slicing.record import removed_members
from headprune.units.spec import Site


def discover(model: nn.Module) -> tuple[list[Site], tuple[tuple[str, str], ...]]:
    """The attention sites of a model, and the paths of attention that cannot be pruned, with reasons: by an experiment
    on its class, or, where it is no transformers model, on a copy of the module."""
    discovery = _discovery_of(model)
    removed = removed_members(model, "heads")
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    sites = []
    for index, dense in enumerate(discovery.sites):
        ids = removed.get(index, [])
        _refuse_other_classes(model, dense, len(ids) == len(dense.layout.members))
        refuse_bad_record(index, dense.path, ids, len(dense.layout.members))
        applications = uses[id(model.get_submodule(dense.path))]
        sites.append(site_of(dense, index, ids, stack=stack_of(model, dense.path, None), applications=applications))
    return sites, discovery.left


def _discovery_of(model: Any) -> Discovery:
    try:
        if isinstance(model, PreTrainedModel):
            return discover_class(dense_class(model), model.config)
        return discover_module(model)
    except DiscoveryError as error:
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(
                f"The layout of {type(model).__name__}, which is no transformers model, could not be measured: {error}."
            ) from None
        raise UnsupportedModelError(
            f"Model type {model.config.model_type!r} is not in the table, and its layout could not be measured: "
            f"{error}; {HOW_TO_REGISTER}."
        ) from None


def _refuse_other_classes(model: nn.Module, dense: DenseSite, empty: bool) -> None:
    """Discovery measures the class as it is built, so an adapter or a quantised map is refused."""
    for path, expected in dense.kinds:
        module = submodule(model, path)
        if empty and (module is None or isinstance(module, (Bias, Zeros))):
            continue
        kind = type(None) if module is None else original_class(module)
        if module is not None and is_parametrized(module):
            refuse_computed(module, path)
        if f"{kind.__module__}.{kind.__qualname__}" != expected:
            raise UnsupportedModelError(
                f"Stopped at {path}: it is a {kind.__name__} and not the {expected.rpartition('.')[2]} that the model "
                "is built with; merge the adapter or dequantise the model first."
            )


def small_twin(model: PreTrainedModel, depth: int) -> tuple[Any, list[dict[str, Any]]]:
    """A narrow random model of the same class with `depth` layers, and inputs for its forward."""
    kind, config = dense_class(model), dense_config(model.config)
    try:
        twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
    except (DiscoveryError, ValueError, TypeError, KeyError, AttributeError) as error:
        # A config class may reject the small sizes with any of these.
        raise UnsupportedModelError(str(error)) from None
    return twin, [run.inputs for run in runs if not run.path]


def whole_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Small inputs on which the forward of the model runs; None where no guess works."""
    return next((run.inputs for run in sample_runs(model) if not run.path), None)
