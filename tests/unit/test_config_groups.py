"""Groups of options: each option is declared once, keeps its heading wherever it is used, and parses its text."""

from __future__ import annotations

import inspect
import json
import math
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import typer

from headprune.cli.main import app
from headprune.cli.option_tables import commands_of
from headprune.cli.options import PANELS
from headprune.config import groups, training
from headprune.config.option import Option, OptionGroup, field_of, from_run, only, option, options_of, values_of
from headprune.criteria import make
from headprune.errors import CriterionError, GateError, ScheduleError, TrainingError
from headprune.search.config import Experiment, PruneConfig
from headprune.training.config import TrainConfig
from headprune.training.gate_config import GateConfig

GROUPS = [
    value
    for module in (groups, training)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, OptionGroup) and value is not OptionGroup
]
# A training has batches, a seed and a budget of its own, which are not those of the pruning it follows.
DECLARED_TWICE = {"--batch-size", "--seed", "--keep", "--keep-parameters", "--keep-flops", "--units"}


def test_an_option_is_declared_once() -> None:
    flags = Counter(each.flag for group in GROUPS for each in options_of(group))
    assert {flag for flag, times in flags.items() if times > 1} == DECLARED_TWICE


COMMANDS = commands_of(typer.main.get_command(app))
# A training has a seed, batches and a budget of its own there too.
OF_TRAININGS = {"train", "finetune"}


def declared(verb: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The options of a verb, each with what it shares with those of the same name: its type, also where it is not
    required or can be repeated, its limits, and its panel."""
    programs = {"": app, **{f"{group.name} ": group.typer_instance for group in app.registered_groups}}
    (callback,) = (
        each.callback
        for prefix, program in programs.items()
        for each in program.registered_commands
        if f"{prefix}{each.name or each.callback.__name__}" == verb
    )
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        for about in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(about, typer.models.OptionInfo):
                kind, *_ = typing.get_args(parameter.annotation.__origin__) or (parameter.annotation.__origin__,)
                kind = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
                words = (about.default, *(about.param_decls or ()), f"--{name.replace('_', '-')}")
                flag = next(word for word in words if isinstance(word, str))
                yield flag.split("/")[0], (kind, about.min, about.max, about.rich_help_panel)


def test_two_verbs_have_the_same_option_by_one_name() -> None:
    options: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for verb, command in COMMANDS.items():
        kinds = dict(declared(verb))
        assert kinds.keys() == {parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
        for flag, kind in kinds.items():
            if not (verb in OF_TRAININGS and flag in DECLARED_TWICE):
                options.setdefault(flag, {}).setdefault(kind, []).append(verb)
    assert {flag: kinds for flag, kinds in options.items() if len(kinds) > 1} == {}
    assert options["--calibration-samples"] == {(int, 1, None, "Data"): ["inspect", "prune", "compare"]}


def test_an_option_of_several_verbs_is_in_a_group() -> None:
    """Those of the command line alone, such as --out and --json, are declared in cli/options.py."""
    shared = {"--out", "--config", "--json", "--overwrite", "--plugin", "--figures", "--seeds", "--trials"} | {
        "--scale",
        "--published",
        "--run",
    }
    flags = {each.flag for group in GROUPS for each in options_of(group)} | {"--model"}
    seen = Counter(flag for command in COMMANDS.values() for flag in {p.opts[0] for p in command.params})
    several = {flag for flag, times in seen.items() if times > 1 and flag.startswith("--")}
    assert several - shared <= flags


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_every_option_of_a_verb_has_a_panel(verb: str) -> None:
    options = [parameter for parameter in COMMANDS[verb].params if parameter.opts[0].startswith("--")]
    assert options
    assert [parameter.opts[0] for parameter in options if parameter.rich_help_panel not in PANELS[1:]] == []


def test_every_option_has_a_heading_and_a_sentence() -> None:
    for group in GROUPS:
        for each in options_of(group):
            assert each.panel, each.flag
            assert each.help.endswith((".", ")")), each.flag


@dataclass(frozen=True, kw_only=True)
class Cooking(OptionGroup):
    panel = "Kitchen"

    minutes: int = option(10, "Minutes.", minimum=1)
    shares: tuple[float, ...] | None = option(None, "Shares.", parse=groups.parse_points, flag="--split-by")


@dataclass(frozen=True, kw_only=True)
class Eating(OptionGroup):
    panel = "Table"

    guests: int = option(2, "Guests.")
    minutes: int = field_of(Cooking, "minutes")


def test_a_field_that_is_taken_over_keeps_its_heading() -> None:
    assert [(each.flag, each.panel) for each in options_of(Eating)] == [("--guests", "Table"), ("--minutes", "Kitchen")]
    (minutes,) = only(Eating, "minutes")
    assert (minutes.minimum, minutes.default) == (1, 10)


def test_defaults_of_a_run_stand_in_for_those_of_options() -> None:
    minutes, shares = from_run(Cooking)
    assert (minutes.default, minutes.help_for(None)) == (None, "Minutes. By default that of the run, or 10.")
    assert shares.help_for(None) == "Shares. By default that of the run."


def test_a_verb_may_say_another_help_and_default() -> None:
    (minutes,) = only(Cooking, "minutes", default=None, help="Minutes of the dessert.")
    assert (minutes.help_for(None), minutes.default, minutes.minimum) == ("Minutes of the dessert.", None, 1)


def test_values_are_parsed_under_the_name_of_their_field() -> None:
    assert values_of(Cooking, {"split_by": "0.8,0.5", "other": 1}) == {"shares": (0.8, 0.5)}
    with pytest.raises(ScheduleError, match="or several with commas between them, not 'half'"):
        values_of(Cooking, {"split_by": "half"})


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("36", 36), ("1", 1), ("1.0", 1.0)])
def test_keep_is_a_share_or_a_number(text: str, value: float | int) -> None:
    parsed = groups.parse_keep(text)
    assert (parsed, type(parsed)) == (value, type(value))


# --- numbers that are none ---

NUMBERS = [
    (config, each, error)
    for config, error in ((Experiment, ScheduleError), (TrainConfig, TrainingError), (GateConfig, GateError))
    for each in options_of(config)
    if each.type in (int, float, bool)
]


@pytest.mark.parametrize(
    ("config", "each", "error"), NUMBERS, ids=[f"{config.__name__}-{each.field}" for config, each, _ in NUMBERS]
)
def test_an_option_that_is_a_number_takes_nothing_else(config: type, each: Option, error: type[Exception]) -> None:
    """`every=1.5` removed everything in one step, and rounds=-3 was taken for a number of rounds."""
    wrong = {
        int: [1.5, math.nan, math.inf, "3", [1], True],
        float: [math.nan, math.inf, "0.5", [0.5]],
        bool: ["no", 1.5],
    }[each.type]
    wrong += [] if each.minimum is None else [each.minimum - 1]
    wrong += [True] if each.type is float and each.field not in ("distill", "hidden") else []  # True is a weight of 1
    made = {"keep": 0.5} if config is GateConfig and each.field not in ("l0", "keep_parameters", "keep_flops") else {}
    for value in wrong:
        with pytest.raises(error, match=rf"^{each.field}\b.* not .*\.$"):
            config(**made, **{each.field: value})


def test_numbers_of_numpy_are_numbers() -> None:
    config = PruneConfig(every=numpy.int64(3), max_drop=numpy.float32(0.5))
    assert (config.every, type(config.every)) == (3, int)
    assert (config.max_drop, type(config.max_drop)) == (0.5, float)
    json.dumps(config.settings())


def test_a_speedup_without_end_is_refused() -> None:
    with pytest.raises(ScheduleError, match="speedup must be above 1"):
        PruneConfig(speedup=math.inf)


def test_options_of_criteria_are_finite() -> None:
    for spec in ("hies(epsilon=inf)", "elimination(ridge=inf)", "entropy(epsilon=inf)"):
        with pytest.raises(CriterionError, match="must be a finite number, not"):
            make(spec)
