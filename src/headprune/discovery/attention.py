"""Discovers which attention sites of a model class can be pruned exactly, and why the others cannot.

The experiment runs on a small twin, an instance of the same class with random weights: the layout of every attention
module is measured, the attributes that its forward reads are determined by trial, and then all sites together are
proven: the outputs with heads removed equal the outputs with the columns of these heads set to zero.
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
from headprune.discovery.head_counts import forward_needs
from headprune.discovery.influence import NotReadableError, describe_error
from headprune.discovery.layout import merge_units
from headprune.discovery.proof import dense_sites, prove, reload_failure
from headprune.discovery.read_attention import Reading, read, trace_runs
from headprune.discovery.sites_from_layouts import DenseSite, is_conv1d, kinds_of, site_of
from headprune.discovery.to_all_layers import extend_to_all_layers, is_uniform
from headprune.discovery.to_full_width import NotScalableError, scale_to_width
from headprune.discovery.twin import Run, attention_modules, randomise, sample_runs, small_config
from headprune.hooks.module_calls import Trace
from headprune.hooks.torch_attention import expose
from headprune.progress import Phase, report_phase
from headprune.units.dense_model import classes_of, dense_config, quiet, structure_of
from headprune.units.spec import ForwardNeeds

SHORTEN_ABOVE = 10_000_000  # parameters of a narrow twin; above it, the twin has fewer layers as well
SHORT_DEPTH = 4
SAME_SIZE_BELOW = 3_000_000  # parameters of a model; up to here its twin has the same size
MAX_TWIN_SIZE = 300_000_000  # parameters of a model; up to here a twin of that size replaces a narrow one that fails


@dataclass(frozen=True)
class Discovery:
    """Sites of the dense model in the order of declaration, and the modules that cannot be pruned, with reasons."""

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
    """A small twin could not be built or run; the message says why."""


def discover_class(kind: Any, config: Any) -> Discovery:
    """The attention sites of this class with this config; the result is cached."""

    def make() -> Discovery:
        report_phase(Phase(f"discovering the layout of {kind.__name__}"))
        with torch.device("cpu"), quiet():
            return _discover(kind, dense_config(config))

    result: Discovery = remembered(
        kind,
        structure_of(config),
        make,
        classes=classes_of(kind, config),
        to_json=Discovery.to_plain,
        from_json=Discovery.from_plain,
    )
    return result


def _discover(kind: Any, config: Any) -> Discovery:
    with torch.device("meta"):
        dense = kind(copy.deepcopy(config))
    size = _size(dense)
    if size <= SAME_SIZE_BELOW:
        return _on_twin(kind, config)
    try:
        return _on_narrow_twin(kind, config, dense)
    except (DiscoveryError, NotScalableError) as error:
        if size > MAX_TWIN_SIZE:
            raise DiscoveryError(str(error)) from None
    return _on_twin(kind, config)


def _on_narrow_twin(kind: Any, config: Any, dense: nn.Module) -> Discovery:
    """Discover on a narrower twin with the same heads, and with fewer layers where it would still be large."""
    narrow = small_config(config, keep_heads=True)
    with torch.device("meta"):
        size = _size(kind(copy.deepcopy(narrow)))
    if size > SHORTEN_ABOVE and is_uniform(config):
        narrow = small_config(config, keep_heads=True, depth=SHORT_DEPTH)
    result = _on_twin(kind, narrow)
    if size > SHORTEN_ABOVE and is_uniform(config):
        with torch.device("meta"):
            twin = kind(copy.deepcopy(narrow))
        sites, skipped = extend_to_all_layers(result.sites, result.left, twin, dense)
        result = Discovery(tuple(sites), tuple(skipped))
    return replace(result, sites=tuple(scale_to_width(site, dense) for site in result.sites))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _on_twin(kind: Any, config: Any) -> Discovery:
    twin, runs = twin_of(kind, config)
    result = discover_sites(twin, runs)
    fresh = fresh_twin(kind, config, twin.dtype)
    result = replace(result, sites=tuple(_with_kinds(fresh, site) for site in result.sites))
    if not result.sites:
        return result
    sites = dense_sites(result.sites)
    failure = reload_failure(twin, lambda: fresh_twin(kind, config, twin.dtype), runs, sites)
    return Discovery((), (*((site.path, failure) for site in result.sites), *result.left)) if failure else result


def _with_kinds(fresh: nn.Module, site: DenseSite) -> DenseSite:
    """Add the classes of the modules, from a model that has not run: a forward may replace modules (BigBird does)."""
    return replace(site, kinds=kinds_of(fresh, [site.path, site.o, *site.maps]))


def fresh_twin(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of this class and config with random weights."""
    # The caller may be inside from_pretrained, with the meta device and another default dtype.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _default_dtype(torch.float32):
        torch.manual_seed(0)
        twin = kind(copy.deepcopy(config)).to(dtype).eval()
    expose(twin)
    if hasattr(twin, "set_experts_implementation"):  # expert kernels support few dtypes and widths
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
    reason = describe_error(problem) if problem else "no run worked"
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
    """Measure and prove every attention module of this small model, or the modules at these paths."""
    paths = attention_modules(twin) if paths is None else paths
    trace = trace_runs(twin, runs, paths)
    candidates: list[DenseSite] = []
    skipped: list[tuple[str, str]] = []
    results: dict[Any, DenseSite | str] = {}
    for path in paths:
        key = _signature(twin, path, trace)
        result = results.get(key)
        if result is None:
            result = results[key] = _measure_site(twin, path, trace)
        if isinstance(result, str):
            skipped.append((path, result))
        else:
            candidates.append(_at_path(result, path, trace))
    inner = {site.o: max((s.path for s in candidates if s.o == site.o), key=len) for site in candidates}
    candidates = [site for site in candidates if site.path == inner[site.o] or not _nested(site.path, inner[site.o])]
    uses = Counter(site.o for site in candidates)
    skipped += [(site.path, "its output map serves several modules") for site in candidates if uses[site.o] > 1]
    candidates = [site for site in candidates if uses[site.o] == 1]
    proven, refused = prove(twin, runs, candidates)
    order = {path: number for number, path in enumerate(paths)}
    # A module inside or around a proven site is part of that site, so it is not reported.
    skipped = [pair for pair in skipped if not any(_nested(pair[0], site.path) for site in proven)]
    return Discovery(tuple(proven), tuple(sorted([*skipped, *refused], key=lambda pair: order[pair[0]])))


def _nested(path: str, other_path: str) -> bool:
    return path.startswith(other_path + ".") or other_path.startswith(path + ".")


def _signature(twin: nn.Module, path: str, trace: Trace) -> Any:
    """A key that is equal for modules with the same class, shapes, attributes and arguments: they have one layout."""
    module = twin.get_submodule(path)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
    numbers = tuple(sorted((n, v) for n, v in module.__dict__.items() if type(v) in (int, bool) and "layer" not in n))
    call = trace.calls.get(path)
    arguments = None if call is None else (len(call.args), tuple((k, v is None) for k, v in call.kwargs.items()))
    consumer = trace.consumer.get(path, "")
    taker_is_sibling = consumer.startswith(path.rpartition(".")[0]) if consumer else None
    return type(module), shapes, numbers, arguments, taker_is_sibling, None if taker_is_sibling else consumer


def _measure_site(twin: nn.Module, path: str, trace: Trace) -> DenseSite | str:
    try:
        reading = read(twin, path, trace)
    except NotReadableError as error:
        return str(error)
    first_failure = ""
    # Some code reshapes heads into blocks (CodeGen into four): then a unit is one head of each block. Where the code
    # needs every head, all heads are one unit.
    for blocks in dict.fromkeys((1, 4, 2, reading.layout.units)):
        shape = reading.layout if blocks == 1 else merge_units(reading.layout, blocks)
        if shape is None:
            continue
        inputs = _inputs(reading)
        initial_needs = ForwardNeeds(inputs=inputs, quirk="selecting" if inputs else "measured")
        dense = DenseSite(path, reading.output, reading.maps, shape, is_conv1d(twin, reading.output), initial_needs)
        needs = forward_needs(twin, site_of(dense, 0, []), reading.call)
        if not isinstance(needs, str) and (needs.empty or shape.units > 1):
            return replace(dense, needs=needs)
        first_failure = first_failure or (needs if isinstance(needs, str) else "its only head cannot be removed")
    return first_failure


def _inputs(reading: Reading) -> tuple[tuple[str | int, int], ...]:
    """Arguments with a head axis; where the heads of one are in another order than the columns, the proof fails."""
    return tuple((int(a.tensor) if a.tensor.isdigit() else a.tensor, a.dim) for a in reading.layout.inputs)


def _at_path(dense: DenseSite, path: str, trace: Trace) -> DenseSite:
    """The site with the same layout at another path."""
    if path == dense.path:
        return dense
    inside = dense.o.startswith(dense.path + ".")
    output = path + dense.o.removeprefix(dense.path) if inside else trace.consumer[path]
    maps = tuple(path + name.removeprefix(dense.path) for name in dense.maps)
    return replace(dense, path=path, o=output, maps=maps)
