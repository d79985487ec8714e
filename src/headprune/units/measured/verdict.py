"""What an experiment says of a model class: which sites can be pruned exactly, and why others are left whole.

It is made on a small twin, an instance of the same class with random weights: every attention module is read, the
numbers its code needs are found by trying, and then all of it together is proven, heads removed against heads silenced.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.units.measured.calls import Trace
from headprune.units.measured.influence import NotReadableError
from headprune.units.measured.layout import merged
from headprune.units.measured.proof import prove, reloading_fails
from headprune.units.measured.reading import Reading, read, trace_runs
from headprune.units.measured.sites import DenseSite, is_conv1d, kinds_of, site_of
from headprune.units.measured.trial import recipe_for
from headprune.units.small import Run, attention_modules, randomise, sample_runs
from headprune.units.spec import AttentionSite, Recipe

SMALL = 4_000_000  # parameters of a model that is its own twin's size


@dataclass(frozen=True)
class Verdict:
    """Sites of the dense model in the order in which they are declared, and what is left whole, with reasons."""

    sites: tuple[DenseSite, ...]
    left: tuple[tuple[str, str], ...]


class NoTwinError(Exception):
    """A small twin could not be built or run; the text says why."""


_known: dict[tuple[type, str], Verdict] = {}


def verdict_on(model: PreTrainedModel) -> Verdict:
    """The verdict on the class of this model with this config; made once."""
    key = _class(model), _settings(model.config)
    if key not in _known:
        with torch.device("cpu"):
            twin, runs = twin_of(model)
            found = judge(twin, runs)
            found = replace(
                found, sites=tuple(_with_kinds(fresh_twin(model, twin.dtype), site) for site in found.sites)
            )
            again = found.sites and reloading_fails(twin, lambda: fresh_twin(model, twin.dtype), runs, found.sites)
            if again:
                found = Verdict((), (*((site.path, again) for site in found.sites), *found.left))
        _known[key] = found
    return _known[key]


def _with_kinds(fresh: nn.Module, site: DenseSite) -> DenseSite:
    """Classes are those of a model that has not run: code may exchange a module while it runs (BigBird does)."""
    return replace(site, kinds=kinds_of(fresh, [site.path, site.o, *site.maps]))


def _class(model: nn.Module) -> Any:
    """The class as its code has it: a loader derives one of its own."""
    return getattr(type(model), "headprune_dense", type(model))


def _settings(config: Any) -> str:
    settings = config.to_dict()
    settings.update((settings.get("headprune") or {}).get("dense", {}))  # a native checkpoint states fewer heads
    settings = {name: value for name, value in settings.items() if name not in ("pruned_heads", "headprune")}
    return json.dumps(settings, sort_keys=True, default=str)


def fresh_twin(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """A model of the same class and config with random weights."""
    config = type(model.config).from_dict(json.loads(_settings(model.config)))
    # A loader builds models without memory and in its own precision; the twin is none of that.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _default_dtype(torch.float32):
        torch.manual_seed(0)
        twin = _class(model)(config).to(dtype).eval()
    if hasattr(twin, "set_experts_implementation"):  # kernels for experts know few precisions and widths
        twin.set_experts_implementation("eager")
    randomise(twin, 0)
    return twin


def twin_of(model: PreTrainedModel) -> tuple[Any, list[Run]]:
    """A small twin, and runs that reach its attention."""
    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            twin = fresh_twin(model, dtype)
            runs = sample_runs(twin)
        except Exception as error:
            problem = error
            continue
        if runs:
            return twin, runs
    reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:150]}" if problem else "no run worked"
    raise NoTwinError(f"a small twin of {type(model).__name__} could not be run ({reason})")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def judge(twin: nn.Module, runs: Sequence[Run]) -> Verdict:
    """Read, try and prove every attention module of this small model."""
    paths = attention_modules(twin)
    trace = trace_runs(twin, runs, paths)
    found: list[DenseSite] = []
    left: list[tuple[str, str]] = []
    alike: dict[Any, DenseSite | str] = {}
    for path in paths:
        key = _likeness(twin, path, trace)
        known = alike.get(key)
        if known is None:
            known = alike[key] = _read_and_try(twin, path, trace)
        if isinstance(known, str):
            left.append((path, known))
        else:
            found.append(_moved(known, path, trace))
    taken = Counter(site.o for site in found)
    left += [(site.path, "its output map serves several modules") for site in found if taken[site.o] > 1]
    found = [site for site in found if taken[site.o] == 1]
    proven, refused = prove(twin, runs, found)
    order = {path: number for number, path in enumerate(paths)}
    return Verdict(tuple(proven), tuple(sorted([*left, *refused], key=lambda pair: order[pair[0]])))


def _likeness(twin: nn.Module, path: str, trace: Trace) -> Any:
    """Modules with the same code, shapes and numbers, called alike, have the same layout."""
    module = twin.get_submodule(path)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
    numbers = tuple(sorted((n, v) for n, v in module.__dict__.items() if type(v) in (int, bool) and "layer" not in n))
    call = trace.calls.get(path)
    given = None if call is None else (len(call.args), tuple((k, v is None) for k, v in call.kwargs.items()))
    taker = trace.taker.get(path, "")
    inside = taker.startswith(path.rpartition(".")[0]) if taker else None
    return type(module), shapes, numbers, given, inside, None if inside else taker


def _read_and_try(twin: nn.Module, path: str, trace: Trace) -> DenseSite | str:
    try:
        reading = read(twin, path, trace)
    except NotReadableError as error:
        return str(error)
    first = ""
    # Some code counts on blocks of heads (CodeGen's has four): then one of each block goes at a time.
    for blocks in (1, 4, 2):
        shape = reading.layout if blocks == 1 else merged(reading.layout, blocks)
        if shape is None:
            continue
        recipe = Recipe(inputs=_inputs(reading))
        dense = DenseSite(path, reading.output, reading.maps, shape, is_conv1d(twin, reading.output), recipe)
        found = recipe_for(twin, site_of(dense, 0, [], stack="encoder", attention="self"), reading.call)
        if not isinstance(found, str) and (found.empty or shape.units > 1):
            return replace(dense, recipe=found)
        first = first or (found if isinstance(found, str) else "its only head cannot be removed")
    return first


def _inputs(reading: Reading) -> tuple[tuple[str | int, int], ...]:
    """Arguments with a head axis; those whose heads are not in the order of the columns are left to fail."""
    return tuple((int(a.tensor) if a.tensor.isdigit() else a.tensor, a.dim) for a in reading.layout.inputs)


def _moved(dense: DenseSite, path: str, trace: Trace) -> DenseSite:
    """The same layout at another path."""
    if path == dense.path:
        return dense
    inside = dense.o.startswith(dense.path + ".")
    output = path + dense.o.removeprefix(dense.path) if inside else trace.taker[path]
    maps = tuple(path + name.removeprefix(dense.path) for name in dense.maps)
    return replace(dense, path=path, o=output, maps=maps)


def sites_of(dense: Sequence[DenseSite]) -> list[AttentionSite]:
    """The sites of a small dense model, for proofs."""
    return [site_of(site, index, [], stack="encoder", attention="self") for index, site in enumerate(dense)]
