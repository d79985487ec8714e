"""What a step of a greedy run costs, in dense forwards over the same data, and what `rescore` saves of it.

    python -m benchmarks.greedy_steps [--only step,policies] [--models A,B] [--every N] [--until N] [--note TEXT]
                                      [--out F]

`step` prunes minilm-sst2 to its last head as `headprune prune` does by default, on 128 calibration and 872 evaluation
sentences; dense forwards are timed in between. `policies` prunes the models of benchmarks/benchmark_models.py by
`rescore` "every" and "auto" by turns, unit by unit, and compares the areas of their curves. All times are CPU time of
one thread. Rows are added to those that the file has, so that it tells what a step cost before and after a change.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.benchmark_models import LANGUAGE_MODELS, MAKERS, SHARED, available
from headprune.hooks.outputs import evaluating
from headprune.measure.curves import signed_area
from headprune.runs.experiment import load
from headprune.search.config import Experiment, PruneConfig
from headprune.search.observers import Observer
from headprune.search.pruner import Pruner

OUT = Path("benchmarks/results/greedy_steps.json")
GOAL = 0.5  # dense forwards per step
MOST_AREA = 0.002  # that `auto` may lose
MOST_TIME = 0.5  # of `auto` against `every`
BETWEEN = 2  # batches of dense forwards that are timed between two steps
Row = dict[str, Any]


class Parts(Observer):
    """Seconds that scoring took, as the pruner reports them."""

    def __init__(self) -> None:
        self.scoring = self.all = 0.0

    def step(self, step: Any, seconds: Mapping[str, float]) -> None:
        if step.step:  # the dense model is no step
            self.scoring += seconds["scoring"]
            self.all += seconds["seconds"]

    @property
    def share(self) -> float:
        return round(self.scoring / self.all, 3)


class Dense:
    """The dense model's forward, timed batch by batch whenever there is a turn for it."""

    def __init__(self, model: Any, batches: Sequence[Mapping[str, Any]]) -> None:
        self.model, self.batches = copy.deepcopy(model), list(batches)
        self.times: list[list[float]] = [[] for _ in batches]
        self.next = 0
        self.turn(len(self.batches))
        self.times = [[] for _ in batches]  # the first time round warms up

    def turn(self, count: int) -> None:
        with torch.no_grad(), evaluating(self.model):
            for _ in range(count):
                number, self.next = self.next, (self.next + 1) % len(self.batches)
                inputs = {name: value for name, value in self.batches[number].items() if name != "labels"}
                started = time.process_time()
                self.model(**inputs)
                self.times[number].append(time.process_time() - started)

    @property
    def seconds(self) -> float:
        self.turn(sum(not times for times in self.times))  # a short run has not come round
        return sum(statistics.mean(times) for times in self.times)


def cost_of_a_step(until: int | None) -> Row:
    """CPU seconds of a run, in dense forwards per step."""
    data = SHARED / "data" / "sst2"
    experiment = Experiment(
        model=str(SHARED / "models" / "minilm-sst2"),
        data=str(data / "dev.tsv"),
        calibration=str(data / "train.tsv"),
    )
    inputs, calibration, evaluation = load(experiment)
    assert evaluation is not None
    calibrating, held_out = calibration.batches(experiment.batch_size), evaluation.batches(experiment.batch_size)
    dense, parts = Dense(inputs.model, [*calibrating, *held_out]), Parts()
    pruner = Pruner(inputs.model, calibrating, experiment, evaluation=held_out, observers=[parts])
    next(pruner)  # the dense model
    ours: list[float] = []
    started = time.process_time()
    for step in pruner:
        ours.append(time.process_time() - started)
        dense.turn(BETWEEN)
        log(f"step {step.step}: {step.removed}, {step.metric:.4f}, {ours[-1]:.2f} s")
        if step.step == until:
            break
        started = time.process_time()
    cost = sum(ours) / len(ours) / dense.seconds
    return {
        "dense forwards per step": round(cost, 3),
        "goal": GOAL,
        "met": cost <= GOAL,
        "steps": len(ours),
        "samples": [len(calibration), len(evaluation)],
        "seconds": round(sum(ours), 1),
        "seconds of a dense forward": round(dense.seconds, 3),
        "share of scoring": parts.share,
        "seconds by step": [round(seconds, 2) for seconds in ours],
    }


def policies(name: str, every: int) -> Row:
    """Both settings of `rescore` on the same model and data, their steps by turns."""
    source = MAKERS[name]()
    calibration = source.calibration(0)
    metric = "perplexity" if name in LANGUAGE_MODELS else "accuracy"
    words = ("every", "auto")
    parts = {word: Parts() for word in words}
    pruners = {
        word: Pruner(
            copy.deepcopy(source.model),
            calibration,
            PruneConfig(rescore=word, metric=metric, every=every),
            evaluation=source.evaluation,
            observers=[parts[word]],
        )
        for word in words
    }
    seconds = dict.fromkeys(words, 0.0)
    left = {word: next(pruner).left for word, pruner in pruners.items()}
    while left:
        word = max(left, key=lambda name: left[name])  # the one that is behind, so that both are pruned alike
        started = time.process_time()
        step = next(pruners[word], None)
        if step is None:
            del left[word]
            continue
        seconds[word] += time.process_time() - started
        left[word] = step.left
        log(f"{name}, {word}, step {step.step}, {step.left} left: {step.metric:.4f}, {seconds[word]:.1f} s in all")
    areas = {word: signed_area(pruner.metric, pruner.steps) for word, pruner in pruners.items() if pruner.metric}
    ratio, away = seconds["auto"] / seconds["every"], areas["auto"] - areas["every"]
    return {
        "model": name,
        "units per step": every,
        "steps": {word: len(pruner.steps) - 1 for word, pruner in pruners.items()},
        "metric": metric,
        "areas": {word: round(area, 5) for word, area in areas.items()},
        "difference of areas": round(away, 5),
        "area kept": abs(away) <= MOST_AREA,
        "seconds": {word: round(value, 1) for word, value in seconds.items()},
        "share of scoring": {word: part.share for word, part in parts.items()},
        "time of auto": round(ratio, 3),
        "time halved": ratio <= MOST_TIME,
    }


def log(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="step,policies")
    parser.add_argument("--models", default=",".join(MAKERS), help="of policies")
    parser.add_argument("--every", type=int, default=1, help="units per step of policies")
    parser.add_argument("--until", type=int, help="the last step that is taken by step; all by default")
    parser.add_argument("--note", default="", help="what the rows are of")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    usable = available()
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    jobs: list[tuple[str, str, Any]] = []
    jobs += (
        [("steps", "minilm-sst2", partial(cost_of_a_step, options.until))] if "step" in options.only.split(",") else []
    )
    if "policies" in options.only.split(","):
        jobs += [("policies", name, partial(policies, name, options.every)) for name in options.models.split(",")]
    for kind, name, measure in jobs:
        if name in usable:
            row = {"note": options.note, **measure()}
            record.setdefault(kind, []).append(row)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
