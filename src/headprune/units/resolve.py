"""The sites of a model: by the table of families, else by discovery, else an error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.module_paths import submodule
from headprune.units.attention import applications_of, attention_sites, stack_of
from headprune.units.families import FeedForward, family_of
from headprune.units.feed_forward import feed_forward_sites
from headprune.units.record_check import check_record
from headprune.units.slicing.record import removed_members
from headprune.units.spec import Kind, Site

KINDS: tuple[Kind, ...] = ("heads", "neurons")


def resolve(model: nn.Module) -> list[Site]:
    """Every attention site of the model that can be pruned: in order of execution by the table, as declared where the
    layout is measured."""
    result = survey(model)
    if not result.sites:
        path, reason = result.left[0] if result.left else ("", "")
        kind = type(submodule(model, path) if path else model).__name__
        why = f"{path} ({kind}): {reason}" if path else f"the model {kind} itself, which has no attention"
        raise UnsupportedModelError(
            f"No attention that can be pruned was found in {_name_of(model)}: stopped at {why}."
        )
    return result.sites


def _name_of(model: Any) -> str:
    config: Any = getattr(model, "config", None)
    return f"model type {config.model_type!r}" if hasattr(config, "model_type") else type(model).__name__


@dataclass(frozen=True)
class Survey:
    """The sites of a model, how they were found, and attention that cannot be pruned, with reasons."""

    sites: list[Site]
    known_by: Literal["table", "experiment"]
    left: tuple[tuple[str, str], ...] = ()

    def left_whole(self) -> list[str]:
        """Modules that cannot be pruned, grouped by reason, as clauses."""
        return left_whole(self.left)


def left_whole(left: Sequence[tuple[str, str]]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for path, reason in left:
        by_reason.setdefault(reason, []).append(path)
    return [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {reason}"
        for reason, paths in by_reason.items()
    ]


def survey(model: nn.Module) -> Survey:
    """The attention sites of a model, how they were found, and attention that cannot be pruned."""
    if hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"headprune works on plain models, not on {type(model).__name__}; call merge_and_unload() on an adapter "
            "model first."
        )
    if not isinstance(model, PreTrainedModel):
        return _discovered(model)
    family = family_of(model.config.model_type)
    if family is None:
        return _discovered(model)
    sites = attention_sites(model, family)
    check_record(model, "heads", sites)
    return Survey(sites, "table")


def _discovered(model: nn.Module) -> Survey:
    from headprune.discovery import discover

    sites, left = discover(model)
    check_record(model, "heads", sites)
    return Survey(sites, "experiment", left)


def sites_of(model: nn.Module, kinds: Collection[Kind] = KINDS[:1]) -> Sequence[Site]:
    """The attention sites, and those of feed-forward layers as well where `kinds` has neurons.

    A site has the same number either way. With neurons the list is that of the whole model.
    """
    return resolve(model) if "neurons" not in kinds else all_sites(model)


def all_sites(model: nn.Module) -> list[Site]:
    attention = survey(model).sites
    neurons = neuron_sites(model, attention)
    if not neurons and not attention:
        raise UnsupportedModelError(
            f"Neither attention nor a feed-forward layer that can be pruned was found in {type(model).__name__}."
        )
    return [*attention, *neurons]


def neuron_sites(model: nn.Module, attention: Sequence[Site]) -> list[Site]:
    """The feed-forward sites, by the table, else by experiment."""
    family = family_of(model.config.model_type) if isinstance(model, PreTrainedModel) else None
    layouts: Sequence[FeedForward] = () if family is None else family.feed_forward
    known_by = family.name if family is not None and layouts else "measured"
    if not layouts:
        from headprune.discovery import discover_feed_forward

        layouts = discover_feed_forward(model, attention)
    sites = feed_forward_sites(
        model,
        layouts,
        removed_members(model, "neurons"),
        first=len(attention),
        towers=() if family is None else family.towers,
        stacks=lambda path: stack_of(model, path, family),
        times=applications_of(model, family),
        family=known_by,
        outputs={site.o for site in attention},
    )
    check_record(model, "neurons", sites)
    return sites
