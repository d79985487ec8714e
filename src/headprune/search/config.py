"""The options of pruning (PruneConfig), and those of a run with its model and data (Experiment).

Both are composed of the groups of options in `headprune.config`; the command line, the settings of a run, the command
in a report and the keywords of `prune` and `compare` are made from the same fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headprune import defaults
from headprune.config.groups import (
    BUDGETS,
    BudgetOptions,
    CalibrationOptions,
    ComputeOptions,
    CriterionOptions,
    DataOptions,
    EvaluationOptions,
    LatencyOptions,
    MemoryOptions,
    ModelOptions,
    PruningOptions,
    ScoringOptions,
    StopOptions,
    VocabularyOptions,
)
from headprune.config.option import check_numbers, field_of
from headprune.errors import CriterionError, ScheduleError, warn_renamed

# The command line imports this file for every command, so torch is not imported here until a config is created.
if TYPE_CHECKING:
    from typing import Self  # which Python 3.10 does not have

    from headprune.measure.metrics import MetricFunction
    from headprune.search.budget import Budget
    from headprune.search.step_rule import StepRule
    from headprune.search.stop import Stop


SCHEDULES = ("greedy", "one-shot", "rounds", "layerwise")
WIDTHS = ("global", "uniform", "threshold")
NO_SETTINGS = ("memory", "activations_on_disk")  # do not change results, so a run may be resumed with others


@dataclass(frozen=True, kw_only=True)
class PruneConfig(LatencyOptions, BudgetOptions, StopOptions, PruningOptions, ScoringOptions, CriterionOptions):
    """The options of pruning: criterion, budget, steps and metric."""

    # Fields hold resolved values; `explicit` has the values that were passed, None where none was.
    metric: str | MetricFunction | None = field_of(EvaluationOptions, "metric")
    memory: Any = field_of(MemoryOptions, "memory")  # bytes
    task: str | None = field_of(ModelOptions, "task")

    compensate: InitVar[Any] = None  # the former name of `repair`
    explicit: ClassVar[Mapping[str, Any]]  # per instance: the fields as they were passed

    def __post_init__(self, compensate: Any) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in current_names({**values, "compensate": compensate}).items():
            if value is not None:
                object.__setattr__(self, name, value)
        check_numbers(self)
        object.__setattr__(
            self, "explicit", {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        )
        self._resolve()
        self._check()

    def with_options(self, **changes: Any) -> Self:
        """The same with other options; values that were not passed are resolved again."""
        return type(self)(**{**self.explicit, **changes})

    def _resolve(self) -> None:
        """Resolve values that were not passed: by the method, by the budget, by the criterion."""
        from headprune.criteria import make
        from headprune.criteria.kinds import as_kinds
        from headprune.search import memory
        from headprune.search.budget import points
        from headprune.search.methods import method_named
        from headprune.search.rescore import AUTO, EVERY, check_rescore
        from headprune.search.stop import check_keep

        def resolve(name: str, value: Any, *, always: bool = False) -> None:
            if always or getattr(self, name) is None:
                object.__setattr__(self, name, value)

        for name, value in ({} if self.method is None else method_named(self.method).settings()).items():
            resolve(name, value)
        resolve("keep", check_keep(self.keep), always=True)
        for name in BUDGETS:
            if getattr(self, name) is not None:
                resolve(name, points(getattr(self, name), name), always=True)
        budgeted = any(getattr(self, name) is not None for name in BUDGETS)
        if self.schedule == "layerwise":
            criterion = defaults.LAYERWISE_CRITERION
        elif (budgeted and self.schedule in (None, "rounds")) or "neurons" in (self.units or ()):
            criterion = defaults.BUDGET_CRITERION
        else:
            criterion = defaults.CRITERION
        resolve("criterion", make(self.criterion or criterion), always=True)
        both = budgeted and "neurons" in self.criterion.kinds
        resolve("units", as_kinds(self.units or ("heads,neurons" if both else "heads")), always=True)
        resolve("sites", _site_numbers(self.sites), always=True)
        resolve("schedule", "rounds" if budgeted or "neurons" in self.units else "greedy")
        budget = self.schedule in ("rounds", "layerwise")
        resolve("repair", defaults.BUDGET_REPAIR if budget else defaults.REPAIR)
        resolve("rounds", defaults.ROUNDS)
        resolve("memory", memory.DEFAULT if self.memory is None else memory.parse_memory(self.memory), always=True)
        resolve("widths", defaults.WIDTHS)
        ours = self.criterion.reference.startswith("this project")
        resolve("rescore", AUTO if ours and self._removes_heads_greedily else EVERY)
        resolve("rescore", check_rescore(self.rescore), always=True)

    @property
    def _removes_heads_greedily(self) -> bool:
        return self.schedule == "greedy" and self.units == ("heads",)

    def _check(self) -> None:
        from headprune.criteria.kinds import check_kinds
        from headprune.repair.apply import check_repair
        from headprune.repair.regression import BUDGETS_ONLY
        from headprune.search.rescore import EVERY
        from headprune.tasks.checks import check_labels_word

        check_schedule(self.schedule)
        check_kinds([self.criterion], self.units)
        if check_repair(self.repair) in BUDGETS_ONLY and self.schedule not in ("rounds", "layerwise"):
            raise ScheduleError(
                f"repair={self.repair!r} goes with a budget; give one, such as keep_flops=0.5, or use 'lstsq'."
            )
        check_labels_word(self.labels)
        if self.rescore != EVERY and not self._removes_heads_greedily:
            raise ScheduleError("rescore goes with greedy runs that remove heads; leave it out, or schedule='greedy'.")
        if self.widths not in WIDTHS:
            raise ScheduleError(f"There is no allocation widths={self.widths!r}; choose one of {', '.join(WIDTHS)}.")
        _ = self.stop, self.step_rule
        if self.budget is not None and self.schedule not in ("rounds", "layerwise"):
            raise ScheduleError(
                f"The schedule {self.schedule} counts heads, and does not stop at a share of parameters, FLOPs, memory "
                "or time; leave the schedule out, or give keep instead of the budget."
            )

    @property
    def budget(self) -> Budget | None:
        """The budget, if there is one that is not a number of units of one kind."""
        from headprune.search.budget import Budget

        names = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(names) > 1 or (names and self.keep is not None):
            first, second = [*names, "keep"][:2]
            raise ScheduleError(f"One budget at a time: {first} and {second} are both given; leave one of them out.")
        if self.keep is not None and len(self.units) > 1:
            raise ScheduleError(
                "keep counts units of one kind, but heads and neurons are pruned; set a budget with "
                "keep_parameters, keep_flops, keep_memory or speedup."
            )
        if not names:
            return None
        shares_or_speedups = getattr(self, names[0])
        shares = tuple(1 / point for point in shares_or_speedups) if names[0] == "speedup" else shares_or_speedups
        return Budget(BUDGETS[names[0]], shares)

    @property
    def stop(self) -> Stop:
        from headprune.search.stop import Stop

        return Stop(self.keep, self.max_drop, self.knee)

    @property
    def step_rule(self) -> StepRule:
        from headprune.search.step_rule import StepRule

        return StepRule(self.every, self.min_per_site)

    def settings(self) -> dict[str, Any]:
        """Its values in the order of declaration, for JSON."""
        from headprune.units.slicing.record import to_ranges

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["criterion"], values["units"] = str(self.criterion), ",".join(self.units)
        if self.criterion.revision > 1:
            values["criterion_revision"] = self.criterion.revision
        values["sites"] = None if self.sites is None else to_ranges(self.sites)
        for name in BUDGETS:
            values[name] = None if values[name] is None else list(values[name])
        for name in NO_SETTINGS:
            values.pop(name, None)
        if callable(self.metric):
            values["metric"] = getattr(self.metric, "__name__", "metric")
        return values


def check_schedule(word: str) -> str:
    if word not in SCHEDULES:
        raise ScheduleError(f"There is no schedule {word!r}; choose one of {', '.join(SCHEDULES)}.")
    return word


def _site_numbers(sites: Any) -> tuple[int, ...] | None:
    """The numbers of sites, from a text such as "0-11,24" or a list of them."""
    from headprune.units.slicing.record import from_ranges

    if sites is None:
        return None
    try:
        numbers = sorted({operator.index(number) for number in from_ranges(sites)})
    except (TypeError, ValueError):
        numbers = []
    if not numbers or numbers[0] < 0:
        raise ScheduleError(f"sites takes numbers of sites, such as '0-11,24' or [0, 1], not {sites!r:.60}.")
    return tuple(numbers)


def current_repair(word: str, options: Mapping[str, Any]) -> str:
    """The repair that a value of `compensate` meant: least squares towards the dense model where options have a budget,
    and towards the outputs of the site before the removal elsewhere, or for `site`."""
    budget = any(options.get(name) is not None for name in (*BUDGETS, "method"))
    budget |= options.get("schedule") in ("rounds", "layerwise", "sweep") or "neurons" in (options.get("units") or ())
    return {"site": "lstsq", "lstsq": "dense" if budget else "lstsq"}.get(word, word)


def current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their current names, with a warning for each former one."""
    result = dict(options)
    if "compensate" in result:
        value = result.pop("compensate")
        if value is not None:
            warn_renamed("compensate", "repair")
            result["repair"] = current_repair(value, result)
    if result.get("schedule") == "sweep":
        warn_renamed("schedule 'sweep'", "'layerwise'")
        result["schedule"] = "layerwise"
    return result


def config_from(options: Mapping[str, Any], config: PruneConfig | None = None) -> PruneConfig:
    """A config from keywords; those that are not its fields are options of the criterion, such as alpha=0.7."""
    from headprune.criteria import make

    options = current_names(options)
    known = {field.name for field in dataclasses.fields(PruneConfig)}
    fields = {name: value for name, value in options.items() if name in known}
    base = config or PruneConfig()
    rest = {name: value for name, value in options.items() if name not in known}
    if rest:
        spec = fields.get("criterion") or base.criterion
        try:
            fields["criterion"] = make(spec, **rest)
        except CriterionError:
            takes = {field.name for field in dataclasses.fields(make(spec))}  # type: ignore[arg-type]  # registered so
            misspelt = {n: difflib.get_close_matches(n, known, n=1, cutoff=0.8) for n in rest if n not in takes}
            for name, near in misspelt.items():
                if near:
                    raise CriterionError(f"There is no option {name!r}; did you mean {near[0]!r}?") from None
            raise
    return base.with_options(**fields)


def stop_settings() -> list[str]:
    """The names of settings that decide only where a trajectory ends."""
    return [field.name for field in dataclasses.fields(StopOptions)]


@dataclass(frozen=True, kw_only=True)
class InputConfig(ComputeOptions, CalibrationOptions, VocabularyOptions, DataOptions, ModelOptions):
    """A model, its data and the device: what a verb needs that does not prune."""


@dataclass(frozen=True, kw_only=True)
class Experiment(MemoryOptions, EvaluationOptions, InputConfig, PruneConfig):
    """All settings of a run. Two runs with equal experiments have equal trajectories."""

    vocabulary: tuple[str, ...] | None = field_of(VocabularyOptions, "vocabulary")

    def __post_init__(self, compensate: Any) -> None:
        super().__post_init__(compensate)
        if self.activations_on_disk and self.schedule != "layerwise":
            raise ScheduleError("--activations-on-disk is for --schedule layerwise; leave it out.")
        files = [self.vocabulary] if isinstance(self.vocabulary, str) else self.vocabulary
        object.__setattr__(self, "vocabulary", tuple(files) if files else None)

    @property
    def scored_samples(self) -> int | None:
        """How many of the calibration samples its criterion scores, where the criterion decides: the user named no
        number, and no repair needs the others."""
        decides = self.calibration_samples is None and self.repair == "none" and not self.same_data
        return self.criterion.calibration_samples if decides else None

    def settings(self) -> dict[str, Any]:
        own = {} if self.scored_samples is None else {"scored_samples": self.scored_samples}
        return {**super().settings(), **own}
