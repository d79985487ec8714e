"""The loop of a run: a schedule yields removals, and the pruner applies, repairs, measures and records them."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import DataError, ReplayError
from headprune.hooks.model_lock import exclusive, exclusively
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, MetricValue, choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.trajectory import Step
from headprune.progress import Phase, reporting_to, tracked
from headprune.repair.apply import check_repair
from headprune.search.budget import left_after
from headprune.search.candidates import sites_and_candidates
from headprune.search.check_budget import refuse_unreachable
from headprune.search.check_replayed import check_replay
from headprune.search.config import PruneConfig, config_from
from headprune.search.layerwise.pruning import check_layerwise
from headprune.search.memory import cache_bytes
from headprune.search.observers import Callback, Journal, Observer, OnStep
from headprune.search.progress_bars import PruningBar
from headprune.search.prune_result import PruneResult
from headprune.search.rescore import AUTO, EVERY
from headprune.search.schedules.greedy import Greedy
from headprune.search.schedules.layerwise import Layerwise
from headprune.search.schedules.rounds import Rounds
from headprune.search.schedules.schedule import Removal, Remover, RunState, Schedule
from headprune.search.scorer import Scorer
from headprune.search.step import describe
from headprune.search.stop import THE_END, Decision
from headprune.surgery.check_removable import check_removable
from headprune.tasks import task_of
from headprune.tasks.checks import checked_batches, warn_of_precision
from headprune.units import Member, kept_mask
from headprune.units.dense_model import changed_module
from headprune.units.linear import refuse_inference_weights, refuse_quantized
from headprune.units.slicing.undo import Undo

AtPoint = Callable[[str], None]  # called with the label of a point of a budget when the model has reached it
log = logging.getLogger(__name__)


class Pruner:
    """Removes units from a model, in place, one step at a time: a schedule yields removals, and each is applied,
    repaired, measured and recorded here.

        pruner = Pruner(model, batches, PruneConfig(keep=0.5))
        for step in pruner:
            print(step.heads, step.metric)

    The first step is the dense model, measured. `known` steps of an earlier process are replayed before the first new
    one, and compared with the journal. `stop()` ends the loop after the current step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Iterable[Mapping[str, Any]],
        config: PruneConfig | None = None,
        *,
        evaluation: Iterable[Mapping[str, Any]] | None = None,
        observers: Sequence[Observer] = (),
        known: Sequence[Step] = (),
        at_point: AtPoint | None = None,
    ) -> None:
        self.observers, self.known, self.at_point = list(observers), list(known), at_point
        self.metric: Metric | None = None
        self._verified_empty = self._stopped = False
        with exclusive(model), reporting_to(self._report_phase):
            self._prepare(model, batches, config or PruneConfig(), evaluation)

    def _prepare(
        self,
        model: PreTrainedModel,
        batches: Iterable[Mapping[str, Any]],
        config: PruneConfig,
        evaluation: Iterable[Mapping[str, Any]] | None,
    ) -> None:
        refuse_quantized(model, "pruned")
        refuse_inference_weights(model)
        warn_of_precision(model)
        calibration = list(checked_batches(batches, model))
        if not calibration:
            raise DataError("There are no calibration batches; give at least one.")
        check_repair(config.repair, model, published=config.method is not None)
        task = task_of(model, config.task)
        held_out = None if evaluation is None else list(checked_batches(evaluation, model))
        if held_out is None and config.rescore not in (EVERY, AUTO):
            held_out = calibration  # evaluated separately, as a step that does not score again has no pass to share
        self._evaluator = (
            None if held_out is None else Evaluator(held_out, task, cache_bytes=cache_bytes(config.memory))
        )
        self.config = config
        sites, candidates = sites_and_candidates(model, config, calibration, task)
        if config.schedule == "layerwise":
            check_layerwise(config)  # the rest by layer
        else:
            refuse_unreachable(model, config, candidates.among(sites))
        scorer = Scorer(model, calibration, config, task)
        self.state = RunState(model, config, task, calibration, scorer, sites, candidates, observers=self.observers)

    def record_in(self, run: Journal | None) -> None:
        """Continue after the steps that a run has, and write new ones into it; in a group of processes only the first
        has a run."""
        self.known = distributed.broadcast([] if run is None else list(run.steps))
        if run is not None:
            self.observers.insert(0, run)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Created while the model is dense; for a budget of time this measures a table."""
        schedules: dict[str, Callable[[RunState], Schedule]] = {"rounds": Rounds, "layerwise": Layerwise}
        with reporting_to(self._report_phase):
            return schedules.get(self.config.schedule, Greedy)(self.state)

    @functools.cached_property
    def _removals(self) -> Iterator[Removal]:
        return self.schedule.removals(self.state)

    @functools.cached_property
    def _remover(self) -> Remover:
        return self.schedule.remover()

    # --- the loop ---

    @property
    def steps(self) -> list[Step]:
        """The steps so far; the first is the dense model."""
        return self.state.steps

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        with exclusive(self.state.model), reporting_to(self._report_phase):
            if not self.steps:
                return self._start()
            self._stopped = distributed.broadcast(self._stopped)  # decided by observers, which are in the first process
            if self._stopped or not self._continues():
                raise StopIteration
            return self._take_step()

    def stop(self) -> None:
        """Take no further step."""
        self._stopped = True

    def decide(self) -> Decision:
        """The step of the result, by the rules of the config."""
        assert self.metric is not None
        decision = self.config.stop.decide(self.metric, *self._curve())
        rule = self.schedule.rule(self.state) if decision.rule == THE_END else ""
        return Decision(decision.step, rule) if rule else decision

    def _curve(self) -> tuple[list[float], list[int], list[torch.Tensor | None]]:
        left = [left_after(step, self.schedule.measure) for step in self.steps]
        return [step.metric for step in self.steps], left, [step.per_sample for step in self.steps]

    def _continues(self) -> bool:
        if self.config.explore or self.config.knee:
            return True
        assert self.metric is not None
        return not self.config.stop.reached(self.metric, *self._curve())

    # --- steps ---

    def _start(self) -> Step:
        """Measure the dense model, and replay the steps of an earlier process; returns the last of them."""
        _ = self.schedule  # while the model is dense
        started = time.perf_counter()
        dense = self._measure(None)
        self.metric = choose_metric(self.config.metric, dense)
        self.reference = dense
        metric_value = self.metric.of(dense, dense)
        self.config.stop.check(self.metric, metric_value.value, metric_value.per_sample)
        if not self.known:
            return self._record(Removal(), dense, metric_value, started)
        self._check_start(metric_value.value)
        self.replay(self.known)
        self.state.steps = list(self.known)
        for step in self.known:
            for observer in self.observers:
                observer.replayed(step)
        if self._evaluator is not None:
            self._evaluator.clear_cache()  # of the dense model, since when many units were removed
        elif len(self.known) > 1 and self._continues():
            self._measure(None)  # computes the scores of the current model, which measuring the last step would have
        return self.steps[-1]

    def _check_start(self, value: float) -> None:
        then = self.known[0].metric
        if not (math.isnan(then) and math.isnan(value)) and not math.isclose(then, value, rel_tol=0.01, abs_tol=0.01):
            raise ReplayError(
                f"Step 0 of the journal measured {then:.4g} on the dense model, and it is {value:.4g} now: the model "
                "or the data has changed; use another directory, or --overwrite."
            )

    def _take_step(self) -> Step:
        started = time.perf_counter()
        removal = self._apply(next(self._removals), verify=True)
        stopwatch = self.schedule.stopwatch
        latency = None if stopwatch is None else stopwatch.share(self.state.model, self.state.sites)
        predictions = self._measure(removal.changed)
        assert self.metric is not None
        step = self._record(removal, predictions, self.metric.of(predictions, self.reference), started, latency)
        self._report_point(step.step)
        return step

    def replay(self, steps: Sequence[Step]) -> None:
        """Apply these steps to the dense model, one by one: a repair depends on the model that it is computed for, and
        its errors must be those in the journal."""
        self._remover = self.schedule.remover()
        self.state.refresh()
        with reporting_to(self._report_phase):
            for step in tracked(steps[1:], "repeating known steps", len(steps) - 1, unit="step"):
                check_removable(self.state.sites, step.removed)
                check_replay(step, self._apply(Removal(step.removed), verify=False).repairs)
                self._report_point(step.step)
            if self.schedule.stopwatch is not None and len(steps) > 1:
                self.schedule.stopwatch.share(self.state.model, self.state.sites)  # which corrects its table

    def _apply(self, removal: Removal, *, verify: bool) -> Removal:
        return self._remover.apply(self.state, removal, self._verification(removal.members) if verify else None)

    def _verification(self, chosen: Sequence[Member]) -> dict[str, Any] | None:
        """Two samples on which to check masked == removed: at the first removal, at the first that empties a site, and
        always where modules are not as the class builds them, so that sites may differ."""
        leaving = Counter(member.site for member in chosen)
        empties = any(self.state.sites[site].size == count for site, count in leaving.items())
        known = len(self.steps) > 1 and (self._verified_empty or not empties)
        if known and changed_module(self.state.model) is None:
            return None
        self._verified_empty |= empties
        return self.state.task.inputs(self.state.task.select(self.state.calibration[0], slice(0, 2)))

    def _report_phase(self, phase: Phase) -> None:
        for observer in self.observers:
            observer.phase(phase)

    def _report_point(self, step: int) -> None:
        """Call `at_point` where the model has reached a point of its budget."""
        if step in self.schedule.points and self.at_point is not None:
            self.at_point(self.schedule.points[step])

    def _measure(self, changed: Sequence[int] | None) -> Predictions:
        """Evaluate the model; without evaluation data its scores come from the same pass over the calibration data."""
        if self._evaluator is None:
            return self.state.scorer.measure(self.state.sites)
        return self._evaluator(self.state.model, self.state.sites, changed)

    def _record(
        self,
        removal: Removal,
        predictions: Predictions,
        metric_value: MetricValue,
        started: float,
        latency: float | None = None,
    ) -> Step:
        seconds = time.perf_counter() - started
        state, kinds = self.state, self.config.units
        step = describe(
            state.model,
            state.sites,
            kinds,
            len(self.steps),
            removal,
            predictions,
            self.reference,
            metric_value,
            latency,
        )
        step = distributed.broadcast(step)  # all processes continue or stop by the same numbers
        self.steps.append(step)
        for observer in self.observers:
            observer.step(step, {"seconds": seconds, "scoring": removal.scoring})
        return step


@exclusively
def prune(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    config: PruneConfig | None = None,
    evaluation: Iterable[Mapping[str, Any]] | None = None,
    run: Journal | None = None,
    observers: Sequence[Observer] = (),
    keep_dense: bool = False,
    on_step: OnStep | None = None,
    at_point: AtPoint | None = None,
    progress: bool | None = None,
    **options: Any,
) -> PruneResult:
    """Remove heads, neurons or both from a model, in place, until a stopping rule is met.

    `batches` are calibration data for the scores. `evaluation` batches measure the model after every step; without them
    the calibration batches do, in the pass that computes the scores. `options` are the fields of `PruneConfig`, or come
    as a `config`; others are options of the criterion. Stopping rules: `keep` a share (float) or number (int) of heads;
    `max_drop` at most that much of the metric; `knee` at the knee of the full curve; the first that is met
    counts, and without any the run continues until no head is left. `explore=True` records the curve to the last head.
    Budgets (`keep_parameters`, `keep_flops`, `keep_memory`, `speedup`) are reached in `rounds`, in which heads and
    neurons of all sites compete; with several points, `at_point` is called with the label of each. After every removal
    the output projection of its site is refitted by least squares on the calibration batches (`repair="lstsq"`), or its
    bias takes the mean of what was removed ("mean"), or nothing is changed ("none").

    A `progress` bar with the metric is shown in a terminal and in a notebook; True shows it anywhere, False nowhere.
    Steps are written to a `run`, and those that it has already are replayed. If anything fails, the model is restored.
    In a group of processes (torch.distributed) all of them call this with the same model and batches; they share the
    work, and only the first writes to the `run` and calls observers.
    """
    settings = config_from(options, config)
    main = distributed.is_main()
    with PruningBar(settings, show=progress if main else False) as bar:
        watching = [*observers, *([] if on_step is None else [Callback(on_step)]), bar] if main else [bar]
        pruner = Pruner(
            model, batches, settings, evaluation=evaluation, observers=watching, at_point=at_point if main else None
        )
        pruner.record_in(run if main else None)
        return run_to_end(pruner, keep_dense=keep_dense)


def run_to_end(pruner: Pruner, *, keep_dense: bool = False) -> PruneResult:
    """Take all steps, and leave the model at the step that the rules of the config decide on. If anything fails, the
    model is restored."""
    model = pruner.state.model
    with exclusive(model):
        dense = copy.deepcopy(model) if keep_dense else None
        undo = Undo(model)
        try:
            for _ in pruner:
                pass
            decision = pruner.decide()
            if decision.step < len(pruner.steps) - 1:
                undo()
                pruner.replay(pruner.steps[: decision.step + 1])
        except BaseException:
            undo()
            raise
    assert pruner.metric is not None
    points = {step: label for step, label in pruner.schedule.points.items() if step < len(pruner.steps)}
    return PruneResult(
        model,
        dense,
        pruner.steps,
        decision.step,
        pruner.metric,
        kept_mask(pruner.state.sites),
        decision.rule,
        points,
        pruner.state.candidates.unreached,
    )
