"""The loop that joins them: score, choose, remove, evaluate, write down, again."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.criteria import Criterion, make
from headprune.criteria.scoring import ScoreResult, score
from headprune.errors import DataError, UnsupportedModelError
from headprune.measure.costs import flops, total_parameters
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, MetricFunction, agreement, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.trajectory import Step, removed_until
from headprune.repair.solve import Compensation, Repair, check_compensation
from headprune.runs.journal import Run
from headprune.search.schedule import Schedule, Stop
from headprune.signals.moments import Moments
from headprune.surgery.cut import remove, remove_and_repair
from headprune.task.objectives import Labels, model_inputs
from headprune.units import AttentionSite, resolve
from headprune.units.members import Head, kept_mask

OnStep = Callable[[Step], None]
# What measured best over models of text, images and language together: docs/repair.md.
DEFAULT_CRITERION = "repair"
DEFAULT_COMPENSATION: Compensation = "lstsq"


@dataclass(frozen=True)
class PruneResult:
    """The pruned model (the one that was given), the whole trajectory, and which of its steps the model is at."""

    model: PreTrainedModel
    dense: PreTrainedModel | None
    trajectory: list[Step]
    stopped_at: int
    metric: Metric
    mask: torch.Tensor  # bool [sites x heads], True = kept

    @property
    def result(self) -> Step:
        return self.trajectory[self.stopped_at]


def prune(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    criterion: str | Criterion = DEFAULT_CRITERION,
    compensate: Compensation = DEFAULT_COMPENSATION,
    keep: float | int | None = None,
    max_drop: float | None = None,
    knee: bool = False,
    schedule: str = "greedy",
    every: int = 1,
    min_per_site: int = 0,
    explore: bool = False,
    evaluation: Iterable[Mapping[str, Any]] | None = None,
    metric: str | MetricFunction | None = None,
    labels: Labels = "given",
    run: Run | None = None,
    keep_dense: bool = False,
    on_step: OnStep | None = None,
    **options: Any,
) -> PruneResult:
    """Remove heads from a model, in place, one unit after the other, until a rule says stop.

    `batches` calibrate the scores. `evaluation` batches measure the model after every step; without them the
    calibration batches do, from the very pass that scores them. Rules: `keep` a share (float) or number (int) of heads;
    `max_drop` at most that much of the metric; `knee` at the inflection point of the full curve; none goes on until no
    head is left. `explore=True` follows the trajectory to its end all the same. `options` are the criterion's own.
    After every removal the heads that stay at its site take over what they can of what left, from the calibration
    batches (`compensate="lstsq"`), or the output bias takes its mean ("mean"), or nothing does ("none").
    """
    calibration = list(batches)
    if not calibration:
        raise DataError("There are no calibration batches; give at least one.")
    check_compensation(compensate, model)
    loop = _Loop(
        model=model,
        calibration=calibration,
        evaluation=None if evaluation is None else list(evaluation),
        criterion=make(criterion, **options),
        compensate=compensate,
        schedule=Schedule(schedule, every, min_per_site),
        stop=Stop(keep, max_drop, knee),
        explore=explore or knee,
        metric=metric,
        labels=labels,
        run=run,
        on_step=on_step,
    )
    needs_dense = keep_dense or knee or max_drop is not None or (explore and keep is not None)
    dense = copy.deepcopy(model) if needs_dense else None
    loop.go()
    last = loop.result()
    if last < len(loop.steps) - 1:
        assert dense is not None
        _become(model, replay(copy.deepcopy(dense), loop.steps[: last + 1], calibration, compensate))
    return PruneResult(model, dense, loop.steps, last, loop.metric, kept_mask(resolve(model)))


def replay(
    model: PreTrainedModel,
    steps: Sequence[Step],
    calibration: Sequence[Mapping[str, Any]],
    compensate: Compensation,
) -> PreTrainedModel:
    """Take a dense model, in place, to where these steps led. A repair depends on the model it was made for, so with
    compensation the steps are gone through one by one."""
    if compensate == "none":
        return remove(model, removed_until(steps, len(steps) - 1))
    for step in steps:
        remove(model, step.removed, compensate=compensate, batches=calibration)
    return model


def _become(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let `model`, which its owner holds on to, be what `other` is."""
    model.__dict__.clear()
    model.__dict__.update(other.__dict__)


@dataclass
class _Loop:
    model: PreTrainedModel
    calibration: Sequence[Mapping[str, Any]]
    evaluation: Sequence[Mapping[str, Any]] | None
    criterion: Criterion
    compensate: Compensation
    schedule: Schedule
    stop: Stop
    explore: bool
    metric: Any
    labels: Labels
    run: Run | None
    on_step: OnStep | None

    def __post_init__(self) -> None:
        self.steps: list[Step] = []
        self.scores: torch.Tensor | None = None  # of the model as it is now, if they are known
        self.moments: dict[int, Moments] | None = None  # likewise
        self.evaluator = Evaluator(self.evaluation) if self.evaluation is not None else None
        self.verified_empty = False
        sites = resolve(self.model)
        self.stop.heads_left(sum(site.heads for site in sites))  # refuses a count that is too large
        obstacles = [site for site in sites if site.kept and site.obstacle]
        if obstacles and len(obstacles) == sum(1 for site in sites if site.kept):
            raise UnsupportedModelError(
                f"No head of this model can be removed exactly: at {obstacles[0].path}, {obstacles[0].obstacle}."
            )

    def go(self) -> None:
        started = time.perf_counter()
        dense = self._measure(None)
        self.metric = choose_metric(self.metric, self.model, dense)
        self.reference = dense.predictions
        known = self.run.steps if self.run is not None else []
        if known:
            self.steps = list(known)
            replay(self.model, known, self.calibration, self.compensate)
            self.scores = self.moments = None
            if self.evaluator is not None:
                self.evaluator.forget()  # it has seen the dense model, and many heads are gone since
            for step in known:
                self._tell(step)
            if len(known) > 1 and self.evaluator is None and self._goes_on():
                self._measure(None)  # the scores of the model as it is, which the last step's measurement gave
        else:
            self._record((), None, None, dense, time.perf_counter() - started, 0.0)
        while self._goes_on() and self._next():
            pass

    def result(self) -> int:
        return self.stop.result(self.metric, [s.metric for s in self.steps], [s.heads for s in self.steps])

    def _goes_on(self) -> bool:
        if self.explore:
            return True
        return not self.stop.reached(self.metric, [s.metric for s in self.steps], [s.heads for s in self.steps])

    def _next(self) -> bool:
        """One step; False when no unit may go any more."""
        sites = resolve(self.model)
        if not self.schedule.choose(torch.zeros(kept_mask(sites).shape), sites):
            return False
        started = time.perf_counter()
        scores = self._current_scores()
        scored = time.perf_counter() - started
        left = sum(site.heads for site in sites)
        target = self.stop.heads_left(self.steps[0].heads)
        most = left - target if self.stop.keep is not None and left > target else None
        chosen = self.schedule.choose(scores, sites, most)
        value = float(torch.stack([scores[head.site, head.index] for head in chosen]).mean())
        repairs = remove_and_repair(
            self.model,
            chosen,
            verify=self._verification(chosen, sites),
            compensate=self.compensate,
            batches=self.calibration,
            moments=self.moments,
        )
        quality = self._measure(sorted({head.site for head in chosen}))
        self._record(tuple(chosen), value, scores, quality, time.perf_counter() - started, scored, repairs)
        return True

    def _verification(self, chosen: Sequence[Head], sites: Sequence[AttentionSite]) -> dict[str, Any] | None:
        """Two samples to check masked == removed on: at the first removal, and at the first that empties a site."""
        going = Counter(head.site for head in chosen)
        empties = any(sites[site].heads == count for site, count in going.items())
        if len(self.steps) > 1 and (self.verified_empty or not empties):
            return None
        self.verified_empty |= empties
        few = {k: v[:2] if isinstance(v, torch.Tensor) else v for k, v in self.calibration[0].items()}
        return model_inputs(self.model, few)

    def _current_scores(self) -> torch.Tensor:
        if self.schedule.kind == "one-shot" and len(self.steps) > 1:
            first = self.steps[1].scores
            assert first is not None
            return first.masked_fill(~kept_mask(resolve(self.model)), torch.nan)
        if self.scores is None:
            batches = self.calibration if self.criterion.requests() else ()  # weights alone need no pass
            return self._know(score(self.model, batches, criterion=self.criterion, labels=self.labels))
        return self.scores

    def _know(self, result: ScoreResult) -> torch.Tensor:
        self.scores, self.moments = result.scores, result.moments
        return result.scores

    def _measure(self, changed: Sequence[int] | None) -> Quality:
        """Evaluate the model; where the calibration data serves for it, its scores come from the same pass."""
        self.scores = self.moments = None
        if self.evaluator is not None:
            return self.evaluator(self.model, resolve(self.model), changed)
        result = score(self.model, self.calibration, criterion=self.criterion, labels=self.labels)
        self._know(result)
        assert result.quality is not None
        return result.quality

    def _record(
        self,
        removed: tuple[Head, ...],
        value: float | None,
        scores: torch.Tensor | None,
        quality: Quality,
        seconds: float,
        scoring: float,
        repairs: Sequence[Repair] = (),
    ) -> None:
        sites = resolve(self.model)
        step = Step(
            step=len(self.steps),
            removed=removed,
            score=value,
            metric=self.metric.of(quality),
            agreement=agreement(self.reference, quality.predictions),
            loss=quality.loss,
            heads=sum(site.heads for site in sites),
            applied_heads=sum(site.heads * site.applications for site in sites),
            parameters=total_parameters(self.model),
            flops=flops(self.model, sites).heads,
            compensation=tuple(repair.to_json() for repair in repairs),
            scores=scores,
        )
        if self.run is not None:
            self.run.append(step, {"seconds": seconds, "scoring": scoring})
        self.steps.append(step)
        self._tell(step)

    def _tell(self, step: Step) -> None:
        if self.on_step is not None:
            self.on_step(step)
