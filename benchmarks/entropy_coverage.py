"""Attention entropies of a small model against `output_attentions`: a column of `benchmarks.model_coverage`.

The reference is the model with eager attention and `output_attentions=True` at each attention module, read with plain
torch hooks: the maps that the module of a site returned. headprune reads the same model with the attention
implementation that it was built with, and with eager attention. The result is one of

    exact            the entropies of every row of every site equal those of the reference
    exact with eager refused as it is built, and exact where it is built with eager attention
    refused          headprune says that it cannot read them, with the reason
    not applicable   no attention can be pruned
    not compared     the model does not return the attention of a site, or does not run with eager attention
    WRONG            entropies differ, or reading them fails
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

import headprune
from benchmarks.small_models import agree, outputs
from headprune.discovery.twin import Run
from headprune.errors import HeadpruneError
from headprune.hooks.attention_probabilities import probabilities, refuse_changed_outputs
from headprune.hooks.outputs import evaluating

# Nats: eager functions compute the softmax in float32 (rounding 1e-7), and a masked key changes an entropy by far more.
TOLERANCE = 1e-4
ASK = {"output_attentions": True, "need_weights": True, "average_attn_weights": False}  # of nn.MultiheadAttention too
Maps = dict[str, list[torch.Tensor]]  # of a site, application after application


def eager_copy(model: Any) -> Any:
    """The same weights in a model that was built with eager attention, as some choose their classes by it."""
    config = copy.deepcopy(model.config)
    copied = type(model)._from_config(config, attn_implementation="eager").to(model.dtype).eval()
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            copied.get_submodule(name.rpartition(".")[0]).__getattr__(name.rpartition(".")[2]).copy_(tensor)
    return copied


def asking(forward: Any) -> Any:
    """A forward that returns the attention of every head; some models do not ask each module for it."""
    names = list(inspect.signature(forward).parameters)

    def ask(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        return forward(**named | {name: value for name, value in ASK.items() if name in names})

    return ask


def returned_maps(model: Any, paths: Sequence[str], runs: Sequence[Run]) -> Maps:
    """The attention that the modules at these paths return, with plain torch; the model is changed."""
    maps: Maps = {path: [] for path in paths}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, tuple | list):
                maps[path] += [
                    part.double()
                    for part in output
                    if isinstance(part, torch.Tensor) and part.dim() == 4 and bool((part >= 0).all())
                    if 0 < float(part.sum(-1).max()) < 1.01  # not a bias by position
                ]

        return hook

    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_hook(keep(path))
        module.forward = asking(module.forward)
    outputs(model, runs)
    return maps


def shown_maps(model: Any, sites: Sequence[Any], runs: Sequence[Run]) -> Maps:
    """The attention that headprune reads; it raises where it would refuse a model."""
    maps: Maps = {site.path: [] for site in sites}
    with evaluating(model):
        expected = [outputs(model, [run])[0] for run in runs]  # what else a module returns may be its attention
        with probabilities(
            model, sites, lambda site, rows: maps[site.path].append(rows.probabilities.double()), whole=True, check=True
        ):
            actual = [outputs(model, [run])[0] for run in runs]
        refuse_changed_outputs(model, expected, actual)
    return maps


def entropies(weights: torch.Tensor) -> torch.Tensor:
    return -(weights * weights.clamp_min(1e-300).log()).sum(-1)


def joined(maps: Sequence[torch.Tensor], calls: int) -> list[torch.Tensor]:
    """A map per call: some modules return one softmax over their own and over cross-attended keys as two parts, whose
    rows sum to 1 together."""
    if len(maps) != 2 * calls:
        return list(maps)
    whole = [torch.cat(pair, dim=-1) for pair in zip(maps[::2], maps[1::2], strict=True)]
    sums = [part.sum(-1) for part in whole]
    return whole if all(torch.allclose(row, torch.ones_like(row), atol=1e-5) for row in sums) else list(maps)


def compare(expected: Maps, model: Any, sites: Sequence[Any], runs: Sequence[Run]) -> dict[str, str]:
    try:
        actual = shown_maps(model, sites, runs)
    except HeadpruneError as error:
        return {"entropy": "refused", "entropy_reason": str(error)}
    except Exception as error:
        return {"entropy": "WRONG", "entropy_reason": f"{type(error).__name__}: {error}"[:300]}
    not_returned = [path for path, maps in expected.items() if not maps and actual[path]]
    for path, maps in expected.items():
        if path in not_returned:
            continue
        maps = joined(maps, len(actual[path]))
        if [part.shape for part in maps] != [part.shape for part in actual[path]]:
            shapes = [[list(part.shape) for part in parts] for parts in (maps, actual[path])]
            return {"entropy": "WRONG", "entropy_reason": f"{path}: shapes {shapes[0]} and {shapes[1]}"}
        for one, other in zip(maps, actual[path], strict=True):
            difference = float((entropies(one) - entropies(other)).abs().max())
            if not difference <= TOLERANCE:
                return {"entropy": "WRONG", "entropy_reason": f"{path}: differs by {difference:.3g}"}
    if not_returned:  # the rest is exact
        return {"entropy": "not compared", "entropy_reason": f"{not_returned[0]}: output_attentions does not return it"}
    return {"entropy": "exact"}


def entropy_row(model: Any, runs: Sequence[Run]) -> dict[str, str]:
    """The cells of a model type: `entropy`, and where it is not exact `entropy_reason`."""
    try:
        sites = [site for site in headprune.survey(model).sites if site.attention]
    except HeadpruneError:
        sites = []
    if not sites:
        return {"entropy": "not applicable"}
    try:
        eager = eager_copy(model)
        expected = returned_maps(copy.deepcopy(eager), [site.path for site in sites], runs)
    except Exception as error:
        return {"entropy": "not compared", "entropy_reason": f"{type(error).__name__}: {error}"[:300]}
    built, with_eager = (compare(expected, variant, sites, runs) for variant in (model, eager))
    if with_eager["entropy"] == "exact" and built["entropy"] == "refused":
        return {**built, "entropy": "exact with eager"}
    wrong_as_built = with_eager["entropy"] in ("exact", "not compared") and built["entropy"] == "WRONG"
    if wrong_as_built and not agree(outputs(eager, runs), outputs(model, runs)):
        returned = "" if with_eager["entropy"] == "exact" else " where they are returned"
        reason = f"exact with eager attention{returned}, but as it is built the model has other outputs"
        return {"entropy": "not compared", "entropy_reason": reason}
    return built if built["entropy"] != "exact" else with_eager


def entropy_result(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Versions, counts, and the types of each result; with reasons where it is neither exact nor not applicable."""
    by_result: dict[str, Any] = {}
    for row in rows:
        result = row.get("entropy", "not built")
        if result in ("exact", "not applicable"):
            by_result.setdefault(result, []).append(row["type"])
        else:
            by_result.setdefault(result, {})[row["type"]] = row.get("entropy_reason") or row["reason"]
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "counts": {result: len(types) for result, types in by_result.items()},
        "types": by_result,
    }
