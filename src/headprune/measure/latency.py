"""How long a layer takes by its heads and its width, on this machine: measured, and not assumed from FLOPs.

Every kind of site is timed alone with other numbers of units; then the whole model with all of its units, without those
of one kind, and without any, so that the parts add up to what a pass takes.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headprune import cache
from headprune.errors import HeadpruneError, UnsupportedModelError
from headprune.measure.curves import rising
from headprune.measure.examples import default_tokens
from headprune.measure.inputs import made_up, materialised
from headprune.measure.sublayers import Sublayer, called, fewest_of, sublayers, timed, usual, with_units
from headprune.measure.timing import Timed, own_clock, turns, using_threads
from headprune.units import Kind, Site, all_sites

REPEATS = 9
SECONDS = 5.0  # short passes are repeated more often: noise is large beside them
FORM = 2  # of the files that tables are kept in
SHARES = (0.25, 0.5, 0.75)  # of all units: models in which the parts must add up
LIMITS = (0.5, 2.0)  # how much slower or faster a part may be in the model than alone, before it is noise


@dataclass(frozen=True)
class Curve:
    """Seconds that the units of one site add to a pass, by how many there are. Between counts lies a straight line."""

    kind: Kind
    place: str
    sites: tuple[int, ...]  # all that are alike
    counts: tuple[int, ...]
    seconds: tuple[float, ...]  # beyond what the fewest take, in all applications of the site; never falling

    def at(self, count: int) -> float:
        low, high = self.counts[0], self.counts[-1]
        if not low <= count <= high:
            raise HeadpruneError(
                f"A {self.place} site here has {low} to {high} units, not {count}; ask for one of these."
            )
        return straight(self.counts, self.seconds, count)

    def nearest(self, share: float) -> int:
        """So many of all units, or as few as may be."""
        return max(usual(share * self.counts[-1]), self.counts[0])

    def times(self, factors: Sequence[float]) -> Curve:
        """With a factor for every count; still never falling."""
        seconds = rising([taken * factor for taken, factor in zip(self.seconds, factors, strict=True)])
        return replace(self, seconds=tuple(seconds))


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of a forward pass by the units that are left; a unit of attention is the heads that go together."""

    batch_size: int
    length: int
    threads: int
    device: str
    dtype: str
    processor: str
    repeats: int
    rest: float  # what stays when all units that may go have gone
    curves: tuple[Curve, ...]
    unmeasured: tuple[int, ...] = ()  # sites that a pass does not reach: they cost nothing here

    @property
    def dense(self) -> float:
        """Seconds with every unit that was there when it was measured."""
        return self.estimate({})

    def estimate(self, counts: Mapping[int, int]) -> float:
        """Seconds with so many units left at these sites, and all of them elsewhere."""
        unknown = sorted(set(counts) - {site for curve in self.curves for site in curve.sites} - {*self.unmeasured})
        if unknown:
            raise HeadpruneError(f"Site {unknown[0]} is not in this table of times; measure the table for this model.")
        return self.rest + sum(
            curve.at(counts.get(site, curve.counts[-1])) for curve in self.curves for site in curve.sites
        )

    def unit_cost(self, site: int, count: int) -> float:
        """Seconds that go when one of `count` units at this site does."""
        curve = next((curve for curve in self.curves if site in curve.sites), None)
        return 0.0 if curve is None or count <= curve.counts[0] else curve.at(count) - curve.at(count - 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dense": self.dense}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LatencyTable:
        curves = tuple(
            Curve(one["kind"], one["place"], tuple(one["sites"]), tuple(one["counts"]), tuple(one["seconds"]))
            for one in plain["curves"]
        )
        others = {name: value for name, value in plain.items() if name != "dense"}
        return cls(**{**others, "curves": curves, "unmeasured": tuple(plain["unmeasured"])})


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
    """Measure the table, or read it where the same was measured on this machine before (`fresh` measures anyway).

    Inputs are made up: `batch_size` sequences of `length` tokens, or images or recordings of the size that the model is
    made for; or they are a `batch` of one's own.
    """
    if any(number is not None and number < 1 for number in (batch_size, length, threads, repeats)):
        raise HeadpruneError("batch_size, length, threads and repeats must be at least 1.")
    length = default_tokens(model) if length is None else length
    with using_threads(threads) as used:
        file = _file(model, (batch_size, length, used, repeats, _described(batch)))
        stored = None if fresh else _read(file)
        if stored is not None:
            return stored
        model = materialised(model)
        inputs = made_up(model, batch_size, length) if batch is None else dict(batch)
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
    calls = called(model, inputs, {part.home for part in parts}).calls
    alone: dict[Any, Timed] = {
        (number, count): timed(model, sites, part.home, calls[part.home], part.sites[0], count)
        for number, part in enumerate(parts)
        for count in part.counts
    }
    kinds: list[Kind] = list(dict.fromkeys(sites[part.sites[0]].kind for part in parts))
    wholes = {name: Timed(with_units(model, sites, left), (), inputs) for name, left in _wholes(sites, kinds).items()}
    clock = own_clock(torch.get_num_threads(), next(model.parameters()).device)
    # The shortest time is the one that nothing else on the machine took part in.
    taken = {
        name: min(times)
        for name, times in turns({**alone, **wholes}, repeats, clock=clock, seconds_at_least=SECONDS).items()
    }
    raw = [_curve(sites, part, [taken[number, count] for count in part.counts]) for number, part in enumerate(parts)]
    curves = fitted(raw, kinds, {name: taken[name] for name in wholes})
    reached = {site for part in parts for site in part.sites}
    rest = taken["dense"] - sum(curve.seconds[-1] * len(curve.sites) for curve in curves)
    return max(rest, 0.0), tuple(curves), tuple(site.index for site in sites if site.index not in reached)


def _wholes(sites: Sequence[Site], kinds: Sequence[Kind]) -> dict[Any, dict[int, int]]:
    """The whole models to time, by the units left: dense, a share of all units, and kind after kind taken out."""
    present = [site for site in sites if site.kept]
    found: dict[Any, dict[int, int]] = {"dense": {}}
    for share in SHARES:
        found[share] = {site.index: max(usual(share * site.size / site.group), fewest_of(site)) for site in present}
    fewest: dict[int, int] = {}
    for kind in kinds:
        fewest = {**fewest, **{site.index: fewest_of(site) for site in present if site.kind == kind}}
        found[kind] = fewest
    return found


def _curve(sites: Sequence[Site], part: Sublayer, times: Sequence[float]) -> Curve:
    site, times = sites[part.sites[0]], rising(times)
    seconds = tuple(site.applications * (taken - times[0]) for taken in times)
    return Curve(site.kind, site.place, part.sites, part.counts, seconds)


def fitted(curves: Sequence[Curve], kinds: Sequence[Kind], wholes: Mapping[Any, float]) -> list[Curve]:
    """Curves that add up to what whole models take: alone a layer finds its weights in the cache, in a model it does
    not, and the fewer units, the more that matters."""
    before = wholes["dense"]
    for kind in kinds:
        alone = sum(curve.seconds[-1] * len(curve.sites) for curve in curves if curve.kind == kind)
        scale = _between((before - wholes[kind]) / alone) if alone > 0 else 1.0
        curves = [curve.times([scale] * len(curve.counts)) if curve.kind == kind else curve for curve in curves]
        before = wholes[kind]
    factors = []
    for share in SHARES:
        added = sum(curve.at(curve.nearest(share)) * len(curve.sites) for curve in curves)
        factors.append(_between((wholes[share] - before) / added) if added > 0 else 1.0)
    shares, factors = [0.0, *SHARES, 1.0], [factors[0], *factors, 1.0]
    result = []
    for curve in curves:
        of = [count / curve.counts[-1] if curve.counts[-1] else 1.0 for count in curve.counts]
        result.append(curve.times([straight(shares, factors, share) for share in of]))
    return result


def _between(factor: float) -> float:
    return min(max(factor, LIMITS[0]), LIMITS[1])


def straight(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """The value at a place between known ones, on a straight line."""
    right = bisect.bisect_left(places, place)
    if places[right] == place:
        return values[right]
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] * (1 - share) + values[right] * share


def processor() -> str:
    """The name of the machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _described(batch: Mapping[str, Any] | None) -> Any:
    if batch is None:
        return None
    return sorted((name, list(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor))


def _file(model: PreTrainedModel, asked: Any) -> Path:
    """By all that decides how long it takes: code, shapes, settings, what was asked for, and the machine."""
    kind, first = type(model), next(model.parameters())
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    device = "cpu" if first.device.type == "meta" else str(first.device)
    parts = (FORM, f"{kind.__module__}.{kind.__qualname__}", shapes, model.config.to_json_string(use_diff=False), asked)
    where = (device, str(first.dtype), processor(), torch.__version__, transformers.__version__)
    digest = hashlib.sha256(repr((parts, model.config._attn_implementation, where)).encode()).hexdigest()[:24]
    return cache.folder() / "latency" / f"{kind.__name__}-{digest}.json"


def _read(file: Path) -> LatencyTable | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # a broken file is as good as none
        return LatencyTable.from_json(json.loads(file.read_text()))
    return None


def _write(file: Path, table: LatencyTable) -> None:
    with suppress(OSError):  # a folder that cannot be written to costs time, and nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as kept:
            json.dump(table.to_json(), kept)
        Path(kept.name).replace(file)
