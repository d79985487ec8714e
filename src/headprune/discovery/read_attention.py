"""Reading the attention modules of a model: for each one its output map, and its layout by experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.discovery.influence import NotReadableError, Subject, influence, said
from headprune.discovery.layout import Layout, layout
from headprune.discovery.twin import Run
from headprune.hooks.recorded_calls import Call, Trace, tracing
from headprune.units.cutting.plan import QUERY_COUNTS
from headprune.units.linear import is_plain


@dataclass(frozen=True)
class Reading:
    """One attention module that could be read."""

    path: str
    output: str  # path of its output map in the model
    call: Call
    layout: Layout
    maps: tuple[str, ...]  # linear maps inside that have an axis of heads, as paths in the model


def trace_runs(model: nn.Module, runs: Sequence[Run], wanted: Sequence[str]) -> Trace:
    """How each of these modules is called, from runs of the model and its parts."""
    linears = [path for path, module in model.named_modules() if is_plain(module)]
    whole = Trace()
    for run in runs:
        with torch.no_grad(), tracing(model, wanted, linears) as trace:
            model.get_submodule(run.path)(**run.inputs)
        whole.calls = {**trace.calls, **whole.calls}
        whole.taker = {**trace.taker, **whole.taker}
    return whole


def read(model: nn.Module, path: str, trace: Trace) -> Reading:
    """The layout of the module at this path; NotReadableError says why there is none."""
    if path not in trace.calls:
        raise NotReadableError("it did not run on the inputs that were tried")
    module: Any = model.get_submodule(path)
    inside = {name: child for name, child in module.named_modules() if name and is_plain(child)}
    declared = next((n for name in QUERY_COUNTS if isinstance(n := getattr(module, name, None), int)), None)
    reasons: list[str] = []
    for output in [*reversed(inside), None]:
        if output is None and path not in trace.taker:
            continue
        rest = {name: child for name, child in inside.items() if name != output}
        try:
            found = influence(Subject(module, trace.calls[path], output), rest)
            named = {name: (f"{name}.weight", f"{name}.bias") for name in rest}
            made = layout(found, named, declared, inside=output is not None)
        except NotReadableError as error:
            reasons.append(str(error))
            continue
        except Exception as error:  # whatever the module's own code raises on what it was given before
            reasons.append(f"it could not be run by itself ({said(error)})")
            continue
        owners = {axis.tensor.rpartition(".")[0] for axis in made.axes}
        where = trace.taker[path] if output is None else f"{path}.{output}"
        maps = tuple(f"{path}.{name}" for name in rest if name in owners)
        return Reading(path, where, trace.calls[path], made, maps)
    raise NotReadableError(_telling(reasons, path in trace.taker))


def _telling(reasons: Sequence[str], taken: bool) -> str:
    """The reason that says most: of maps that cannot be the output map, "it does not mix tokens" says nothing."""
    nothing, apart = "no linear map takes what its heads give", "it does not mix tokens"
    telling = [reason for reason in reasons if reason not in (nothing, apart)]
    if telling:
        return telling[0]
    if taken and apart in reasons:
        return f"{apart} on the inputs that were tried"
    return nothing if reasons else "it has no linear map inside or after it"
