"""Former names of options: accepted, with one line on stderr that names the new one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from headprune.search.config import current_repair

COMPENSATE = "--compensate"
# Former name -> new one: of all verbs that have the new one, and of one verb, where others still use the name.
FLAGS = {COMPENSATE: "--repair", "--round": "--round-to", "--evaluations": "--evals-per-epoch", "--sweep": "--study"}
FLAGS_OF_VERB = {
    "finetune": {"--rounds": "--cycles"},
    "train": {"--evaluation": "--eval-data"},
    "reproduce": {"--seed": "--seeds"},
}
VALUES = {("--schedule", "sweep"): "layerwise", ("--alpha", "sweep"): "auto"}


class RenamedOptions(TyperGroup):
    """A program whose verbs accept options by their former names too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, current_words(args))


def current_words(words: Sequence[str]) -> list[str]:
    """A command with current names of options."""
    verb = next((word for word in words if not word.startswith("-")), "")
    options = _options(words)
    renamed: dict[str, str] = {}
    result: list[str] = []
    for before, word in itertools.pairwise(["", *words]):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag, value = _current(verb, flag, value, options, renamed)
            result.append(f"{flag}{equals}{value}")
        else:
            result.append(_current(verb, before, word, options, renamed)[1])
    _warn(renamed)
    return result


def current_options(verb: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file, by names with underscores, under their current names."""
    renamed: dict[str, str] = {}
    result = {}
    for name, value in options.items():
        flag, value = _current(verb, f"--{name.replace('_', '-')}", value, options, renamed)
        result[flag[2:].replace("-", "_")] = value
    _warn(renamed)
    return result


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options of a command and their values, without knowing which take one."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {flag[2:].replace("-", "_"): value for flag, value in itertools.pairwise(split) if flag.startswith("--")}


def _current(verb: str, flag: str, value: Any, options: Mapping[str, Any], renamed: dict[str, str]) -> tuple[str, Any]:
    """An option and its value under their current names; changes are added to `renamed`."""
    new = FLAGS_OF_VERB.get(verb, {}).get(flag) or FLAGS.get(flag, flag)
    if new != flag:
        renamed[flag] = new
    if flag == COMPENSATE and isinstance(value, str):
        return new, current_repair(value, options)
    if isinstance(value, str) and (new, value) in VALUES:
        renamed[f"{new} {value}"] = f"{new} {VALUES[new, value]}"
        return new, VALUES[new, value]
    return new, value


def _warn(renamed: Mapping[str, str]) -> None:
    for old, new in renamed.items():
        typer.echo(f"{old} is called {new} now; use that, as the old name will go.", err=True)
