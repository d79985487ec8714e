"""The loop of a run: a schedule yields removals, and the pruner applies, repairs, measures and records them."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import DataError, ReplayError, UnsupportedModelError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.trajectory import Step
from headprune.repair.apply import check_repair
from headprune.search.budget import left_after
from headprune.search.config import PruneConfig, config_from
from headprune.search.memory import cache_bytes
from headprune.search.observers import Callback, Journal, Observer, OnStep
from headprune.search.removers import remover_for
from headprune.search.replay import check_replay
from headprune.search.rescore import AUTO, EVERY
from headprune.search.schedules.greedy import Greedy
from headprune.search.schedules.layerwise import Layerwise
from headprune.search.schedules.rounds import Rounds
from headprune.search.schedules.schedule import Removal, RunState, Schedule
from headprune.search.scorer import Scorer
from headprune.search.step import describe
from headprune.search.stop import THE_END, Decision
from headprune.surgery.check import check_removable
from headprune.tasks import rows_of, task_of
from headprune.tasks.checks import checked_batches, warn_of_precision
from headprune.units import Kind, Member, Site, kept_mask, sites_of, survey
from headprune.units.cutting.undo import Undo
from headprune.units.linear import refuse_quantized

AtPoint = Callable[[str], None]  # told the label of a point of a budget when the model is there
log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class PruneResult:
    """The pruned model (the one that was given), the whole trajectory, and which of its steps the model is at."""

    model: PreTrainedModel
    dense: PreTrainedModel | None
    trajectory: list[Step]
    stopped_at: int
    metric: Metric
    mask: torch.Tensor  # bool [sites x heads], True = kept
    rule: str = ""  # what decided where to stop
    points: Mapping[int, str] = field(
        default_factory=dict
    )  # steps that reach points of a budget, where there are several

    @property
    def result(self) -> Step:
        return self.trajectory[self.stopped_at]

    def __repr__(self) -> str:
        first, last = self.trajectory[0], self.result
        agree = "" if last.agreement is None else f", agreement {last.agreement:.3f}"
        gone = " and ".join(f"{count - last.units[kind]} of {count} {kind}" for kind, count in first.units.items())
        return (
            f"<PruneResult: {gone} removed, {self.metric.name} "
            f"{first.metric:.4g} -> {last.metric:.4g}{agree}, stopped at step {self.stopped_at} of "
            f"{len(self.trajectory) - 1} by {self.rule or 'the end of the curve'}>"
        )


class Pruner:
    """Removes units from a model, in place, one step at a time: a schedule yields what leaves, and each removal is
    applied, repaired, measured and recorded here.

        pruner = Pruner(model, batches, PruneConfig(keep=0.5))
        for step in pruner:
            print(step.heads, step.metric)

    The first step is the dense model, measured. `known` steps of an earlier process are replayed before the first new
    one, and compared with what was written down then. `stop()` ends the loop after the step that runs.
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
        refuse_quantized(model, "pruned")
        warn_of_precision(model)
        self.at_point = at_point
        self.config = config = config or PruneConfig()
        calibration = list(checked_batches(batches))
        if not calibration:
            raise DataError("There are no calibration batches; give at least one.")
        check_repair(config.repair, model, published=config.method is not None)
        self.observers = list(observers)
        self.known = list(known)
        self.metric: Metric | None = None
        task = task_of(model, config.task)
        held_out = None if evaluation is None else list(checked_batches(evaluation))
        if held_out is None and config.rescore not in (EVERY, AUTO):
            held_out = calibration  # measured apart, as a step that does not score again has no pass to share
        self._evaluator = (
            None if held_out is None else Evaluator(held_out, task, cache_bytes=cache_bytes(config.memory))
        )
        self._verified_empty = self._stopped = False
        sites = _prunable_sites(model, config.units)
        self.state = RunState(model, config, task, calibration, Scorer(model, calibration, config, task), sites)
        schedules: dict[str, Callable[[RunState], Schedule]] = {"rounds": Rounds, "layerwise": Layerwise}
        self.schedule: Schedule = schedules.get(config.schedule, Greedy)(self.state)
        self._removals = self.schedule.removals(self.state)
        self._remover = remover_for(config.schedule)

    # --- going on ---

    @property
    def steps(self) -> list[Step]:
        """Those so far; the first is the dense model."""
        return self.state.steps

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.steps:
            return self._start()
        self._stopped = distributed.broadcast(self._stopped)  # which observers decide, who are in the first process
        if self._stopped or not self._goes_on():
            raise StopIteration
        return self._take_step()

    def stop(self) -> None:
        """Take no further step."""
        self._stopped = True

    def decide(self) -> Decision:
        """The step to take, by the rules of the config."""
        assert self.metric is not None
        decision = self.config.stop.decide(self.metric, *self._curve())
        rule = self.schedule.rule(self.state) if decision.rule == THE_END else ""
        return Decision(decision.step, rule) if rule else decision

    def _curve(self) -> tuple[list[float], list[int], list[torch.Tensor | None]]:
        left = [left_after(step, self.schedule.measure) for step in self.steps]
        return [step.metric for step in self.steps], left, [step.outcomes for step in self.steps]

    def _goes_on(self) -> bool:
        if self.config.explore or self.config.knee:
            return True
        assert self.metric is not None
        return not self.config.stop.reached(self.metric, *self._curve())

    # --- steps ---

    def _start(self) -> Step:
        """Measure the dense model, and take over what an earlier process did; returns the last step of that."""
        started = time.perf_counter()
        dense = self._measure(None)
        self.metric = choose_metric(self.config.metric, dense)
        self.reference = dense
        measured = self.metric.of(dense, dense)
        self.config.stop.check(self.metric, measured.value, measured.outcomes)
        if not self.known:
            return self._record(Removal(), dense, measured, started)
        self._check_start(measured.value)
        self.replay(self.known)
        self.state.steps = list(self.known)
        for step in self.known:
            for observer in self.observers:
                observer.replayed(step)
        if self._evaluator is not None:
            self._evaluator.forget()  # it has seen the dense model, and many units are gone since
        elif len(self.known) > 1 and self._goes_on():
            self._measure(None)  # the scores of the model as it is, which the last step's measurement gave
        return self.steps[-1]

    def _check_start(self, value: float) -> None:
        then = self.known[0].metric
        if not (math.isnan(then) and math.isnan(value)) and not math.isclose(then, value, rel_tol=0.01, abs_tol=0.01):
            raise ReplayError(
                f"Step 0 of the journal measured {then:.4g} on the dense model, and it is {value:.4g} now: the model "
                "or the data is another; use another directory, or --overwrite."
            )

    def _take_step(self) -> Step:
        started = time.perf_counter()
        removal = self._apply(next(self._removals), verify=True)
        watch = self.schedule.watch
        latency = None if watch is None else watch.share(self.state.model, self.state.sites)
        quality = self._measure(removal.changed)
        assert self.metric is not None
        step = self._record(removal, quality, self.metric.of(quality, self.reference), started, latency)
        self._tell_point(step.step)
        return step

    def replay(self, steps: Sequence[Step]) -> None:
        """Take the dense model to where these steps led, one by one: a repair depends on the model it was made for, and
        each must do what it did then."""
        self._remover = remover_for(self.config.schedule)
        self._refresh()
        for step in steps[1:]:
            check_removable(self.state.sites, step.removed)
            check_replay(step, self._apply(Removal(step.removed), verify=False).repairs)
            self._tell_point(step.step)
        if self.schedule.watch is not None and len(steps) > 1:
            self.schedule.watch.share(self.state.model, self.state.sites)  # which tells how far its table is off

    def _apply(self, removal: Removal, *, verify: bool) -> Removal:
        applied = self._remover.apply(self.state, removal, self._verification(removal.members) if verify else None)
        self._refresh()
        return applied

    def _refresh(self) -> None:
        """The model has changed: its sites are resolved again, once, and its scores are not known any more."""
        self.state.sites = sites_of(self.state.model, self.config.units)
        self.state.scorer.forget()

    def _verification(self, chosen: Sequence[Member]) -> dict[str, Any] | None:
        """Two samples to check masked == removed on: at the first removal, and at the first that empties a site."""
        going = Counter(member.site for member in chosen)
        empties = any(self.state.sites[site].size == count for site, count in going.items())
        if len(self.steps) > 1 and (self._verified_empty or not empties):
            return None
        self._verified_empty |= empties
        return self.state.task.inputs(rows_of(self.state.calibration[0], slice(0, 2)))

    def _tell_point(self, step: int) -> None:
        """Tell whoever asked for it that the model is at a point of its budget."""
        if step in self.schedule.points and self.at_point is not None:
            self.at_point(self.schedule.points[step])

    def _measure(self, changed: Sequence[int] | None) -> Quality:
        """Evaluate the model; where the calibration data serves for it, its scores come from the same pass."""
        if self._evaluator is None:
            return self.state.scorer.measure(self.state.sites)
        return self._evaluator(self.state.model, self.state.sites, changed)

    def _record(
        self, removal: Removal, quality: Quality, measured: Measured, started: float, latency: float | None = None
    ) -> Step:
        seconds = time.perf_counter() - started
        state, kinds = self.state, self.config.units
        step = describe(
            state.model, state.sites, kinds, len(self.steps), removal, quality, self.reference, measured, latency
        )
        step = distributed.broadcast(step)  # all processes go on, or stop, by the same numbers
        self.steps.append(step)
        for observer in self.observers:
            observer.step(step, {"seconds": seconds, "scoring": removal.scoring})
        return step


def _prunable_sites(model: PreTrainedModel, kinds: Sequence[Kind]) -> Sequence[Site]:
    """The sites of the dense model; refused where no unit of these kinds can be removed."""
    found = survey(model)
    sites = sites_of(model, kinds)
    if found.left and "heads" in kinds:
        reasons = "; ".join(found.left_whole())
        log.warning("Some attention is left whole, as no head of it can be removed exactly: %s.", reasons)
    present = [site for site in sites if site.kept and site.kind in kinds]
    if present and all(site.obstacle for site in present):
        raise UnsupportedModelError(
            f"No {present[0].word} of this model can be removed exactly: at {present[0].path}, {present[0].obstacle}."
        )
    return sites


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
    **options: Any,
) -> PruneResult:
    """Remove heads, neurons or both from a model, in place, until a rule says stop.

    `batches` calibrate the scores. `evaluation` batches measure the model after every step; without them the
    calibration batches do, from the very pass that scores them. `options` are the fields of `PruneConfig`, or come as a
    `config`; others are the criterion's own. Rules: `keep` a share (float) or number (int) of heads; `max_drop` at most
    that much of the metric; `knee` at the inflection point of the full curve; the first that is reached counts, and
    without any the run goes on until no head is left. `explore=True` follows the trajectory to its end all the same.
    Budgets (`keep_parameters`, `keep_flops`, `keep_memory`, `speedup`) are reached in `rounds`, in which heads and
    neurons of all sites compete; of several points, `at_point` is told the label when the model is at one.
    After every removal the heads that stay at its site take over what they can of what left, from the calibration
    batches (`repair="lstsq"`), or the output bias takes its mean ("mean"), or nothing does ("none").

    Steps are written to a `run`, and those that it has already are taken over. If anything goes wrong on the way, the
    model is put back as it was. In a group of processes (torch.distributed) all of them call this with the same model
    and batches; they share the work, and only the first writes to the `run` and calls observers.
    """
    settings = config_from(options, config)
    watching = [*([] if run is None else [run]), *observers, *([] if on_step is None else [Callback(on_step)])]
    known = distributed.broadcast([] if run is None else list(run.steps))
    if not distributed.is_main():
        watching, at_point = [], None
    pruner = Pruner(model, batches, settings, evaluation=evaluation, observers=watching, known=known, at_point=at_point)
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
    mask = kept_mask(pruner.state.sites)
    points = {step: label for step, label in pruner.schedule.points.items() if step < len(pruner.steps)}
    return PruneResult(model, dense, pruner.steps, decision.step, pruner.metric, mask, decision.rule, points)
