"""Measures the attention modules of a model: for each one its output map and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.discovery.influence import NotReadableError, RecordedModule, describe_error, influence
from headprune.discovery.layout import Layout, layout
from headprune.discovery.twin import Run
from headprune.hooks.module_calls import ModuleCall, Trace, tracing
from headprune.units.linear import is_plain
from headprune.units.slicing.plan import QUERY_COUNTS


@dataclass(frozen=True)
class Reading:
    """One attention module with a measured layout."""

    path: str
    output: str  # path of its output map in the model
    call: ModuleCall
    layout: Layout
    maps: tuple[str, ...]  # linear maps inside that have an axis of heads, as paths in the model


def trace_runs(model: nn.Module, runs: Sequence[Run], paths: Sequence[str]) -> Trace:
    """The arguments of each of these modules in runs of the model and its parts."""
    linears = [path for path, module in model.named_modules() if is_plain(module)]
    whole = Trace()
    for run in runs:
        with torch.no_grad(), tracing(model, paths, linears) as trace:
            model.get_submodule(run.path)(**run.inputs)
        whole.calls = {**trace.calls, **whole.calls}
        whole.consumer = {**trace.consumer, **whole.consumer}
    return whole


def read(model: nn.Module, path: str, trace: Trace) -> Reading:
    """The layout of the module at this path; raises NotReadableError with the reason where there is none."""
    if path not in trace.calls:
        raise NotReadableError("it did not run on the inputs that were tried")
    module: Any = model.get_submodule(path)
    inside = {name: child for name, child in module.named_modules() if name and is_plain(child)}
    declared = next((n for name in QUERY_COUNTS if isinstance(n := getattr(module, name, None), int)), None)
    reasons: list[str] = []
    for output in [*reversed(inside), None]:
        if output is None and path not in trace.consumer:
            continue
        linears = {name: child for name, child in inside.items() if name != output}
        try:
            influences = influence(RecordedModule(module, trace.calls[path], output), linears)
            tensor_names = {name: (f"{name}.weight", f"{name}.bias") for name in linears}
            measured = layout(influences, tensor_names, declared, inside=output is not None)
        except NotReadableError as error:
            reasons.append(str(error))
            continue
        except Exception as error:  # the forward of the module may raise any error
            reasons.append(f"it could not be run by itself ({describe_error(error)})")
            continue
        owners = {axis.tensor.rpartition(".")[0] for axis in measured.axes}
        output_path = trace.consumer[path] if output is None else _below(path, output)
        maps = tuple(_below(path, name) for name in linears if name in owners)
        return Reading(path, output_path, trace.calls[path], measured, maps)
    raise NotReadableError(_best_reason(reasons, path in trace.consumer))


def _best_reason(reasons: Sequence[str], has_taker: bool) -> str:
    """The most specific reason: for a map that is not the output map, "it does not mix tokens" is not informative."""
    no_output_map, no_mixing = "no linear map takes what its heads give", "it does not mix tokens"
    specific = [reason for reason in reasons if reason not in (no_output_map, no_mixing)]
    if specific:
        return specific[0]
    if has_taker and no_mixing in reasons:
        return f"{no_mixing} on the inputs that were tried"
    return no_output_map if reasons else "it has no linear map inside or after it"


def _below(path: str, name: str) -> str:
    """A module of the module at a path, which is empty for the model itself."""
    return f"{path}.{name}" if path else name
