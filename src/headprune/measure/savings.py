"""What pruning cost and what it saved: dense against pruned, measured side by side in one process."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.costs import MEBIBYTE, Flops, flops, megabytes, parameters_by_module, total_parameters
from headprune.measure.energy import energy_per_thousand
from headprune.measure.timing import TimedCall, time_in_turns, using_threads
from headprune.progress import Phase, report_phase
from headprune.tasks import Task, batch_size, task_of, to_device
from headprune.units import Kind, Site, sites_of
from headprune.units.slicing.record import removed_members

REPEATS = 7
SMALL_SHARE = 0.25  # of the FLOPs: below it, heads are not the bottleneck


def savings(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    batch: Mapping[str, Any],
    *,
    folders: Mapping[str, Path] | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Parameters, size, FLOPs, latency, peak memory and, where the machine can measure it, energy of both models, the
    shares that are left, and a note where heads are not the bottleneck. `batch` is a full batch of real data; latency
    is also taken on its first sample alone. `folders` are the checkpoints of both, for their size on disk. The share of
    FLOPs is that of an input of the default length, as budgets count it."""
    report_phase(Phase("measuring time and memory"))
    task = task or task_of(dense)
    sites, costs = _count_flops(dense, pruned, batch)
    tokens = costs["dense"].tokens
    single = task.select(batch, slice(0, 1))
    size = batch_size(batch)
    latency: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "tokens": tokens,
        "batch_1": _latency(dense, pruned, single, task),
        f"batch_{size}": _latency(dense, pruned, batch, task),
    }
    result: dict[str, Any] = {
        name: {
            **{kind: sum(site.size for site in sites[name] if site.kind == kind) for kind in costs["dense"].kinds},
            "parameters": total_parameters(model),
            "modules": parameters_by_module(model),
            "megabytes": round(megabytes(total_parameters(model)), 2),
            "megabytes_on_disk": _on_disk((folders or {}).get(name)),
            "flops": costs[name].total,
            **{f"{kind[:-1]}_flops": count for kind, count in costs[name].kinds.items()},
            "peak_memory_megabytes": round(_peak_memory(model, batch, task) / MEBIBYTE, 1),
        }
        for name, model in (("dense", dense), ("pruned", pruned))
    }
    result["latency"] = latency
    result["shares"] = _shares(dense, pruned, sites, latency[f"batch_{size}"]["ratio"])
    for name, joules in _energy(dense, pruned, batch, task).items():
        result[name]["joules_per_1000"] = round(joules, 2)
    share = costs["dense"].head_share
    if share < SMALL_SHARE and "neurons" not in costs["dense"].kinds:
        result["note"] = (
            f"Attention heads are {share:.0%} of this model's FLOPs at {tokens} tokens, so removing all of them "
            "could save no more than that: most of the time goes elsewhere (feed-forward blocks, embeddings, a "
            "vocabulary)."
        )
    return result


def shares(
    dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any], *, task: Task | None = None
) -> dict[str, float]:
    """What is left of the parameters, of the FLOPs of an input of the default length, as budgets count them, and of the
    time of this batch: pruned by dense."""
    sites = _sites(dense, pruned)
    return _shares(dense, pruned, sites, 1 / measure_speedup(dense, pruned, batch, task=task))


def _shares(
    dense: PreTrainedModel, pruned: PreTrainedModel, sites: Mapping[str, Sequence[Site]], latency: float
) -> dict[str, float]:
    before, after = flops(dense, sites["dense"]).total, flops(pruned, sites["pruned"]).total
    parameters = total_parameters(pruned) / max(total_parameters(dense), 1)
    kept = {"parameters": parameters, "flops": after / before if before else 1.0, "latency": latency}
    return {name: round(share, 4) for name, share in kept.items()}


def _sites(dense: PreTrainedModel, pruned: PreTrainedModel) -> dict[str, Sequence[Site]]:
    """Sites of both models, with feed-forward layers where neurons were removed."""
    kinds: list[Kind] = ["heads", "neurons"] if removed_members(pruned, "neurons") else ["heads"]
    return {name: sites_of(model, kinds) for name, model in _named(dense, pruned)}


def _count_flops(
    dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any]
) -> tuple[dict[str, Sequence[Site]], dict[str, Flops]]:
    """Sites of both models, and the FLOPs of a sample of this batch."""
    sites = _sites(dense, pruned)
    return sites, {name: flops(model, sites[name], batch=batch) for name, model in _named(dense, pruned)}


def measure_speedup(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    batch: Mapping[str, Any],
    *,
    task: Task | None = None,
    repeats: int = REPEATS,
    threads: int | None = None,
) -> float:
    """How many times as fast the pruned model is: the two take turns, and the median of the ratios counts."""
    with using_threads(threads):
        times = _times(dense, pruned, batch, task or task_of(dense), repeats)
    return statistics.median(slow / fast for slow, fast in zip(times["dense"], times["pruned"], strict=True))


def _latency(dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> dict[str, float]:
    """Median milliseconds of each, the two taking turns, and their ratio."""
    times = _times(dense, pruned, batch, task, REPEATS)
    medians = {name: 1000 * statistics.median(values) for name, values in times.items()}
    return {**{k: round(v, 3) for k, v in medians.items()}, "ratio": round(medians["pruned"] / medians["dense"], 3)}


def _times(
    dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any], task: Task, repeats: int
) -> dict[str, list[float]]:
    with evaluating(dense), evaluating(pruned):
        runs = {name: TimedCall(model, (), _inputs(model, batch, task)) for name, model in _named(dense, pruned)}
        return time_in_turns(runs, repeats)


def _energy(dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> dict[str, float]:
    """Joules of each for 1,000 sequences; empty where the machine cannot measure them."""
    with torch.no_grad(), evaluating(dense), evaluating(pruned):
        runs = {name: partial(model, **_inputs(model, batch, task)) for name, model in _named(dense, pruned)}
        return energy_per_thousand(runs, batch_size(batch), input_device(pruned)) or {}


def _named(dense: PreTrainedModel, pruned: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    return [("dense", dense), ("pruned", pruned)]


def _inputs(model: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> dict[str, Any]:
    return dict(to_device(task.inputs(batch), input_device(model)))


def _on_disk(checkpoint: Path | None) -> float | None:
    """Megabytes of the weight files; None for a model that is not in a folder here."""
    files = [] if checkpoint is None else list(checkpoint.glob("*.safetensors"))
    return round(sum(file.stat().st_size for file in files) / MEBIBYTE, 2) if files else None


def _peak_memory(model: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> int:
    """The most bytes that tensors held at once during a forward pass, the weights included."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad(), evaluating(model), _TensorMeter() as meter:
        model(**_inputs(model, batch, task))
    return weights + meter.peak


class _TensorMeter(TorchDispatchMode):
    """Counts the storage of every tensor that an operation creates, as long as it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._uses: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key, size = storage.data_ptr(), storage.nbytes()
                if key in self._uses or key not in inputs:
                    self._enter(key, size)
                    weakref.finalize(leaf, self._leave, key, size)
        return output

    def _enter(self, key: int, size: int) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)

    def _leave(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.now -= size
