"""A table of times: how long a layer takes by its number of heads and its width, measured on this machine.

Every kind of site is timed alone with different numbers of units; then the whole model with all of its units, without
those of one kind, and without any, so that the parts add up to the time of a pass.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headprune import cache
from headprune.errors import HeadpruneError, UnsupportedModelError
from headprune.json_forms import check_form
from headprune.measure.curves import isotonic
from headprune.measure.dummy_inputs import default_tokens, dummy_batch
from headprune.measure.sublayers import (
    Sublayer,
    fewest_of,
    record_calls,
    sublayers,
    timed_sublayer,
    typical_count,
    with_units,
)
from headprune.measure.timing import TimedCall, choose_clock, time_in_turns, using_threads
from headprune.progress import Phase, report_phase
from headprune.units import Kind, Site, all_sites

REPEATS = 9
SECONDS = 5.0  # short passes are repeated more often: noise is large beside them
FORMAT = 2  # of the files in which tables are cached
SHARES = (0.25, 0.5, 0.75)  # of all units: whole models that are timed too
LIMITS = (0.5, 2.0)  # of the factor between the time of a part in the model and alone; beyond them it is noise


TABLE = {
    **dict.fromkeys(("batch_size", "length", "threads", "repeats"), int),
    **dict.fromkeys(("device", "dtype", "processor"), str),
    "rest": float,
    "curves": [{"kind": str, "place": str, "sites": [int], "counts": [int], "seconds": [float]}],
    "unmeasured": [int],
}


@dataclass(frozen=True)
class Curve:
    """Seconds that the units of one site add to a pass, by how many there are, interpolated between counts."""

    kind: Kind
    place: str
    sites: tuple[int, ...]  # with the same times
    counts: tuple[int, ...]
    seconds: tuple[float, ...]  # more than with the fewest, in all applications of the site; never falling

    def at(self, count: int) -> float:
        low, high = self.counts[0], self.counts[-1]
        if not low <= count <= high:
            raise HeadpruneError(f"A {self.place} site here has {low} to {high} units, not {count}; use one of these.")
        return interpolate(self.counts, self.seconds, count)

    def nearest(self, share: float) -> int:
        """About this share of all units, or the fewest that may be left."""
        return max(typical_count(share * self.counts[-1]), self.counts[0])

    def times(self, factors: Sequence[float]) -> Curve:
        """With a factor for every count; still never falling."""
        seconds = isotonic([taken * factor for taken, factor in zip(self.seconds, factors, strict=True)])
        return replace(self, seconds=tuple(seconds))


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of a forward pass by the units that are left; a unit of attention is the heads that are removed
    together."""

    batch_size: int
    length: int
    threads: int
    device: str
    dtype: str
    processor: str
    repeats: int
    rest: float  # seconds without all units that can be removed
    curves: tuple[Curve, ...]
    unmeasured: tuple[int, ...] = ()  # sites that a pass does not reach, which take no time

    @property
    def dense(self) -> float:
        """Seconds with all units that the measured model had."""
        return self.estimate({})

    def estimate(self, counts: Mapping[int, int]) -> float:
        """Seconds with these numbers of units left at these sites, and all units elsewhere."""
        unknown = sorted(set(counts) - {site for curve in self.curves for site in curve.sites} - {*self.unmeasured})
        if unknown:
            raise HeadpruneError(f"Site {unknown[0]} is not in this table of times; measure the table for this model.")
        return self.rest + sum(
            curve.at(counts.get(site, curve.counts[-1])) for curve in self.curves for site in curve.sites
        )

    def unit_cost(self, site: int, count: int) -> float:
        """Seconds saved by removing one of `count` units at this site."""
        curve = next((curve for curve in self.curves if site in curve.sites), None)
        return 0.0 if curve is None or count <= curve.counts[0] else curve.at(count) - curve.at(count - 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dense": self.dense}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LatencyTable:
        curves = tuple(
            Curve(curve["kind"], curve["place"], tuple(curve["sites"]), tuple(curve["counts"]), tuple(curve["seconds"]))
            for curve in record["curves"]
        )
        others = {each.name: record[each.name] for each in fields(cls)}
        return cls(**{**others, "curves": curves, "unmeasured": tuple(record["unmeasured"])})


def latency_table(
    model: PreTrainedModel,
    *,
    batch_size: int = 1,
    length: int | None = None,
    threads: int | None = None,
    repeats: int = REPEATS,
    batch: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> LatencyTable:
    """Measure the table, or read it from the cache where it was measured on this machine before (`fresh` measures
    anyway).

    Inputs are a `batch`, or dummy inputs: `batch_size` sequences of `length` tokens, or images or recordings of the
    size that the model takes.
    """
    if any(number is not None and number < 1 for number in (batch_size, length, threads, repeats)):
        raise HeadpruneError("batch_size, length, threads and repeats must be at least 1.")
    length = default_tokens(model) if length is None else length
    with using_threads(threads) as used:
        file = _file(model, (batch_size, length, used, repeats, _batch_shapes(batch)))
        stored = None if fresh else _read(file)
        if stored is not None:
            return stored
        model = _with_weights(model)
        inputs = dummy_batch(model, batch_size, length) if batch is None else dict(batch)
        size = batch_size if batch is None else len(next(iter(inputs.values())))
        rest, curves, unmeasured = _measure(model, inputs, repeats)
    first = next(model.parameters())
    table = LatencyTable(
        batch_size=size,
        length=length,
        threads=used,
        device=str(first.device),
        dtype=str(first.dtype).removeprefix("torch."),
        processor=processor(),
        repeats=repeats,
        rest=rest,
        curves=curves,
        unmeasured=unmeasured,
    )
    _write(file, table)
    return table


def _measure(
    model: PreTrainedModel, inputs: dict[str, Any], repeats: int
) -> tuple[float, tuple[Curve, ...], tuple[int, ...]]:
    sites = all_sites(model)
    parts = sublayers(model, sites, inputs)
    if not parts:
        raise UnsupportedModelError("No site of this model is reached by its inputs; give a batch that it works on.")
    report_phase(Phase("preparing layers of several widths for timing"))
    calls = record_calls(model, inputs, {part.module for part in parts}).calls
    alone: dict[Any, TimedCall] = {
        (number, count): timed_sublayer(model, sites, part.module, calls[part.module], part.sites[0], count)
        for number, part in enumerate(parts)
        for count in part.counts
    }
    kinds: list[Kind] = list(dict.fromkeys(sites[part.sites[0]].kind for part in parts))
    wholes = {
        name: TimedCall(with_units(model, sites, left), (), inputs) for name, left in _wholes(sites, kinds).items()
    }
    clock = choose_clock(torch.get_num_threads(), next(model.parameters()).device)
    # The shortest time is the one least disturbed by other programs.
    times = time_in_turns({**alone, **wholes}, repeats, clock=clock, seconds_at_least=SECONDS, phase="timing layers")
    seconds = {name: min(values) for name, values in times.items()}
    curves_alone = [
        _curve(sites, part, [seconds[number, count] for count in part.counts]) for number, part in enumerate(parts)
    ]
    curves = fit_curves(curves_alone, kinds, {name: seconds[name] for name in wholes})
    reached = {site for part in parts for site in part.sites}
    rest = seconds["dense"] - sum(curve.seconds[-1] * len(curve.sites) for curve in curves)
    return max(rest, 0.0), tuple(curves), tuple(site.index for site in sites if site.index not in reached)


def _wholes(sites: Sequence[Site], kinds: Sequence[Kind]) -> dict[Any, dict[int, int]]:
    """The whole models to time, by the units left: dense, a share of all units, and without one kind after another."""
    present = [site for site in sites if site.kept]
    widths: dict[Any, dict[int, int]] = {"dense": {}}
    for share in SHARES:
        widths[share] = {
            site.index: max(typical_count(share * site.size / site.group), fewest_of(site)) for site in present
        }
    fewest: dict[int, int] = {}
    for kind in kinds:
        fewest = {**fewest, **{site.index: fewest_of(site) for site in present if site.kind == kind}}
        widths[kind] = fewest
    return widths


def _curve(sites: Sequence[Site], part: Sublayer, times: Sequence[float]) -> Curve:
    site, times = sites[part.sites[0]], isotonic(times)
    seconds = tuple(site.applications * (taken - times[0]) for taken in times)
    return Curve(site.kind, site.place, part.sites, part.counts, seconds)


def fit_curves(curves: Sequence[Curve], kinds: Sequence[Kind], wholes: Mapping[Any, float]) -> list[Curve]:
    """Scale curves so that they add up to the times of whole models: alone a layer has its weights in the processor's
    cache, in a model it has not, and the fewer units, the more that matters."""
    before = wholes["dense"]
    for kind in kinds:
        alone = sum(curve.seconds[-1] * len(curve.sites) for curve in curves if curve.kind == kind)
        scale = _clamp((before - wholes[kind]) / alone) if alone > 0 else 1.0
        curves = [curve.times([scale] * len(curve.counts)) if curve.kind == kind else curve for curve in curves]
        before = wholes[kind]
    factors = []
    for share in SHARES:
        added = sum(curve.at(curve.nearest(share)) * len(curve.sites) for curve in curves)
        factors.append(_clamp((wholes[share] - before) / added) if added > 0 else 1.0)
    shares, factors = [0.0, *SHARES, 1.0], [factors[0], *factors, 1.0]
    result = []
    for curve in curves:
        shares_of_curve = [count / curve.counts[-1] if curve.counts[-1] else 1.0 for count in curve.counts]
        result.append(curve.times([interpolate(shares, factors, share) for share in shares_of_curve]))
    return result


def _clamp(factor: float) -> float:
    return min(max(factor, LIMITS[0]), LIMITS[1])


def interpolate(xs: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear interpolation between known values."""
    right = bisect.bisect_left(xs, x)
    if xs[right] == x:
        return values[right]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return values[right - 1] * (1 - share) + values[right] * share


def processor() -> str:
    """The name of the machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _batch_shapes(batch: Mapping[str, Any] | None) -> Any:
    if batch is None:
        return None
    return sorted((name, list(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor))


def _file(model: PreTrainedModel, inputs: Any) -> Path:
    """Named by a hash of all that decides the times: code, shapes, settings, inputs, and the machine."""
    kind, first = type(model), next(model.parameters())
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    device = "cpu" if first.device.type == "meta" else str(first.device)
    parts = (
        FORMAT,
        f"{kind.__module__}.{kind.__qualname__}",
        shapes,
        model.config.to_json_string(use_diff=False),
        inputs,
    )
    machine = (device, str(first.dtype), processor(), torch.__version__, transformers.__version__)
    digest = hashlib.sha256(repr((parts, model.config._attn_implementation, machine)).encode()).hexdigest()[:24]
    return cache.folder() / "latency" / f"{kind.__name__}-{digest}.json"


def _read(file: Path) -> LatencyTable | None:
    with suppress(OSError, ValueError, RecursionError):  # a broken file is ignored, and measured again
        record = json.loads(file.read_bytes())
        check_form(record, TABLE)
        table = LatencyTable.from_json(record)
        counts = [curve.counts for curve in table.curves]
        rising = all(numbers and sorted({*numbers}) == list(numbers) for numbers in counts)
        if rising and all(len(curve.counts) == len(curve.seconds) for curve in table.curves):
            return table
    return None


def _write(file: Path, table: LatencyTable) -> None:
    with suppress(OSError):  # without a cache the table is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as stream:
            json.dump(table.to_json(), stream)
        Path(stream.name).replace(file)


def _with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or, where it is on the meta device, one of its class with random weights."""
    if not any(parameter.device.type == "meta" for parameter in model.parameters()):
        return model
    with suppress(Exception), torch.device("cpu"):
        return type(model)(copy.deepcopy(model.config)).eval()
    raise UnsupportedModelError(
        f"{type(model).__name__} could not be built with random weights; load the model with its weights first."
    )
