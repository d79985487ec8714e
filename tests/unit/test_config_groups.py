"""Groups of options: each option is declared once, keeps its heading wherever it is used, and parses its text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from headprune.config import groups, training
from headprune.config.option import OptionGroup, field_of, from_run, only, option, options_of, values_of
from headprune.errors import ScheduleError

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


def test_values_are_parsed_under_the_name_of_their_field() -> None:
    assert values_of(Cooking, {"split_by": "0.8,0.5", "other": 1}) == {"shares": (0.8, 0.5)}
    with pytest.raises(ScheduleError, match="or several with commas between them, not 'half'"):
        values_of(Cooking, {"split_by": "half"})


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("36", 36), ("1", 1), ("1.0", 1.0)])
def test_keep_is_a_share_or_a_number(text: str, value: float | int) -> None:
    parsed = groups.parse_keep(text)
    assert (parsed, type(parsed)) == (value, type(value))
