"""Scores, prunes by gates and evaluates every subject by every criterion; a finished seed of a subject is a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.checkpoint.atomic_files import write_text
from headprune.criteria.scoring import score
from headprune.data import Examples
from headprune.json_forms import differing, other_settings
from headprune.measure.costs import flops
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS, MetricValue
from headprune.papers.hies.plan import ALPHAS, HIES, NAMES, PAPER, Settings, spec_of
from headprune.papers.paper_models import ReproductionError
from headprune.papers.ranks import spearman
from headprune.progress import tracked
from headprune.search.selection import least_left, ranked
from headprune.training.fixed_gates import gated
from headprune.units import Site, resolve

Kept = dict[str, list[int]]
Measured = tuple[MetricValue, MetricValue]  # the metric, and the share of predictions that equal the dense model's
SIZES = (1, 8, 32, 128, 384)  # calibration samples; the last is nearly the whole pool
SHOWN = ("HIS", "AE")  # whose scores a figure shows
METRIC = "accuracy"  # of language models that of the next token


class Part:
    """A dense model and samples to evaluate it on while heads are gated."""

    def __init__(self, model: Any, examples: Examples, batch_size: int) -> None:
        self.model, self.sites = model, resolve(model)
        self.evaluator = Evaluator(examples.batches(batch_size), cache_bytes=0)
        self.dense = self.evaluator(model, self.sites)
        self._known: dict[str, Measured] = {}

    def __call__(self, removed: Sequence[tuple[int, int]]) -> Measured:
        """The model without these heads. Criteria often remove the same ones."""
        key = repr(sorted(removed))
        if key not in self._known:
            gates = torch.ones(len(self.sites), max(site.original for site in self.sites))
            for site, head in removed:
                gates[site, head] = 0
            with gated(self.model, gates, sites=self.sites):
                predictions = self.evaluator(self.model, self.sites)
            self._known[key] = (
                METRICS[METRIC].of(predictions, self.dense),
                METRICS["fidelity"].of(predictions, self.dense),
            )
        return self._known[key]


def removal_order(scores: torch.Tensor, sites: Sequence[Site]) -> list[tuple[tuple[int, int], ...]]:
    """All units that can be removed, least important first over the whole model, as it is scored once."""
    queue: list[tuple[float, int, int, tuple[tuple[int, int], ...]]] = []
    for site in sites:
        if site.obstacle or scores[site.index, list(site.kept)].isnan().any():
            continue
        units = ranked(scores, site)
        # What a site has to keep are its most important units.
        for rank, (value, unit) in enumerate(units[: len(units) - least_left(site, 0)]):
            queue.append((value, site.index, rank, unit))
    return [unit for *_, unit in sorted(queue)]


def removed_at(order: Sequence[tuple[tuple[int, int], ...]], total: int, share: float) -> list[tuple[int, int]]:
    """The heads of as many units as come closest to this share of all."""
    return [head for unit in order[: min(round(share * total), len(order))] for head in unit]


def weighted_area(shares: Sequence[float], values: Sequence[float]) -> float:
    """The mean of a metric over the shares removed, weighted by the share of heads that is left."""
    return math.fsum((1 - share) * value for share, value in zip(shares, values, strict=True)) / math.fsum(
        1 - share for share in shares
    )


def measure_seed(model: Any, pool: Examples, evaluate: Part, settings: Settings, seed: int) -> dict[str, Any]:
    """All cells of one seed, which draws the calibration and the validation samples from the pool."""
    calibration, rest = pool.split(settings.calibration, seed)
    validation = Part(model, rest.sample(settings.validation, seed), settings.batch_size)
    sites = evaluate.sites
    total = sum(len(site.units()) for site in sites)
    alphas = {alpha: spec_of(HIES, seed, alpha) for alpha in ALPHAS}
    every = dict.fromkeys(spec_of(name, seed, alpha) for name in NAMES for alpha in ALPHAS)
    batches = calibration.batches(settings.batch_size)
    scores = score(model, batches, criteria=list(every), progress=False).scores
    areas, curves = {}, {}
    for alpha, spec in tracked(alphas.items(), "choosing alpha", len(alphas), unit="value"):
        order = removal_order(scores[spec], sites)
        curves[alpha] = [validation(removed_at(order, total, share))[0].value for share in settings.shares]
        areas[alpha] = weighted_area(settings.shares, curves[alpha])
    best = max(areas, key=lambda alpha: (areas[alpha], -alpha))
    specs = {name: spec_of(name, seed, best) for name in NAMES}
    cells = []
    for name, spec in tracked(specs.items(), "measuring", len(specs), unit="criterion"):
        order = removal_order(scores[spec], sites)
        for share in settings.shares:
            removed = removed_at(order, total, share)
            cells.append(_cell(name, spec, seed, share, removed, sites, *evaluate(removed)))
    return {
        "seed": seed,
        "alpha": best,
        "areas": {f"{alpha:g}": area for alpha, area in areas.items()},
        "curves": {f"{alpha:g}": curve for alpha, curve in curves.items()},
        "correlations": _correlations({name: scores[spec] for name, spec in specs.items()}),
        "scores": {name: _rounded(scores[specs[name]]) for name in SHOWN},
        "cells": cells,
    }


def measure_sizes(
    model: Any, pool: Examples, evaluate: Part, settings: Settings, seed: int, alpha: float
) -> list[dict[str, Any]]:
    """HIES and HIS with other numbers of calibration samples: the first of an order of the pool by the seed."""
    total = sum(len(site.units()) for site in evaluate.sites)
    rows = []
    for size in tracked(SIZES, "calibration sizes", len(SIZES), unit="size"):
        batches = pool.sample(size, seed).batches(settings.batch_size)
        specs = {name: spec_of(name, seed, alpha) for name in (HIES, "HIS")}
        scores = score(model, batches, criteria=list(specs.values()), progress=False).scores
        for name, spec in specs.items():
            order = removal_order(scores[spec], evaluate.sites)
            values = {f"{share:g}": evaluate(removed_at(order, total, share))[0].value for share in settings.shares}
            rows.append({"criterion": name, "size": size, "metric": values})
    return rows


def flops_left(model: Any, settings: Settings) -> list[float]:
    """The share of the dense model's FLOPs at every share of heads removed, all heads being of one size."""
    share_of_heads = flops(model, resolve(model)).head_share
    return [1 - share * share_of_heads for share in settings.shares]


def _cell(
    name: str,
    spec: str,
    seed: int,
    share: float,
    removed: Sequence[tuple[int, int]],
    sites: Sequence[Site],
    metric: MetricValue,
    stability: MetricValue,
) -> dict[str, Any]:
    gone = set(removed)
    return {
        "criterion": name,
        "spec": spec,
        "seed": seed,
        "share": share,
        "heads_removed": len(removed),
        "metric": metric.value,
        "interval": _ends(metric),
        "stability": stability.value,
        "stability_interval": _ends(stability),
        "kept": {site.path: [head for head in site.kept if (site.index, head) not in gone] for site in sites},
        "per_sample": {"metric": _encode(metric), "stability": _encode(stability)},
    }


def _rounded(scores: torch.Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else float(f"{value:.6g}") for value in row] for row in scores.tolist()]


def _ends(value: MetricValue) -> list[float] | None:
    return None if value.interval is None else list(value.interval)


def _encode(value: MetricValue) -> str | list[float]:
    """Values per sample: a digit each, where they are right or wrong."""
    assert value.per_sample is not None
    values = value.per_sample.tolist()
    if all(each in (0, 1) for each in values):
        return "".join(str(int(each)) for each in values)
    return [round(each, 6) for each in values]


def decode(values: str | Sequence[float]) -> torch.Tensor:
    return torch.tensor([float(each) for each in values], dtype=torch.float64)


def _correlations(scores: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Of the scores of all heads, by ranks (Spearman)."""
    names = [name for name in scores if name != "random"]
    known = torch.stack([~scores[name].isnan() for name in names]).all(0)
    values = {name: scores[name][known].tolist() for name in names}
    return {one: {other: spearman(values[one], values[other]) for other in names} for one in names}


class Study:
    """A reproduction in a directory: a file for every seed of every subject in `cells`, and trained models in
    `models`."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.settings = out, settings

    def file(self, subject: str, seed: int) -> Path:
        return self.out / "cells" / f"{subject}-seed{seed}.json"

    def read(self, subject: str, seed: int) -> dict[str, Any] | None:
        """A finished seed, None where it is missing."""
        path = self.file(subject, seed)
        if not path.is_file():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            recorded, settings = content["settings"], self.header()
            _ = content["result"]["cells"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ReproductionError(f"{path} is damaged; delete it, or choose another directory.") from None
        different = differing(recorded, settings)
        if different:
            raise ReproductionError(
                other_settings(self.out, "reproduction", different, recorded, settings, "or another directory")
            )
        return content

    def header(self) -> dict[str, Any]:
        """The settings that a cell depends on: not the other seeds."""
        return {"paper": PAPER, **{name: v for name, v in self.settings.to_json().items() if name != "seeds"}}

    def write(self, subject: str, seed: int, about: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
        content = {"settings": self.header(), "subject": dict(about), "result": dict(result)}
        path = self.file(subject, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content) + "\n")
        return content

    def run_subject(
        self,
        name: str,
        title: str,
        make: Callable[[Path], tuple[Any, Examples]],
        on_finished: Callable[[int, dict[str, Any]], None],
        *,
        sizes: bool = False,
    ) -> None:
        """Measure the seeds that are missing; the model is made only where there are any. With `sizes`, also with other
        numbers of calibration samples."""
        missing = [seed for seed in self.settings.seeds if self.read(name, seed) is None]
        if not missing:
            return
        model, examples = make(self.out / "models" / name)
        pool, rest = split_pool(examples, self.settings, title)
        evaluate = Part(model, rest, self.settings.batch_size)
        dense = METRICS[METRIC].of(evaluate.dense)
        about = {
            "name": name,
            "title": title,
            "samples": evaluate.dense.samples,
            "heads": sum(site.size for site in evaluate.sites),
            "units": sum(len(site.units()) for site in evaluate.sites),
            "dense": dense.value,
            "dense_interval": _ends(dense),
            "flops_left": flops_left(model, self.settings),
        }
        for seed in missing:
            result = measure_seed(model, pool, evaluate, self.settings, seed)
            if sizes:
                result["sizes"] = measure_sizes(model, pool, evaluate, self.settings, seed, result["alpha"])
            on_finished(seed, self.write(name, seed, about, result))


def split_pool(examples: Examples, settings: Settings, title: str) -> tuple[Examples, Examples]:
    """The samples to calibrate and validate with, and those to evaluate on, the same for every seed."""
    least = settings.calibration + settings.validation
    if len(examples) < 2 * least:
        raise ReproductionError(
            f"{title} has {len(examples):,} samples, but calibration, validation and evaluation need {2 * least:,}; "
            "give more data."
        )
    pool, rest = examples.split(min(settings.pool, len(examples) // 2), seed=0)
    return pool, rest.sample(settings.evaluation, seed=0)
