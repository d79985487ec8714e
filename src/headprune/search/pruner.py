"""The loop that joins them, one step at a time: score, choose, remove, repair, measure."""

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
from headprune.criteria.fitting import asked_sites
from headprune.criteria.scoring import ScoreResult, score
from headprune.criteria.scoring_pass import finite
from headprune.errors import DataError, ReplayError, UnsupportedModelError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.trajectory import Step
from headprune.repair.plan import check_compensation
from headprune.search.config import PruneConfig, config_from
from headprune.search.observers import Callback, Journal, Observer, OnStep
from headprune.search.rescore import AUTO, EVERY
from headprune.search.rounds import InRounds
from headprune.search.step import describe
from headprune.search.stop import THE_END, Decision
from headprune.search.sweep.way import InOneSweep
from headprune.search.ways import Taken, UnitByUnit, Way
from headprune.signals.moments import Moments
from headprune.tasks import Task, rows_of, task_of
from headprune.tasks.checks import checked_batches
from headprune.units import Member, Site, kept_mask, sites_of, survey
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
    """Removes units from a model, in place, one step at a time.

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
        self.model = model
        self.at_point = at_point
        self.config = config or PruneConfig()
        self.calibration = list(checked_batches(batches))
        if not self.calibration:
            raise DataError("There are no calibration batches; give at least one.")
        check_compensation(self.config.compensate, model, published=self.config.method is not None)
        self.observers = list(observers)
        self.known = list(known)
        self.steps: list[Step] = []
        self.metric: Metric | None = None
        self.task: Task = task_of(model, self.config.task)
        self._criterion = self.config.made_criterion
        held_out = None if evaluation is None else list(checked_batches(evaluation))
        if held_out is None and self.config.rescore not in (EVERY, AUTO):
            held_out = self.calibration  # measured apart, as a step that does not score again has no pass to share
        self._evaluator = None if held_out is None else Evaluator(held_out, self.task)
        self._scores: torch.Tensor | None = None  # of the model as it is now, if they are known
        self._result: ScoreResult | None = None  # that they come from, with moments and what they will be
        self._verified_empty = self._stopped = False
        found = survey(model)
        sites = self.sites
        if found.left and "heads" in self.config.kinds:
            said = "; ".join(found.left_whole())
            log.warning("Some attention is left whole, as no head of it can be removed exactly: %s.", said)
        present = [site for site in sites if site.kept and site.kind in self.config.kinds]
        if present and all(site.obstacle for site in present):
            raise UnsupportedModelError(
                f"No {present[0].word} of this model can be removed exactly: at {present[0].path}, "
                f"{present[0].obstacle}."
            )
        ways: dict[str, Callable[[Any], Way]] = {"rounds": InRounds, "sweep": InOneSweep}
        self._way: Way = ways.get(self.config.pace, UnitByUnit)(self)

    # --- going on ---

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.steps:
            return self._start()
        self._stopped = distributed.broadcast(
            self._stopped
        )  # which those who watch decide, and they watch the first process
        if self._stopped or not self._goes_on() or not self._way.goes_on():
            raise StopIteration
        return self._take_step()

    def stop(self) -> None:
        """Take no further step."""
        self._stopped = True

    def reached(self, step: int) -> None:
        """Tell whoever asked for it that the model is at a point of its budget."""
        budget = self.config.budget
        share = self._way.point(step)  # while steps are replayed, `points` does not know them yet
        if budget is not None and len(budget.shares) > 1 and share is not None and self.at_point is not None:
            self.at_point(budget.label(share))

    @property
    def points(self) -> dict[int, str]:
        """Steps that reach a point that was asked for, where several were, by their labels."""
        budget = self.config.budget
        if budget is None or len(budget.shares) < 2:
            return {}
        shares = {step.step: self._way.point(step.step) for step in self.steps}
        last = len(self.steps)
        shares[last] = self._way.point(last)
        return {step: budget.label(share) for step, share in shares.items() if share is not None}

    def decide(self) -> Decision:
        """The step to take, by the rules of the config."""
        assert self.metric is not None
        decision = self.config.stop.decide(self.metric, *self._curve())
        at_the_end = decision.rule == THE_END and not self._way.goes_on()
        return Decision(decision.step, self._way.rule()) if at_the_end and self._way.rule() else decision

    def _curve(self) -> tuple[list[float], list[int], list[torch.Tensor | None]]:
        lefts = [self._way.left(step) for step in self.steps]
        return [s.metric for s in self.steps], lefts, [s.outcomes for s in self.steps]

    def _goes_on(self) -> bool:
        if self.config.explore or self.config.knee:
            return True
        assert self.metric is not None
        return not self.config.stop.reached(self.metric, *self._curve())

    def replay(self, steps: Sequence[Step]) -> None:
        """Take the dense model to where these steps led."""
        self._way.replay(steps)

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
            return self._record(Taken((), None, None, [], 0.0, None), dense, time.perf_counter() - started, measured)
        self._check_start(measured.value)
        self.replay(self.known)
        self.steps = list(self.known)
        for step in self.known:
            for observer in self.observers:
                observer.replayed(step)
        self._scores = self._result = None
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
        taken = self._way.take()
        quality = self._measure(taken.changed)
        seconds = time.perf_counter() - started
        step = self._record(taken, quality, seconds)
        self.reached(step.step)
        return step

    # --- what a way needs ---

    @property
    def sites(self) -> Sequence[Site]:
        """The sites of the model as it is now."""
        return sites_of(self.model, self.config.kinds)

    def verification(self, chosen: Sequence[Member], sites: Sequence[Site]) -> dict[str, Any] | None:
        """Two samples to check masked == removed on: at the first removal, and at the first that empties a site."""
        going = Counter(member.site for member in chosen)
        empties = any(sites[site].size == count for site, count in going.items())
        if len(self.steps) > 1 and (self._verified_empty or not empties):
            return None
        self._verified_empty |= empties
        return self.task.inputs(rows_of(self.calibration[0], slice(0, 2)))

    def current_scores(self) -> torch.Tensor:
        """The scores of the model as it is now."""
        if self._scores is None and self._criterion.gathers:  # which needs no pass beside its own
            sites = asked_sites(self.model, self.config.kinds)
            labels: Any = self.config.labels
            own = self._criterion.from_data(self.model, sites, self.calibration, self.task, labels)
            self._scores = distributed.broadcast(finite(self._criterion, own, kept_mask(sites), sites))
        if self._scores is None:
            batches = self.calibration if self._criterion.requests() else ()  # weights alone need no pass
            return self._know(self._score(batches))
        return self._scores

    @property
    def moments(self) -> dict[int, Moments] | None:
        """Those that the current scores rest on, if they are known."""
        return None if self._result is None else self._result.moments

    def without(self, site: Site, gone: Sequence[int]) -> torch.Tensor | None:
        """Scores of the members of a site that stay when these go as well, if the current scores can tell."""
        repaired = self.config.compensate == "lstsq"
        return None if self._result is None else self._result.without(self.model, site, gone, repaired=repaired)

    def _score(self, batches: Sequence[Mapping[str, Any]]) -> ScoreResult:
        labels: Any = self.config.labels
        kinds = self.config.kinds
        return score(
            self.model,
            batches,
            criterion=self._criterion,
            labels=labels,
            task=self.task,
            units=kinds,
            look_ahead=self.config.pace == "greedy" and self.config.rescore == AUTO,
        )

    def _know(self, result: ScoreResult) -> torch.Tensor:
        self._scores, self._result = result.scores, result
        return result.scores

    def _measure(self, changed: Sequence[int] | None) -> Quality:
        """Evaluate the model; where the calibration data serves for it, its scores come from the same pass."""
        self._scores = self._result = None
        if self._evaluator is not None:
            return self._evaluator(self.model, self.sites, changed)
        result = self._score(self.calibration)
        self._know(result)
        return result.quality

    def _record(
        self,
        taken: Taken,
        quality: Quality,
        seconds: float,
        measured: Measured | None = None,
    ) -> Step:
        assert self.metric is not None
        measured = measured or self.metric.of(quality, self.reference)
        step = describe(self.model, self.config.kinds, len(self.steps), taken, quality, self.reference, measured)
        step = distributed.broadcast(step)  # all processes go on, or stop, by the same numbers
        self.steps.append(step)
        for observer in self.observers:
            observer.step(step, {"seconds": seconds, "scoring": taken.scoring})
        return step


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
    batches (`compensate="lstsq"`), or the output bias takes its mean ("mean"), or nothing does ("none").

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
            steps = pruner.steps[: decision.step + 1]
            pruner.replay(steps)
    except BaseException:
        undo()
        raise
    assert pruner.metric is not None
    mask = kept_mask(pruner.sites)
    points = {step: label for step, label in pruner.points.items() if step < len(pruner.steps)}
    return PruneResult(model, dense, pruner.steps, decision.step, pruner.metric, mask, decision.rule, points)
