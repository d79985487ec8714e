"""The proof that removal is exact: on a small random model, heads removed against heads whose columns are zero."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache

from headprune.discovery.dense_site import DenseSite, site_of
from headprune.discovery.head_counts import close, silent_columns
from headprune.discovery.influence import said
from headprune.discovery.twin import Run
from headprune.units.cutting.plan import plan
from headprune.units.cutting.removal import remaining, slice_weights
from headprune.units.cutting.undo import Undo
from headprune.units.members import Member, by_site
from headprune.units.quirks import restructure
from headprune.units.spec import Site

STEEP = 100.0  # gradients pass through more steps in float32 than outputs do


def prove(
    model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]
) -> tuple[list[DenseSite], list[tuple[str, str]]]:
    """The sites that removal is exact for, alone and together, and the others with reasons."""
    if not dense or not _fail_together(model, runs, dense):
        return list(dense), []
    proven, refused = [], []
    for number, own in enumerate(dense):
        found = _by_itself(model, runs, dense, number)
        if isinstance(found, str):
            refused.append((own.path, found))
        else:
            proven.append(found)
    together = _fail_together(model, runs, proven)
    if together:
        return [], [*refused, *((site.path, f"together with the other sites, {together}") for site in proven)]
    return proven, refused


def _fail_together(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]) -> str:
    sites = dense_sites(dense)
    return next((why for pattern in everywhere(sites) if (why := fails(model, runs, sites, pattern))), "")


def _by_itself(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite], number: int) -> DenseSite | str:
    """The site with the way to run it without heads that works in its model, or why none of its heads can go."""
    own = dense[number]
    some, everything = _alone(dense_sites(dense)[number])
    reason = fails(model, runs, dense_sites(dense), some) if some else ""
    if reason:
        return reason
    ways: tuple[Any, ...] = {"bypass": ("bypass", "silent", ""), "silent": ("silent", "")}.get(own.needs.empty, ("",))
    for way in ways:
        changed = replace(own, needs=replace(own.needs, empty=way))
        others = [*dense[:number], changed, *dense[number + 1 :]]
        if not way:
            break
        reason = fails(model, runs, dense_sites(others), everything)
        if not reason:
            return changed
    return changed if some else reason or "it has one head, which cannot be removed"


def dense_sites(dense: Sequence[DenseSite]) -> list[Site]:
    return [site_of(site, index, []) for index, site in enumerate(dense)]


def everywhere(sites: Sequence[Site]) -> list[list[Member]]:
    """Half the units of every site, other ones at every other site; and the same with the first site of every
    kind as a whole."""
    half: list[Member] = []
    sites = [site for site in sites if not site.obstacle]
    for site in sites:
        units = site.units()
        if len(units) > 1:
            half += [member for unit in units[site.index % 2 :: 2][: len(units) - 1] for member in unit]
    kinds: dict[str, Site] = {}
    for site in sites:
        if not site.obstacle_to_emptying:
            kinds.setdefault(re.sub(r"\d+", "*", site.path), site)
    emptied = {site.index: site for site in kinds.values()}
    whole = [member for site in emptied.values() for unit in site.units() for member in unit]
    more = [*whole, *(member for member in half if member.site not in emptied)] if whole else []
    return [pattern for pattern in (half, more) if pattern]


def _alone(site: Site) -> tuple[list[Member], list[Member]]:
    """Half of its units, where it has more than one, and all of them."""
    units = site.units()
    half = units[::2] if len(units) > 1 else []
    return [m for unit in half for m in unit], [m for unit in units for m in unit]


def fails(model: nn.Module, runs: Sequence[Run], sites: Sequence[Site], members: Sequence[Member]) -> str:
    """Empty where outputs with these members removed are those with them silenced; else what differs."""
    going = {index: [Member(index, member) for member in own] for index, own in by_site(members).items()}
    what = " and ".join(dict.fromkeys(site.kind for site in sites if site.index in going))
    with silent_columns(model, [(site, going[site.index]) for site in sites if site.index in going]):
        wanted = [outcome(model, run) for run in runs]
        learnt = gradients(model, runs)
        continued = [with_cache(model, run) for run in runs]
    undo = Undo(model)
    try:
        slice_weights(model, sites, members)
        for run, expected in zip(runs, wanted, strict=True):
            if not _alike(expected, outcome(model, run)):
                return f"removing {what} did not give what silencing them gives"
        for name, gradient in gradients(model, runs).items():
            # What loses units has another shape; what keeps them must learn the same.
            same = name in learnt and gradient.shape == learnt[name].shape
            if same and not close(learnt[name], gradient, loosened=STEEP):
                return f"the gradient of {name} with {what} removed is not what it is with them silenced"
        for run, before in zip(runs, continued, strict=True):
            if before is not None:
                after = with_cache(model, run)
                if after is None or not _alike(before, after):
                    return f"with a cache, removing {what} did not give what silencing them gives"
    except Exception as error:
        return f"the model fails with fewer {what} ({said(error)})"
    finally:
        undo()
    return ""


def reloading_fails(
    model: nn.Module, fresh: Callable[[], nn.Module], runs: Sequence[Run], sites: Sequence[Site]
) -> str:
    """Empty where the weights of a pruned model, put into a fresh one of the same shapes, give the same."""
    members = next(iter(reversed(everywhere(sites))), [])
    undo = Undo(model)
    try:
        slice_weights(model, sites, members)
        wanted = [outcome(model, run) for run in runs]
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        again = fresh()
        restructure(again, plan(again, sites, remaining(sites, members)))
        again.load_state_dict(weights)
        if all(_alike(expected, outcome(again, run)) for run, expected in zip(runs, wanted, strict=True)):
            return ""
        return "a pruned model that is saved and loaded gives something else"
    except Exception as error:
        return f"a pruned model could not be saved and loaded ({said(error)})"
    finally:
        undo()


def _alike(expected: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    return len(given) == len(expected) and all(close(a, b) for a, b in zip(expected, given, strict=True))


def outcome(model: nn.Module, run: Run) -> list[torch.Tensor]:
    """All floating-point tensors that a run gives, caches and attention maps left out."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = model.get_submodule(run.path)(**copy.deepcopy(run.inputs))
    return list(_tensors(result))


def gradients(model: nn.Module, runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    """Of all outputs of the first run added up, each with a weight of its own; none where a model cannot learn."""
    asking = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    states = {name: parameter.requires_grad for name, parameter in asking.items()}
    try:
        for parameter in asking.values():
            parameter.requires_grad_(True)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs = list(_tensors(model.get_submodule(runs[0].path)(**copy.deepcopy(runs[0].inputs))))
            generator = torch.Generator().manual_seed(1)
            total = sum(
                (torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) * tensor).sum()
                for tensor in outputs
                if tensor.requires_grad
            )
            if not isinstance(total, torch.Tensor):
                return {}
            found = torch.autograd.grad(total, list(asking.values()), allow_unused=True)
        return {name: value for name, value in zip(asking, found, strict=True) if value is not None}
    except RuntimeError:
        return {}
    finally:
        for name, parameter in asking.items():
            parameter.requires_grad_(states[name])


def with_cache(model: nn.Module, run: Run) -> list[torch.Tensor] | None:
    """The last token of a run, when all before it are in the cache; None for what keeps none."""
    module: Any = model.get_submodule(run.path)
    ids = run.inputs.get("decoder_input_ids", run.inputs.get("input_ids"))
    name = "decoder_input_ids" if "decoder_input_ids" in run.inputs else "input_ids"
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 3:
        return None
    inputs = {key: value for key, value in run.inputs.items() if key != "use_cache"}
    try:
        with torch.no_grad():
            first = module(**{**copy.deepcopy(inputs), name: ids[:, :-1], **_masks(inputs, name, -1)}, use_cache=True)
            cache = getattr(first, "past_key_values", None)
            if cache is None:
                return None
            last = module(
                **{**copy.deepcopy(inputs), name: ids[:, -1:], **_masks(inputs, name, None)},
                past_key_values=cache,
                use_cache=True,
            )
        return list(_tensors(last))
    except Exception:  # inputs that fit a whole sequence need not fit its last token
        return None


def _masks(inputs: Mapping[str, Any], name: str, stop: int | None) -> dict[str, Any]:
    mask = inputs.get("attention_mask")
    return {"attention_mask": mask[:, :stop]} if name == "input_ids" and isinstance(mask, torch.Tensor) else {}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if "attentions" not in str(name) and name != "past_key_values":
                yield from _tensors(item)
    elif isinstance(value, (tuple, list)) and not isinstance(value, Cache):
        for item in value:
            yield from _tensors(item)
