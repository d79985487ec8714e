"""All sites of a model: attention first, as `resolve` numbers it, then feed-forward layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.units.cutting.record import removed_members
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
    else:
        from headprune.discovery import discover_feed_forward

        layouts = discover_feed_forward(model, attention)
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
