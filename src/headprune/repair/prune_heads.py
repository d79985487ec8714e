"""`prune_heads`: heads by layer, for programs that called `model.prune_heads` of transformers 4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel

from headprune.errors import HeadSelectionError, UnsupportedModelError
from headprune.hooks.module_paths import layer_path
from headprune.repair.remove import remove
from headprune.units import Site, resolve


def prune_heads(model: PreTrainedModel, heads_to_prune: Mapping[int, Iterable[int]]) -> PreTrainedModel:
    """Remove heads from the weights, in place, as `model.prune_heads({layer: [heads]})` of transformers 4 did, and
    return the model.

    Heads have their original numbers, also where others of the layer are removed; those that are removed already are
    skipped. For models with several stacks of layers, such as encoder-decoders, use `headprune.remove` with numbers of
    sites.
    """
    if not isinstance(heads_to_prune, Mapping):
        raise HeadSelectionError("heads_to_prune must be {layer: [heads]}, such as {0: [1, 2]}.")
    layers = _layers(model, resolve(model))
    pairs = []
    for layer, heads in heads_to_prune.items():
        if layer not in layers:
            known = sorted(layers)
            raise HeadSelectionError(f"There is no layer {layer!r}; heads can be removed in {known[0]} to {known[-1]}.")
        site = layers[layer]
        removed = {*range(site.original)} - {*site.kept}
        pairs += [(site.index, head) for head in sorted({*heads}) if head not in removed]
    return remove(model, pairs)


def _layers(model: PreTrainedModel, sites: Sequence[Site]) -> dict[int, Site]:
    """The site of every layer, by the number that the layer has in its stack; where layers share their weights, by the
    order of the sites."""
    kinds = {(site.stack, site.attention) for site in sites}
    if model.config.is_encoder_decoder or len(kinds) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several stacks of attention layers, so the number of a layer is not enough; "
            "use headprune.remove(model, [(site, head), ...]) with sites as headprune.inspect(model) numbers them."
        )
    ends = [layer_path(site.path).rpartition(".")[2] for site in sites]
    numbers = [int(end) if end.isdigit() else -1 for end in ends]
    if -1 in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(sites)))
    return dict(zip(numbers, sites, strict=True))
