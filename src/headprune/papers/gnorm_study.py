"""Experiments on the claims of arXiv 2602.04491 that run on a small model in minutes, a file per part and resumable.

Greedy against one-shot Gnorm and random removal; its objective and its aggregation, both one-shot, so that nothing but
the score differs; and whether variants of attention entropy keep the order of heads. A greedy run removes EVERY heads
between two scorings. Nothing is repaired.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headprune.checkpoint.atomic_files import write_text
from headprune.criteria.scoring import score
from headprune.data import Examples
from headprune.measure.intervals import interval, paired_difference
from headprune.papers import entropy_variants, langid
from headprune.papers.entropy_variants import EPSILONS, VARIANTS
from headprune.papers.ranks import inversions, kendall, spearman
from headprune.runs.loading import load_run_inputs
from headprune.search.config import Experiment
from headprune.search.pruner import prune
from headprune.surgery.remove_units import remove_units
from headprune.units import resolve

SEEDS = (0, 1, 2)
SAMPLES, BATCH, EVALUATION_BATCH = 64, 32, 64
EVERY = 4  # heads between two scorings of a greedy run; the paper's is 1
POINTS = 4  # equal parts of the curve, each measured on all evaluation samples
BOUND_SAMPLES = 16  # whose attention rows are compared with the bounds one by one

GNORM = ("gnorm", "gnorm(objective=loss)", "gnorm(aggregation=batch)")
CURVES: dict[str, tuple[str, str]] = {  # name -> schedule, criterion
    "greedy": ("greedy", GNORM[0]),
    "one-shot": ("one-shot", GNORM[0]),
    "one-shot-loss": ("one-shot", GNORM[1]),
    "one-shot-batch": ("one-shot", GNORM[2]),
    "random": ("random", ""),
}
# Claim -> the two curves whose areas it compares.
COMPARISONS = {
    "greedy against one-shot": ("greedy", "one-shot"),
    "logit norm against loss": ("one-shot", "one-shot-loss"),
    "per sample against per batch": ("one-shot", "one-shot-batch"),
    "greedy against random": ("greedy", "random"),
    "one-shot against random": ("one-shot", "random"),
}
Head = tuple[int, int]


@dataclass(frozen=True)
class Subject:
    """A classifier with data that scores it and data that measures it."""

    name: str
    model: Any
    calibration: Examples
    evaluation: Examples


def load_subject(name: str, model: Path, calibration: Path, evaluation: Path) -> Subject:
    inputs = load_run_inputs(Experiment(model=str(model), data=str(evaluation)))
    scored = load_run_inputs(Experiment(model=str(model), data=str(calibration)))
    return Subject(name, inputs.model, scored.examples, inputs.examples)


def demo_subject(folder: Path) -> Subject:
    """The demo's language identification, trained here in a minute or two; read from the folder if it is there."""
    data = langid.prepare_data(folder / "data")
    return load_subject("langid", langid.prepare_model(folder / "model", data), data / "train.tsv", data / "dev.tsv")


def study_gnorm(
    subject: Subject,
    out: Path,
    *,
    seeds: Sequence[int] = SEEDS,
    every: int = EVERY,
    curves: Sequence[str] = tuple(CURVES),
) -> dict[str, Any]:
    """Every part that is not in `out` yet, and the summary of all. A seed draws the calibration samples, and the order
    of a random run."""
    batches = subject.evaluation.batches(EVALUATION_BATCH)
    heads = [head for site in resolve(subject.model) for unit in site.units() for head in unit]
    settings = {"samples": SAMPLES, "every": every, "points": POINTS, "evaluation": len(subject.evaluation)}

    def part(name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        file = out / f"{name.replace(' ', '-')}.json"
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["settings"] == settings:
                return content["result"]
        result = make(*arguments)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"settings": settings, "result": result}) + "\n")
        return result

    def curve(name: str, seed: int) -> list[list[int]]:
        order = removal_order(subject, heads, *CURVES[name], seed=seed, every=every)
        counts = [len(heads) * place // POINTS for place in range(1, POINTS)]
        return [outcomes(subject.model, order[:count], batches) for count in counts]

    dense = part("dense", outcomes, subject.model, [], batches)
    empty = part("empty", outcomes, subject.model, heads, batches)
    measured = {name: [[dense, *part(f"{name} {seed}", curve, name, seed), empty] for seed in seeds] for name in curves}
    return {
        "subject": subject.name,
        "heads": len(heads),
        "seeds": list(seeds),
        **settings,
        **summarise(measured),
        "rank_agreement": [part(f"ranks {seed}", rank_agreement, subject, seed) for seed in seeds],
        "entropy": [part(f"entropy {seed}", entropy_order, subject, seed) for seed in seeds],
    }


def removal_order(
    subject: Subject, heads: Sequence[Head], schedule: str, criterion: str, *, seed: int, every: int
) -> list[Head]:
    """All heads in the order of their removal."""
    if schedule == "random":
        return random.Random(seed).sample(list(heads), len(heads))
    model = copy.deepcopy(subject.model)
    batches = subject.calibration.sample(SAMPLES, seed).batches(BATCH)
    if schedule == "one-shot":
        scores = score(model, batches, criterion=criterion, progress=False).scores
        return sorted(heads, key=lambda head: (float(scores[head]), head))
    result = prune(
        model, batches, criterion=criterion, schedule="greedy", rescore="every", repair="none", every=every,
        progress=False,
    )  # fmt: skip
    return [(head.site, head.index) for step in result.trajectory for head in step.removed]


@torch.no_grad()
def outcomes(model: Any, removed: Sequence[Head], batches: Sequence[Mapping[str, torch.Tensor]]) -> list[int]:
    """Per sample whether the model without these heads is right, 1 or 0."""
    smaller = copy.deepcopy(model).eval()
    remove_units(smaller, removed)
    right = [smaller(**batch).logits.argmax(-1) == batch["labels"] for batch in batches]
    return torch.cat(right).int().tolist()


def summarise(curves: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> dict[str, Any]:
    """Accuracies and areas by curve, and differences of areas between curves that are there. `curves` holds outcomes by
    name: [seeds x points x samples], from the dense model to the one without heads, at equal distances.

    The area is the mean over the share of heads removed, by trapezoids. The interval of a difference is of 95 %, paired
    over evaluation samples, each with the mean of its area over the seeds; the differences by seed show how much the
    calibration samples matter.
    """
    areas: dict[str, torch.Tensor] = {}
    by_curve = {}
    for name, values in curves.items():
        table = torch.tensor(values, dtype=torch.float64)
        weights = torch.ones(table.shape[1], dtype=torch.float64)
        weights[[0, -1]] = 0.5
        areas[name] = torch.einsum("spn,p->sn", table, weights / weights.sum())
        accuracy = table.mean(-1)
        by_curve[name] = {
            "accuracy": accuracy.mean(0).tolist(),
            "accuracy_by_seed": accuracy.tolist(),
            "area": float(areas[name].mean()),
            "area_interval": list(interval(areas[name].mean(0))),
            "area_by_seed": areas[name].mean(1).tolist(),
        }
    compared = {}
    for claim, (one, other) in COMPARISONS.items():
        if one not in curves or other not in curves:
            continue
        gap = paired_difference(areas[one].mean(0), areas[other].mean(0))
        by_seed = (areas[one] - areas[other]).mean(1).tolist()
        compared[claim] = {"difference": gap.value, "interval": [gap.low, gap.high], "by_seed": by_seed}
    return {"curves": by_curve, "comparisons": compared}


def rank_agreement(subject: Subject, seed: int) -> dict[str, Any]:
    """How the other two forms of Gnorm rank the heads of the dense model, against its default."""
    batches = subject.calibration.sample(SAMPLES, seed).batches(BATCH)
    default, *others = _values(subject, batches, GNORM)
    return {
        name: {
            "spearman": spearman(default, values),
            "kendall": kendall(default, values),
            "inversions": inversions(default, values),
            "pairs": len(values) * (len(values) - 1) // 2,
        }
        for name, values in zip(GNORM[1:], others, strict=True)
    }


def entropy_order(subject: Subject, seed: int) -> dict[str, Any]:
    """Variants and epsilons of attention entropy against variant A, the bounds, and the underflow of a plain sum."""
    examples = subject.calibration.sample(SAMPLES, seed)
    batches = examples.batches(BATCH)
    forms = {f"{variant}, {epsilon:g}": (variant, epsilon) for variant in VARIANTS for epsilon in EPSILONS}
    named = [f"entropy(variant={variant},epsilon={epsilon:g})" for variant, epsilon in forms.values()]
    plain, *values = _values(subject, batches, ["entropy(variant=A)", *named])
    others = dict(zip(forms, values, strict=True))
    keys = [int(count) for batch in batches for count in batch["attention_mask"].sum(-1)]
    few = examples.sample(BOUND_SAMPLES, seed).batches(BATCH)
    return {
        "order": entropy_variants.order_kept(plain, others, keys),
        "bounds": entropy_variants.bounds_hold(subject.model, few),
        "zeros": entropy_variants.underflow(subject.model, batches),
    }


def _values(subject: Subject, batches: Sequence[Mapping[str, Any]], criteria: Sequence[str]) -> list[list[float]]:
    """The scores of all heads by each criterion, from one pass."""
    by_name = score(subject.model, batches, criteria=list(criteria), progress=False).scores
    return [[float(value) for value in scores[~scores.isnan()]] for scores in by_name.values()]
