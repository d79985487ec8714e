"""One declaration of everything that decides how a model is pruned.

Options of the command line, settings of a run, the command in a report and the keywords of `prune` and `compare` are
all made from the fields here: a new option is a new field, and its use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headprune import defaults
from headprune.errors import ScheduleError, warn_renamed

# The command line reads this file before it knows what it is asked for, so torch is not imported here until a config
# is made.
if TYPE_CHECKING:
    from headprune.measure.metrics import MetricFunction
    from headprune.repair.regression import RepairKind
    from headprune.search.budget import Budget, Measure
    from headprune.search.step_rule import StepRule
    from headprune.search.stop import Stop


BUDGETS: dict[str, Measure] = {
    "keep_parameters": "parameters",
    "keep_flops": "flops",
    "keep_memory": "memory",
    "speedup": "latency",
}


SCHEDULES = ("greedy", "one-shot", "rounds", "layerwise")
WIDTHS = ("global", "uniform", "threshold")


def option(
    default: Any,
    help: str,
    *,
    word: type | None = None,
    minimum: int | None = None,
    parse: Callable[[str], Any] | None = None,
    flag: str | None = None,
    stops: bool = False,
) -> Any:
    """A field that is an option of the command line too.

    `word` is its type there, that of the default if there is one, or text; `parse` makes its value from text; `flag`
    is its name there where that is another; `stops` marks what decides where a trajectory ends but not how it goes,
    so that a run can be taken further with another value.
    """
    kind = word or (str if default is None else type(default))
    about = {"help": help, "word": kind, "minimum": minimum, "parse": parse, "flag": flag, "stops": stops}
    return dataclasses.field(default=default, metadata=about)


def parse_points(text: str) -> tuple[float, ...]:
    """One number, or several with commas between them; what they may be depends on the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"A number such as 0.5, or several with commas between them, is wanted, not {text!r}."
        ) from None


def parse_keep(text: str) -> float | int:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ScheduleError(
            f"--keep takes a share such as 0.5 or a number of heads such as 36, not {text!r}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """How a model is pruned: by what, how far, in which steps, measured by what."""

    # Fields hold what is decided in the end, whatever of it was given; `asked` has what was. None is not given.
    criterion: Any = option(
        None,
        f"Name as in `headprune criteria`; by default {defaults.CRITERION}, for budgets {defaults.BUDGET_CRITERION}.",
    )
    repair: RepairKind = option(
        None,
        "What makes up for removed units: 'lstsq' (those that stay at the site, by least squares to what it gave), "
        "'mean' (its output bias) or 'none'; with budgets also 'dense' (least squares towards the dense model) and "
        f"'scale' (a factor per unit towards it). {defaults.REPAIR} by default, with budgets "
        f"{defaults.BUDGET_REPAIR}, or what the method has.",
    )
    keep: float | int | None = option(
        None, "Stop at this share (0.5) or number (36) of heads left.", parse=parse_keep, stops=True
    )
    max_drop: float | None = option(
        None,
        "The metric may fall at most this far below dense (0.01); perplexity may rise by this share. A drop counts "
        "when it is more than noise.",
        word=float,
        stops=True,
    )
    keep_parameters: Any = option(
        None, "Stop at this share of the model's parameters (0.5), or at each of several (0.8,0.5).", parse=parse_points
    )
    keep_flops: Any = option(None, "The same for FLOPs of a forward pass.", parse=parse_points)
    keep_memory: Any = option(None, "The same for bytes of weights.", parse=parse_points)
    speedup: Any = option(
        None, "Stop when the model is this many times as fast, measured here (2, or 1.5,2,3).", parse=parse_points
    )
    latency_batch: int = option(32, "Sequences at once that a speed-up is measured for.", minimum=1)
    latency_tokens: int | None = option(
        None, "Tokens of each of them; the model's usual length by default.", word=int, minimum=1
    )
    threads: int | None = option(
        None, "Threads that a speed-up is measured for; as many as are used by default.", word=int, minimum=1
    )
    units: Any = option(  # the kinds of units that may go
        None,
        "'heads', 'neurons' of feed-forward layers, or 'heads,neurons', which compete for one budget; heads alone by "
        "default, both where a budget is given and the criterion knows both.",
    )
    method: str | None = option(None, "A published method by its name, as in `headprune methods`.")
    knee: bool = option(False, "Stop at the inflection point of the full curve.", stops=True)
    explore: bool = option(False, "Follow the curve to its end, past the stop.", stops=True)
    schedule: str = option(
        None,
        "'greedy' scores again after every unit, 'one-shot' only once, 'rounds' reaches a budget in a few steps, "
        "'layerwise' layer after layer with one of them in memory; 'rounds' by default where there is a budget or "
        "neurons go, 'greedy' otherwise.",
    )
    rescore: str = option(
        None,
        "How often a greedy run scores again: before 'every' step, before every n-th (4), or 'auto', which takes "
        "several units in a step where scoring in between would hardly choose others; 'auto' by default for this "
        "project's criteria, 'every' for published ones.",
    )
    rounds: int = option(
        None,
        f"Steps in which a budget is reached; {defaults.ROUNDS} by default, or what the method has.",
        word=int,
        minimum=1,
    )
    round_to: int = option(8, "Widths of feed-forward layers are multiples of this, which hardware likes.", minimum=1)
    widths: str = option(
        None,
        "How sites share a budget: 'global' by error for its price, 'uniform' the same share everywhere, 'threshold' "
        f"one score below which units leave; {defaults.WIDTHS} by default, or what the method has.",
    )
    every: int = option(1, "Units to remove per step.", minimum=1)
    min_per_site: int = option(0, "Leave at least this many units at every site.", minimum=0)
    metric: str | MetricFunction | None = option(
        None, "accuracy, f1, matthews, pearson, perplexity, fidelity, ...; the task's usual one by default."
    )
    memory: Any = option(  # bytes
        None,
        "What may be kept between passes over the data, such as 4GB: less takes more passes, with the same results; "
        "5GB by default.",
    )
    labels: str = option("given", "'given' in the data, or 'self' for the model's own predictions.")
    task: str | None = option(None, "What the model predicts, where its class does not say it: see the table of tasks.")

    compensate: InitVar[Any] = None  # what `repair` was called
    asked: ClassVar[Mapping[str, Any]]  # of every config its own: the fields as they were given

    def __post_init__(self, compensate: Any) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in current_names({**given, "compensate": compensate}).items():
            if value is not None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "asked", {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        self._resolve()
        self._check()

    def with_options(self, **changes: Any) -> Self:
        """The same with other options; what was not given is decided anew."""
        return type(self)(**{**self.asked, **changes})

    def _resolve(self) -> None:
        """Decide what was not given: by the method, by the budget, by the criterion."""
        from headprune.criteria import make
        from headprune.criteria.kinds import as_kinds
        from headprune.search import memory
        from headprune.search.budget import points
        from headprune.search.methods import method_named
        from headprune.search.rescore import AUTO, EVERY, check_rescore
        from headprune.search.stop import check_keep

        def decide(name: str, value: Any, *, given: bool = False) -> None:
            if given or getattr(self, name) is None:
                object.__setattr__(self, name, value)

        for name, value in ({} if self.method is None else method_named(self.method).settings()).items():
            decide(name, value)
        decide("keep", check_keep(self.keep), given=True)
        for name in BUDGETS:
            if getattr(self, name) is not None:
                decide(name, points(getattr(self, name), name), given=True)
        budgeted = any(getattr(self, name) is not None for name in BUDGETS)
        if self.schedule == "layerwise":
            criterion = defaults.SWEEP_CRITERION
        elif (budgeted and self.schedule in (None, "rounds")) or "neurons" in (self.units or ()):
            criterion = defaults.BUDGET_CRITERION
        else:
            criterion = defaults.CRITERION
        decide("criterion", make(self.criterion or criterion), given=True)
        both = budgeted and "neurons" in self.criterion.kinds
        decide("units", as_kinds(self.units or ("heads,neurons" if both else "heads")), given=True)
        decide("schedule", "rounds" if budgeted or "neurons" in self.units else "greedy")
        budget = self.schedule in ("rounds", "layerwise")
        decide("repair", defaults.BUDGET_REPAIR if budget else defaults.REPAIR)
        decide("rounds", defaults.ROUNDS)
        decide("memory", memory.DEFAULT if self.memory is None else memory.parse_memory(self.memory), given=True)
        decide("widths", defaults.WIDTHS)
        ours = self.criterion.reference.startswith("this project")
        decide("rescore", AUTO if ours and self._removes_heads_greedily else EVERY)
        decide("rescore", check_rescore(self.rescore), given=True)

    @property
    def _removes_heads_greedily(self) -> bool:
        return self.schedule == "greedy" and self.units == ("heads",)

    def _check(self) -> None:
        from headprune.criteria.kinds import check_kinds
        from headprune.repair.apply import check_repair
        from headprune.repair.regression import BUDGETS_ONLY
        from headprune.search.rescore import EVERY
        from headprune.tasks.checks import check_labels_word

        if self.schedule not in SCHEDULES:
            raise ScheduleError(f"There is no schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}.")
        check_kinds([self.criterion], self.units)
        if check_repair(self.repair) in BUDGETS_ONLY and self.schedule not in ("rounds", "layerwise"):
            raise ScheduleError(
                f"repair={self.repair!r} goes with a budget; give one, such as keep_flops=0.5, or use 'lstsq'."
            )
        check_labels_word(self.labels)
        if self.rescore != EVERY and not self._removes_heads_greedily:
            raise ScheduleError("rescore goes with greedy runs that remove heads; leave it out, or schedule='greedy'.")
        if self.widths not in WIDTHS:
            raise ScheduleError(
                f"There is no way {self.widths!r} to share a budget; choose one of {', '.join(WIDTHS)}."
            )
        _ = self.stop, self.step_rule, self.budget

    @property
    def budget(self) -> Budget | None:
        """What may be left, if it is not a number of units of one kind."""
        from headprune.search.budget import Budget

        asked = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(asked) > 1 or (asked and self.keep is not None):
            first, second = [*asked, "keep"][:2]
            raise ScheduleError(f"One budget at a time: {first} and {second} are both given; leave one of them out.")
        if self.keep is not None and len(self.units) > 1:
            raise ScheduleError(
                "keep counts units of one kind, and heads and neurons go; say how much may be left with "
                "keep_parameters, keep_flops, keep_memory or speedup."
            )
        if not asked:
            return None
        given = getattr(self, asked[0])
        shares = tuple(1 / point for point in given) if asked[0] == "speedup" else given
        return Budget(BUDGETS[asked[0]], shares)

    @property
    def stop(self) -> Stop:
        from headprune.search.stop import Stop

        return Stop(self.keep, self.max_drop, self.knee)

    @property
    def step_rule(self) -> StepRule:
        from headprune.search.step_rule import StepRule

        return StepRule(self.every, self.min_per_site)

    def settings(self) -> dict[str, Any]:
        """Its values in the order of declaration, as JSON can hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["criterion"], values["units"] = str(self.criterion), ",".join(self.units)
        for name in BUDGETS:
            values[name] = None if values[name] is None else list(values[name])
        for name in ("memory", "activations_on_disk"):  # which change nothing in the results, and may change on the way
            values.pop(name, None)
        if callable(self.metric):
            values["metric"] = getattr(self.metric, "__name__", "metric")
        return values


def current_repair(word: str, options: Mapping[str, Any]) -> str:
    """What `compensate` meant: least squares aimed at the dense model where options named a budget, and at what the
    site gave before elsewhere, or by the word `site`."""
    budget = any(options.get(name) is not None for name in (*BUDGETS, "method"))
    budget |= options.get("schedule") in ("rounds", "layerwise", "sweep") or "neurons" in (options.get("units") or ())
    return {"site": "lstsq", "lstsq": "dense" if budget else "lstsq"}.get(word, word)


def current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names that they have now; whoever gives an earlier one is told."""
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
    """A config from keywords; those that are none of its fields are options of the criterion, such as alpha=0.7."""
    from headprune.criteria import make

    options = current_names(options)
    known = {field.name for field in dataclasses.fields(PruneConfig)}
    given = {name: value for name, value in options.items() if name in known}
    base = config or PruneConfig()
    rest = {name: value for name, value in options.items() if name not in known}
    if rest:
        given["criterion"] = make(given.get("criterion") or base.criterion, **rest)
    return base.with_options(**given)


def stop_settings(kind: type[PruneConfig] = PruneConfig) -> list[str]:
    """The names of settings that decide only where a trajectory ends."""
    return [field.name for field in dataclasses.fields(kind) if field.metadata.get("stops")]


@dataclass(frozen=True, kw_only=True)
class Experiment(PruneConfig):
    """Everything that decides what a run does. Two runs with equal experiments give equal trajectories."""

    model: str = option("", "A local folder or a hub name.")
    data: str = option(
        "",
        "csv, tsv, jsonl, json or parquet with a text column (.gz as well); .txt for language models; .npz or a folder "
        "of images; or a data set's name.",
    )
    text_column: str | None = option(None, "Column with the text; found by its usual names.")
    pair_column: str | None = option(None, "Column with the second text of a pair.")
    label_column: str | None = option(None, "Column with the label; found by its usual names.")
    context_column: str | None = option(None, "Column with the text that answers a question; found by its usual names.")
    choices_column: str | None = option(None, "Column with the list of choices; found by its usual names.")
    split: str | None = option(None, "Split of a data set, or of an .npz with x_SPLIT and y_SPLIT.")
    vocabulary: tuple[str, ...] | None = option(
        None,
        "Keep only tokens that occur in these texts (.txt, or a table as for --data; give it once per file), in --data "
        "and in --calibration, and the special ones.",
        word=list[str],
    )
    calibration: str | None = option(None, "Data to score and repair on, apart from --data, which then evaluates.")
    calibration_samples: int = option(128, "Samples to score and repair on.", minimum=1)
    evaluation_samples: int | None = option(None, "Samples to evaluate on; all others by default.", word=int, minimum=1)
    same_data: bool = option(False, "Score, repair and evaluate on the same samples.")
    seed: int = option(0, "Seed of drawn samples and hidden tokens; in compare, of random too.")
    batch_size: int = option(32, "Samples per batch.", minimum=1)
    max_length: int = option(128, "Longer texts are cut to this many tokens.", minimum=2)
    processor: str | None = option(None, "Where the tokenizer or image processor is, if not with the model.")
    activations_on_disk: bool = option(
        False, "In a sweep, keep what goes from layer to layer in files instead of in memory."
    )
    dtype: str = option("float32", "Precision to compute in: float32, bfloat16 or float16.")
    device: str = option(
        "auto", "Where to compute: cpu, cuda, cuda:1, mps; 'auto' takes a CUDA device if there is one."
    )

    def __post_init__(self, compensate: Any) -> None:
        super().__post_init__(compensate)
        if self.activations_on_disk and self.schedule != "layerwise":
            raise ScheduleError("--activations-on-disk is for --schedule layerwise; leave it out.")
        files = [self.vocabulary] if isinstance(self.vocabulary, str) else self.vocabulary
        object.__setattr__(self, "vocabulary", tuple(files) if files else None)


# Where a verb has other defaults than experiments: published methods are compared as published, in the same steps.
VERB_DEFAULTS: dict[str, dict[str, Any]] = {"compare": {"repair": "none", "rescore": "every"}}
