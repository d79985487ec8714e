"""Proves that removal is exact: on a small random model, outputs with heads removed equal outputs with their columns
set to zero."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache

from headprune.discovery.head_counts import close, silent_columns
from headprune.discovery.influence import describe_error
from headprune.discovery.sites_from_layouts import DenseSite, site_of
from headprune.discovery.twin import Run
from headprune.units.members import Member, by_site
from headprune.units.quirks import restructure
from headprune.units.slicing.plan import plan
from headprune.units.slicing.removal import remaining, slice_weights
from headprune.units.slicing.undo import Undo
from headprune.units.spec import Site

GRADIENT_FACTOR = 100.0  # gradients pass through more float32 operations than outputs


def prove(
    model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]
) -> tuple[list[DenseSite], list[tuple[str, str]]]:
    """The sites for which removal is exact, alone and together, and the others with reasons."""
    if not dense or not _joint_failure(model, runs, dense):
        return list(dense), []
    proven, refused = [], []
    for number, site in enumerate(dense):
        result = _prove_alone(model, runs, dense, number)
        if isinstance(result, str):
            refused.append((site.path, result))
        else:
            proven.append(result)
    failure = _joint_failure(model, runs, proven)
    if failure:
        return [], [
            *refused,
            *((proven_site.path, f"together with the other sites, {failure}") for proven_site in proven),
        ]
    return proven, refused


def _joint_failure(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]) -> str:
    sites = dense_sites(dense)
    return next(
        (failure for pattern in removal_patterns(sites) if (failure := removal_failure(model, runs, sites, pattern))),
        "",
    )


def _prove_alone(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite], number: int) -> DenseSite | str:
    """The site with the way to run it without heads that works in the model, or why its heads cannot be removed."""
    site = dense[number]
    some, everything = _half_and_all(dense_sites(dense)[number])
    reason = removal_failure(model, runs, dense_sites(dense), some) if some else ""
    if reason:
        return reason
    empty_modes: tuple[Any, ...] = {"bypass": ("bypass", "silent", ""), "silent": ("silent", "")}.get(
        site.needs.empty, ("",)
    )
    for mode in empty_modes:
        changed = replace(site, needs=replace(site.needs, empty=mode))
        trial_sites = [*dense[:number], changed, *dense[number + 1 :]]
        if not mode:
            break
        reason = removal_failure(model, runs, dense_sites(trial_sites), everything)
        if not reason:
            return changed
    return changed if some else reason or "it has one head, which cannot be removed"


def dense_sites(dense: Sequence[DenseSite]) -> list[Site]:
    return [site_of(site, index, []) for index, site in enumerate(dense)]


def removal_patterns(sites: Sequence[Site]) -> list[list[Member]]:
    """Two removals to try: half the units of every site (even ones at even sites, odd ones at odd sites), and the same
    with all units of the first site of every path pattern."""
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
    emptied_members = [member for site in emptied.values() for unit in site.units() for member in unit]
    with_emptied = (
        [*emptied_members, *(member for member in half if member.site not in emptied)] if emptied_members else []
    )
    return [pattern for pattern in (half, with_emptied) if pattern]


def _half_and_all(site: Site) -> tuple[list[Member], list[Member]]:
    """The members of half of its units (none where it has one unit), and of all units."""
    units = site.units()
    half = units[::2] if len(units) > 1 else []
    return [m for unit in half for m in unit], [m for unit in units for m in unit]


def removal_failure(model: nn.Module, runs: Sequence[Run], sites: Sequence[Site], members: Sequence[Member]) -> str:
    """Empty where the outputs with these members removed equal those with their columns zero; else the reason."""
    members_by_site = {
        index: [Member(index, member) for member in indices] for index, indices in by_site(members).items()
    }
    kinds = " and ".join(dict.fromkeys(site.kind for site in sites if site.index in members_by_site))
    with silent_columns(
        model, [(site, members_by_site[site.index]) for site in sites if site.index in members_by_site]
    ):
        expected = [run_outputs(model, run) for run in runs]
        expected_gradients = gradients(model, runs)
        expected_cached = [cached_outputs(model, run) for run in runs]
    undo = Undo(model)
    try:
        slice_weights(model, sites, members)
        for run, tensors in zip(runs, expected, strict=True):
            if not _all_close(tensors, run_outputs(model, run)):
                return f"removing {kinds} did not give what silencing them gives"
        for name, gradient in gradients(model, runs).items():
            # Tensors that lose units have another shape; the gradients of all others must stay the same.
            same = name in expected_gradients and gradient.shape == expected_gradients[name].shape
            if same and not close(expected_gradients[name], gradient, factor=GRADIENT_FACTOR):
                return f"the gradient of {name} with {kinds} removed is not what it is with them silenced"
        for run, cached in zip(runs, expected_cached, strict=True):
            if cached is not None:
                actual = cached_outputs(model, run)
                if actual is None or not _all_close(cached, actual):
                    return f"with a cache, removing {kinds} did not give what silencing them gives"
    except Exception as error:
        return f"the model fails with fewer {kinds} ({describe_error(error)})"
    finally:
        undo()
    return ""


def reload_failure(model: nn.Module, fresh: Callable[[], nn.Module], runs: Sequence[Run], sites: Sequence[Site]) -> str:
    """Empty where a fresh model with the weights of a pruned one gives the same outputs; else the reason."""
    members = next(iter(reversed(removal_patterns(sites))), [])
    undo = Undo(model)
    try:
        slice_weights(model, sites, members)
        expected = [run_outputs(model, run) for run in runs]
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        reloaded = fresh()
        restructure(reloaded, plan(reloaded, sites, remaining(sites, members)))
        reloaded.load_state_dict(weights)
        if all(_all_close(tensors, run_outputs(reloaded, run)) for run, tensors in zip(runs, expected, strict=True)):
            return ""
        return "a pruned model gives other outputs after it is saved and loaded"
    except Exception as error:
        return f"a pruned model could not be saved and loaded ({describe_error(error)})"
    finally:
        undo()


def _all_close(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(close(a, b) for a, b in zip(expected, actual, strict=True))


def run_outputs(model: nn.Module, run: Run) -> list[torch.Tensor]:
    """All floating-point tensors in the output of a run, without caches and attention maps."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = model.get_submodule(run.path)(**copy.deepcopy(run.inputs))
    return list(_tensors(result))


def gradients(model: nn.Module, runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    """Gradients of a randomly weighted sum of all outputs of the first run; none where the model has no backward."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    states = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
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
            values = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return {name: value for name, value in zip(parameters, values, strict=True) if value is not None}
    except RuntimeError:
        return {}
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(states[name])


def cached_outputs(model: nn.Module, run: Run) -> list[torch.Tensor] | None:
    """The outputs for the last token of a run, with the others in the KV cache; None for models without a cache."""
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
    except Exception:  # inputs for a whole sequence need not fit its last token
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
