"""What pruning cost and what it saved: dense against pruned, measured side by side in one process."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from headprune.hooks.outputs import evaluating
from headprune.measure.costs import MEBIBYTE, flops, megabytes, parameters_by_module, total_parameters
from headprune.task import Task, batch_size, rows_of, task_of, to_device
from headprune.units import resolve

REPEATS, WARM_UP = 7, 2
SMALL_SHARE = 0.25  # of the FLOPs: below it, heads are not where the time goes


def savings(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    batch: Mapping[str, Any],
    *,
    folders: Mapping[str, Path] | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Parameters, size, FLOPs, latency and peak memory of both models, and a sentence where heads are not the
    bottleneck. `batch` is a full batch of real data; latency is also taken on its first sample alone. `folders` are
    the checkpoints of both, for their size on disk."""
    task = task or task_of(dense)
    sites = {"dense": resolve(dense), "pruned": resolve(pruned)}
    costs = {
        "dense": flops(dense, sites["dense"], batch=batch),
        "pruned": flops(pruned, sites["pruned"], batch=batch),
    }
    tokens = costs["dense"].tokens
    single = rows_of(batch, slice(0, 1))
    size = batch_size(batch)
    latency = {
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "tokens": tokens,
        "batch_1": _latency(dense, pruned, single, task),
        f"batch_{size}": _latency(dense, pruned, batch, task),
    }
    result: dict[str, Any] = {
        name: {
            "heads": sum(site.heads for site in sites[name]),
            "parameters": total_parameters(model),
            "modules": parameters_by_module(model),
            "megabytes": round(megabytes(total_parameters(model)), 2),
            "megabytes_on_disk": _on_disk((folders or {}).get(name)),
            "flops": costs[name].total,
            "head_flops": costs[name].heads,
            "peak_memory_megabytes": round(_peak_memory(model, batch, task) / MEBIBYTE, 1),
        }
        for name, model in (("dense", dense), ("pruned", pruned))
    }
    result["latency"] = latency
    share = costs["dense"].head_share
    if share < SMALL_SHARE:
        result["note"] = (
            f"Attention heads are {share:.0%} of this model's FLOPs at {tokens} tokens, so removing all of them "
            "could save no more than that: most of the time goes elsewhere (feed-forward blocks, embeddings, a "
            "vocabulary)."
        )
    return result


def _latency(dense: PreTrainedModel, pruned: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> dict[str, float]:
    """Median milliseconds of each, the two taking turns, and their ratio."""
    times: dict[str, list[float]] = {"dense": [], "pruned": []}
    models = {"dense": dense, "pruned": pruned}
    with torch.no_grad(), evaluating(dense), evaluating(pruned):
        for turn in range(WARM_UP + REPEATS):
            for name, model in models.items():
                inputs = to_device(task.inputs(batch), next(model.parameters()).device)
                started = time.perf_counter()
                model(**inputs)
                if turn >= WARM_UP:
                    times[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**{k: round(v, 3) for k, v in medians.items()}, "ratio": round(medians["pruned"] / medians["dense"], 3)}


def _on_disk(checkpoint: Path | None) -> float | None:
    """Megabytes of the weight files; None for a model that is not in a folder here."""
    files = [] if checkpoint is None else list(checkpoint.glob("*.safetensors"))
    return round(sum(file.stat().st_size for file in files) / MEBIBYTE, 2) if files else None


def _peak_memory(model: PreTrainedModel, batch: Mapping[str, Any], task: Task) -> int:
    """The most bytes that tensors held at once during a forward pass, the weights included."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad(), evaluating(model), _TensorMeter() as meter:
        model(**to_device(task.inputs(batch), next(model.parameters()).device))
    return weights + meter.peak


class _TensorMeter(TorchDispatchMode):
    """Counts the storage of every tensor that operations make, for as long as it lives."""

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
