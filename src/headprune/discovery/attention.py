"""What an experiment says of a model class: which sites can be pruned exactly, and why others are left whole.

It is made on a small twin, an instance of the same class with random weights: every attention module is read, the
numbers its code needs are found by trying, and then all of it together is proven, heads removed against heads silenced.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from headprune.cache import remembered
from headprune.discovery.dense_site import DenseSite, is_conv1d, kinds_of, site_of
from headprune.discovery.head_counts import forward_needs
from headprune.discovery.influence import NotReadableError, said
from headprune.discovery.layout import merged
from headprune.discovery.proof import dense_sites, prove, reloading_fails
from headprune.discovery.read_attention import Reading, read, trace_runs
from headprune.discovery.to_all_layers import deepened, is_uniform
from headprune.discovery.to_full_width import NotStretchableError, stretched
from headprune.discovery.twin import Run, attention_modules, randomise, sample_runs, small_config
from headprune.hooks.recorded_calls import Trace
from headprune.hooks.torch_attention import expose
from headprune.units.dense import dense_config, quiet, structure_of
from headprune.units.spec import ForwardNeeds

DEEP = 10_000_000  # parameters of a narrow twin that has to have fewer layers as well
LAYERS = 4
SMALL = 3_000_000  # parameters of a model whose twin is as large as itself
LARGE = 300_000_000  # parameters of a twin that is still built where a small one does not serve


@dataclass(frozen=True)
class Discovery:
    """Sites of the dense model in the order in which they are declared, and what is left whole, with reasons."""

    sites: tuple[DenseSite, ...]
    left: tuple[tuple[str, str], ...]

    def to_plain(self) -> Any:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> Discovery:
        return cls(
            tuple(DenseSite.from_plain(site) for site in plain["sites"]), tuple((p, why) for p, why in plain["left"])
        )


class DiscoveryError(Exception):
    """A small twin could not be built or run; the text says why."""


def discover_class(kind: Any, config: Any) -> Discovery:
    """The attention of this class with this config; found once."""

    def make() -> Discovery:
        with torch.device("cpu"), quiet():
            return _made(kind, dense_config(config))

    found: Discovery = remembered(
        kind, structure_of(config), make, to_json=Discovery.to_plain, from_json=Discovery.from_plain
    )
    return found


def _made(kind: Any, config: Any) -> Discovery:
    with torch.device("meta"):
        dense = kind(copy.deepcopy(config))
    size = _size(dense)
    if size <= SMALL:
        return _on_twin(kind, config)
    try:
        return _on_narrow_twin(kind, config, dense)
    except (DiscoveryError, NotStretchableError) as error:
        if size > LARGE:
            raise DiscoveryError(str(error)) from None
    return _on_twin(kind, config)


def _on_narrow_twin(kind: Any, config: Any, dense: nn.Module) -> Discovery:
    """From a twin with the same heads, only narrower, and with fewer layers where it would still be large."""
    narrow = small_config(config, keep_heads=True)
    with torch.device("meta"):
        size = _size(kind(copy.deepcopy(narrow)))
    if size > DEEP and is_uniform(config):
        narrow = small_config(config, keep_heads=True, depth=LAYERS)
    found = _on_twin(kind, narrow)
    if size > DEEP and is_uniform(config):
        with torch.device("meta"):
            twin = kind(copy.deepcopy(narrow))
        sites, left = deepened(found.sites, found.left, twin, dense)
        found = Discovery(tuple(sites), tuple(left))
    return replace(found, sites=tuple(stretched(site, dense) for site in found.sites))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _on_twin(kind: Any, config: Any) -> Discovery:
    twin, runs = twin_of(kind, config)
    found = discover_sites(twin, runs)
    fresh = fresh_twin(kind, config, twin.dtype)
    found = replace(found, sites=tuple(_with_kinds(fresh, site) for site in found.sites))
    if not found.sites:
        return found
    sites = dense_sites(found.sites)
    again = reloading_fails(twin, lambda: fresh_twin(kind, config, twin.dtype), runs, sites)
    return Discovery((), (*((site.path, again) for site in found.sites), *found.left)) if again else found


def _with_kinds(fresh: nn.Module, site: DenseSite) -> DenseSite:
    """Classes are those of a model that has not run: code may exchange a module while it runs (BigBird does)."""
    return replace(site, kinds=kinds_of(fresh, [site.path, site.o, *site.maps]))


def fresh_twin(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of this class and config with random weights."""
    # A loader builds models without memory and in its own precision; the twin is none of that.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _default_dtype(torch.float32):
        torch.manual_seed(0)
        twin = kind(copy.deepcopy(config)).to(dtype).eval()
    expose(twin)
    if hasattr(twin, "set_experts_implementation"):  # kernels for experts know few precisions and widths
        twin.set_experts_implementation("eager")
    randomise(twin, 0)
    return twin


def twin_of(kind: Any, config: Any) -> tuple[Any, list[Run]]:
    """A small twin, and runs that reach its attention."""
    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            twin = fresh_twin(kind, config, dtype)
            runs = sample_runs(twin)
        except Exception as error:
            problem = error
            continue
        if runs:
            return twin, runs
    reason = said(problem) if problem else "no run worked"
    raise DiscoveryError(f"a small twin of {kind.__name__} could not be run ({reason})")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def discover_sites(twin: nn.Module, runs: Sequence[Run], paths: Sequence[str] | None = None) -> Discovery:
    """Read, try and prove every attention module of this small model, or the modules at these paths."""
    paths = attention_modules(twin) if paths is None else paths
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
    inner = {site.o: max((s.path for s in found if s.o == site.o), key=len) for site in found}
    found = [site for site in found if site.path == inner[site.o] or not _related(site.path, inner[site.o])]
    taken = Counter(site.o for site in found)
    left += [(site.path, "its output map serves several modules") for site in found if taken[site.o] > 1]
    found = [site for site in found if taken[site.o] == 1]
    proven, refused = prove(twin, runs, found)
    order = {path: number for number, path in enumerate(paths)}
    # What lies inside a module that was read, or around one, is not attention of its own.
    left = [pair for pair in left if not any(_related(pair[0], site.path) for site in proven)]
    return Discovery(tuple(proven), tuple(sorted([*left, *refused], key=lambda pair: order[pair[0]])))


def _related(one: str, other: str) -> bool:
    return one.startswith(other + ".") or other.startswith(one + ".")


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
    # Some code counts on blocks of heads (CodeGen's has four): then one of each block goes at a time. Some counts on
    # all of them: then they go together.
    for blocks in dict.fromkeys((1, 4, 2, reading.layout.units)):
        shape = reading.layout if blocks == 1 else merged(reading.layout, blocks)
        if shape is None:
            continue
        inputs = _inputs(reading)
        needs = ForwardNeeds(inputs=inputs, quirk="selecting" if inputs else "measured")
        dense = DenseSite(path, reading.output, reading.maps, shape, is_conv1d(twin, reading.output), needs)
        found = forward_needs(twin, site_of(dense, 0, []), reading.call)
        if not isinstance(found, str) and (found.empty or shape.units > 1):
            return replace(dense, needs=found)
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
