"""Physically removing heads from the weights, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import DataError, EquivalenceError, HeadSelectionError, UnsupportedModelError
from headprune.hooks.outputs import largest_difference, run
from headprune.hooks.watch import gated
from headprune.repair.solve import Compensation, Repair, apply_repairs, check_compensation, plan_repairs
from headprune.signals.moments import Moments
from headprune.units import AttentionSite, resolve
from headprune.units.code import forward_code
from headprune.units.linear import in_features, is_transposed, out_features
from headprune.units.members import Head, as_heads
from headprune.units.quirks import QUIRKS, is_empty, restructure
from headprune.units.resolve import removed_heads

# Attributes of attention modules that their forward code reads, and what they count. Weights decide how many heads
# there are; these only have to follow, whatever a family calls them.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "split_size", "inner_dim")


def remove(
    model: PreTrainedModel,
    heads: Iterable[tuple[int, int]],
    *,
    verify: Mapping[str, Any] | None = None,
    compensate: Compensation = "none",
    batches: Iterable[Mapping[str, Any]] | None = None,
) -> PreTrainedModel:
    """Take heads out of the weights, in place, and return the model.

    `heads` are (site, head) pairs in original ids. With `verify=batch` the outputs on that batch are compared with
    those of the gated model; if they differ, the removal is undone and `EquivalenceError` tells by how much.
    With `compensate="lstsq"` the heads that stay take over what they can of what these heads did on the calibration
    `batches`; with "mean" the bias of the output projection takes over its mean.
    Parameters are replaced by smaller ones, so make an optimizer after this and not before.
    """
    remove_and_repair(model, heads, verify=verify, compensate=compensate, batches=batches)
    return model


def remove_and_repair(
    model: PreTrainedModel,
    heads: Iterable[tuple[int, int]],
    *,
    verify: Mapping[str, Any] | None = None,
    compensate: Compensation = "none",
    batches: Iterable[Mapping[str, Any]] | None = None,
    moments: Mapping[int, Moments] | None = None,
) -> list[Repair]:
    """`remove`, for callers that want to know what the compensation did, or know the `moments` that it rests on."""
    check_compensation(compensate)
    sites = resolve(model)
    chosen = as_heads(heads)
    check_removable(sites, chosen)
    if compensate != "none" and batches is None:
        raise DataError(f"compensate={compensate!r} needs calibration data; give it as batches=[...].")
    if not chosen:
        return []
    repairs = plan_repairs(model, sites, chosen, compensate, batches or (), moments)
    expected = _gated_outputs(model, sites, chosen, verify) if verify is not None else None
    undo = _Undo(model, sites)
    try:
        _remove(model, sites, chosen)
        if expected is not None and verify is not None:
            difference, tolerance = largest_difference(expected, run(model, verify))
            if not difference <= tolerance:
                raise EquivalenceError(difference, tolerance)
        apply_repairs(model, sites, repairs)
    except BaseException:
        undo()
        raise
    return repairs


def check_removable(sites: Sequence[AttentionSite], heads: Sequence[Head]) -> None:
    """Raise unless all these heads are there, form whole units, and can be removed exactly."""
    wanted = set(heads)
    for head in heads:
        if not 0 <= head.site < len(sites):
            raise HeadSelectionError(
                f"Head {tuple(head)} does not exist: the model has {len(sites)} sites, numbered 0 to {len(sites) - 1}."
            )
        site = sites[head.site]
        if not 0 <= head.index < site.original_heads:
            raise HeadSelectionError(
                f"Head {tuple(head)} does not exist: site {site.index} ({site.path}) has heads 0 to "
                f"{site.original_heads - 1}."
            )
        if head.index not in site.kept:
            raise HeadSelectionError(f"Head {tuple(head)} has been removed already; leave it out.")
        missing = [other.index for other in site.unit(head.index) if other not in wanted]
        if missing:
            unit = [other.index for other in site.unit(head.index)]
            raise HeadSelectionError(
                f"Head {tuple(head)} shares its KV head with others: at site {site.index} ({site.path}) heads {unit} "
                f"can only go together, so add {missing} or leave the group alone."
            )
        if site.obstacle:
            raise UnsupportedModelError(
                f"Heads of site {site.index} ({site.path}) cannot be removed exactly: {site.obstacle}; only gating "
                "works."
            )


def plan(model: PreTrainedModel, sites: Sequence[AttentionSite], kept: Mapping[int, Sequence[int]]) -> list[dict]:
    """What `quirks.restructure` has to do so that each named site has exactly the given heads left."""
    return [_plan_site(model, sites[index], list(ids)) for index, ids in sorted(kept.items())]


def _plan_site(model: PreTrainedModel, site: AttentionSite, kept: list[int]) -> dict[str, Any]:
    module = model.get_submodule(site.path)
    queries, keys = len(kept), len(kept) // site.group
    numbers = {
        **dict.fromkeys(QUERY_COUNTS, queries),
        **dict.fromkeys(KV_COUNTS, keys),
        **dict.fromkeys(WIDTHS, queries * site.head_dim),
    }
    code = forward_code(module)
    config = getattr(module, "config", None)
    entry: dict[str, Any] = {
        "path": site.path,
        "quirk": site.quirk,
        "cross": site.attention == "cross",
        "group": site.group,
        "kept": kept,
        "original": site.original_heads,
        "o": site.o,
        "attributes": {name: n for name, n in numbers.items() if name in module.__dict__},
        # Phi-3 reads its head count from the config at every call; code that cannot be seen may do so as well.
        "config": {
            name: n
            for name, n in numbers.items()
            if (code is None or name in code.reach) and name not in module.__dict__ and hasattr(config, name)
        },
        "linears": {},
        "delete": [],
    }
    if not kept:
        # A site that is empty already remembers what it lost: a portable checkpoint starts from the dense class again.
        lost = list(dict.fromkeys(projection.module for projection in site.projections))
        entry["delete"] = module.headprune_empty["gone"] if is_empty(module) else lost
        return entry
    rows: dict[str, int] = {}
    for projection in site.projections:
        count = queries if projection.role == "q" else keys
        rows[projection.module] = rows.get(projection.module, 0) + count * projection.width
    for path, outputs in rows.items():
        entry["linears"][path] = [in_features(model.get_submodule(path)), outputs]
    entry["linears"][site.o] = [queries * site.head_dim, out_features(model.get_submodule(site.o))]
    return entry


def shrink(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    """Give a freshly built dense model the shapes of a pruned one, for a loader to fill with weights."""
    sites = resolve(model)
    check_removable(sites, [Head(site, head) for site, ids in removed.items() for head in ids])
    kept = {index: [h for h in sites[index].kept if h not in set(ids)] for index, ids in removed.items() if ids}
    restructure(model, plan(model, sites, kept))
    _record(model, removed)


def _remove(model: PreTrainedModel, sites: Sequence[AttentionSite], heads: Sequence[Head]) -> None:
    going: dict[int, list[int]] = {}
    for head in heads:
        going.setdefault(head.site, []).append(head.index)
    kept = {index: [h for h in sites[index].kept if h not in set(ids)] for index, ids in going.items()}
    _refuse_accelerate_hooks(model, sites, kept)
    steps = plan(model, sites, kept)
    slices = _Slices(model)
    for index, ids in kept.items():
        site = sites[index]
        if ids:
            positions = [site.position(head) for head in ids]
            groups = [position // site.group for position in positions[:: site.group]]
            rows: dict[str, set[int]] = {}
            for projection in site.projections:
                wanted = positions if projection.role == "q" else groups
                rows.setdefault(projection.module, set()).update(projection.rows(wanted))
            for path, selected in rows.items():
                slices.add(path, "out", sorted(selected))
            slices.add(site.o, "in", site.q.__class__("", "q", 0, site.head_dim, 0, site.head_dim).rows(positions))
    slices.apply()
    restructure(model, steps)
    record = removed_heads(model)
    _record(model, {**record, **{index: record.get(index, []) + ids for index, ids in going.items()}})


def _record(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    model.config.pruned_heads = {str(site): sorted(removed[site]) for site in sorted(removed)}


def _refuse_accelerate_hooks(
    model: nn.Module, sites: Sequence[AttentionSite], kept: Mapping[int, Sequence[int]]
) -> None:
    for index, ids in kept.items():
        module = model.get_submodule(sites[index].path)
        if "forward" in module.__dict__ and QUIRKS[sites[index].quirk][0 if ids else 1] is not None:
            raise UnsupportedModelError(
                f"The forward of {sites[index].path} is wrapped (device_map offloading?); prune the model before it is "
                "dispatched, or remove the wrapper with accelerate's remove_hook_from_submodules(model)."
            )


class _Slices:
    """Index selections of weights, collected first and then applied together, so that tied weights stay tied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.wanted: dict[int, tuple[nn.Parameter, int, list[int]]] = {}
        self.owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self.asking: dict[int, set[int]] = {}  # parameter -> the modules whose heads go
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), []).append((module, name))

    def add(self, path: str, side: str, selected: list[int]) -> None:
        module: Any = self.model.get_submodule(path)
        weight_dim = int((side == "in") != is_transposed(module))
        self._want(module, module.weight, weight_dim, selected, path)
        if side == "out" and module.bias is not None:
            self._want(module, module.bias, 0, selected, path)

    def _want(self, module: nn.Module, parameter: nn.Parameter, dim: int, selected: list[int], path: str) -> None:
        self.asking.setdefault(id(parameter), set()).add(id(module))
        known = self.wanted.get(id(parameter))
        if known is not None and known[1:] != (dim, selected):
            raise UnsupportedModelError(
                f"The weight of {path} is tied to another projection that would keep other heads; untie them first."
            )
        self.wanted[id(parameter)] = (parameter, dim, selected)

    def apply(self) -> None:
        for key, (parameter, _, _) in self.wanted.items():
            if {id(module) for module, _ in self.owners[key]} - self.asking[key]:
                raise UnsupportedModelError(
                    f"A weight of shape {list(parameter.shape)} is tied to another module that keeps all its heads; "
                    "untie them, or remove the same heads there."
                )
        for parameter, dim, selected in self.wanted.values():
            index = torch.tensor(selected, device=parameter.device)
            smaller = nn.Parameter(
                parameter.detach().index_select(dim, index).contiguous(), requires_grad=parameter.requires_grad
            )
            for module, name in self.owners[id(parameter)]:
                setattr(module, name, smaller)


class _Undo:
    """The state of every module that surgery may touch, to be put back if something goes wrong."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[AttentionSite]) -> None:
        self.config = model.config
        self.had_record = "pruned_heads" in model.config.__dict__
        self.record = getattr(model.config, "pruned_heads", None)
        self.states = []
        for module in model.modules():
            state = dict(module.__dict__)
            inner = {key: dict(state[key]) for key in ("_parameters", "_modules")}
            self.states.append((module, type(module), {**state, **inner}))

    def __call__(self) -> None:
        for module, kind, state in self.states:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)
        if self.had_record:
            self.config.pruned_heads = self.record
        elif hasattr(self.config, "pruned_heads"):
            del self.config.pruned_heads


def _gated_outputs(
    model: PreTrainedModel, sites: Sequence[AttentionSite], heads: Sequence[Head], batch: Mapping[str, Any]
) -> list[torch.Tensor]:
    parameter = next(model.parameters())
    gates = torch.ones(len(sites), max(site.original_heads for site in sites), device=parameter.device)
    for head in heads:
        gates[head.site, head.index] = 0.0
    with gated(model, gates, sites=sites):
        return run(model, batch)
