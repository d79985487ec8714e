"""The check that the record of removed units, the dense model that the config describes, and today's weights agree.

Every model is checked when its sites are read, and so also when it is saved: two models may share a config and its
record, and a part of a model, which may have a config of its own, may be pruned by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.module_paths import submodule
from headprune.units.dense_model import dense_class, dense_on_meta
from headprune.units.linear import in_features, is_plain, refuse_computed
from headprune.units.slicing.record import ATTRIBUTES, NAMES, removed_members
from headprune.units.spec import Kind, Site

OTHER_RECORD = (
    "so it is the record of another model, such as a part of this one or one that contains it; build this model from a "
    "copy of the config with {} = {{}}"
)
OTHER_WEIGHTS = (
    "so units were removed from a part of this model, or from a model that it is a part of; remove them from only one "
    "of the two"
)


def check_record(model: nn.Module, kind: Kind, sites: Sequence[Site]) -> None:
    """Raise unless the record of the model for this kind fits its weights at these sites, all that it has."""
    removed = removed_members(model, kind)
    in_config = isinstance(model, PreTrainedModel)
    name = f"config.{NAMES[kind]}" if in_config else ATTRIBUTES[kind]
    beyond = [number for number in removed if removed[number] and not 0 <= number < len(sites)]
    if beyond:
        raise UnsupportedModelError(
            f"{name} lists {kind} of site {beyond[0]}, and {type(model).__name__} has only {len(sites)} sites of "
            f"{kind}, {OTHER_RECORD.format(NAMES[kind])}."
        )
    dense = dense_on_meta(dense_class(model), model.config) if in_config else None
    modules = dict(model.named_modules(remove_duplicate=False))
    for number, site in enumerate(sites):
        _refuse_other_shapes(modules, site, name, len(removed.get(number, ())), dense)
        kept = getattr(modules[site.path], "headprune_kept", None) if kind == "heads" else None
        if kept is not None and list(kept) != list(site.kept):
            raise UnsupportedModelError(
                f"{name} says that {kind} {list(site.kept)} of site {site.index} ({site.path}) are left, but it has "
                f"{list(kept)}, {OTHER_WEIGHTS}."
            )


def _refuse_other_shapes(
    modules: Mapping[str, nn.Module], site: Site, name: str, removed: int, dense: nn.Module | None
) -> None:
    """Refuse a site whose tensors do not have the shapes of the dense model without the removed members."""
    lengths = []
    for axis in site.axes:
        tensor = axis.tensor.rpartition(".")[2]
        refuse_computed(modules[axis.module], axis.module, tensor)
        lengths.append(getattr(modules[axis.module], tensor).shape[axis.dim])
    output = modules[site.o]
    left = in_features(output) // site.width if is_plain(output) else 0
    dense_output = None if dense is None else submodule(dense, site.o)
    known = dense_output is not None and is_plain(dense_output)
    original = in_features(dense_output) // site.width if known else site.original
    if original != left + removed or lengths != [axis.length for axis in site.axes]:
        listed = f"{removed or 'no'} {site.word if removed == 1 else site.kind}"
        fix = OTHER_RECORD.format(NAMES[site.kind]) if left == original else OTHER_WEIGHTS
        raise UnsupportedModelError(
            f"{name} lists {listed} of site {site.index} ({site.path}), which has {left} of the {original} {site.kind} "
            f"of the dense model, {fix}."
        )
