"""All sites of a model: attention first, as `resolve` numbers it, then feed-forward layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.errors import UnsupportedModelError
from headprune.units.cutting.record import removed_members
from headprune.units.dense import dense_class, dense_config, quiet, structure_of
from headprune.units.families import FeedForward, family_of
from headprune.units.feed_forward import feed_forward_sites
from headprune.units.resolve import resolve, stack_of, survey
from headprune.units.spec import Kind, Site

KINDS: tuple[Kind, ...] = ("heads", "neurons")


def sites_of(model: nn.Module, kinds: Collection[Kind] = KINDS[:1]) -> Sequence[Site]:
    """The sites of attention, and of feed-forward layers as well where neurons are asked for.

    A site has the same number either way. With neurons the list is that of the whole model, whatever else is asked.
    """
    return resolve(model) if "neurons" not in kinds else all_sites(model)


def all_sites(model: nn.Module) -> list[Site]:
    attention = survey(model).sites
    found = neuron_sites(model, attention)
    if not found and not attention:
        raise UnsupportedModelError(
            f"Neither attention nor a feed-forward layer that can be pruned was found in {type(model).__name__}."
        )
    return [*attention, *found]


def neuron_sites(model: nn.Module, attention: Sequence[Site]) -> list[Site]:
    """The feed-forward sites, by the table, else by experiment."""
    family = family_of(model.config.model_type) if isinstance(model, PreTrainedModel) else None
    tabled = family is not None and bool(family.feed_forward)
    layouts: tuple[FeedForward, ...]
    if family is not None and tabled:
        layouts = family.feed_forward
    elif isinstance(model, PreTrainedModel):
        layouts = layouts_for(dense_class(model), model.config)
    else:
        layouts = _own(model, attention)
    times = 1
    if family is not None and family.applications is not None and isinstance(model, PreTrainedModel):
        many, groups = (getattr(model.config, name) for name in family.applications)
        times = many // groups
    return feed_forward_sites(
        model,
        layouts,
        removed_members(model, "neurons"),
        first=len(attention),
        towers=() if family is None else family.towers,
        stacks=lambda path: stack_of(model, path, family),
        times=times,
        family=family.name if family is not None and tabled else "measured",
    )


def layouts_for(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    """Layouts found on a small twin of this class, once; none where there is no twin."""

    def make() -> tuple[FeedForward, ...]:
        with torch.device("cpu"), quiet():
            return _on_twin(kind, dense_config(config))

    found: tuple[FeedForward, ...] = remembered(
        kind,
        "neurons " + structure_of(config),
        make,
        to_json=lambda layouts: [asdict(layout) for layout in layouts],
        from_json=lambda layouts: tuple(_from_plain(layout) for layout in layouts),
    )
    return found


def _on_twin(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    from headprune.discovery.discover import twin_of
    from headprune.discovery.neurons import measured_layouts
    from headprune.discovery.twin import small_config

    for depth in (4, None):
        try:
            twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
        except Exception:  # whatever a config class says to sizes that it did not expect
            continue
        return tuple(measured_layouts(twin, runs, maps_of(survey(twin).sites)))
    return ()


def _own(model: nn.Module, attention: Sequence[Site]) -> tuple[FeedForward, ...]:
    """A module that is no transformers model is measured as it is, before anything goes."""
    from headprune.discovery.discover import NoTwinError
    from headprune.discovery.neurons import measured_layouts
    from headprune.discovery.plain_modules import own_twin

    kept = model.__dict__.get("_headprune_feed_forward")
    if kept is None:
        try:
            twin, runs = own_twin(model)
            kept = tuple(measured_layouts(twin, runs, maps_of(attention)))
        except NoTwinError:
            kept = ()
        model.__dict__["_headprune_feed_forward"] = kept
    found: tuple[FeedForward, ...] = kept
    return found


def maps_of(attention: Iterable[Site]) -> set[str]:
    """Linear maps that belong to attention."""
    return {path for site in attention for path in (site.o, *site.maps)}


def _from_plain(plain: Any) -> FeedForward:
    others = tuple((name, dim) for name, dim in plain["others"])
    return FeedForward(**{**plain, "maps": tuple(plain["maps"]), "others": others})
