"""Options by the names that they had in earlier versions: taken, with one line on stderr that says the new one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from headprune.search.config import current_repair

FLAGS = {"--compensate": "--repair", "--round": "--round-to"}
VALUES = {("--schedule", "sweep"): "layerwise"}


COMPENSATE = "--compensate"


class RenamedOptions(TyperGroup):
    """A program whose verbs take options by their old names too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, current_words(args))


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options of a command and their values, as far as the words alone tell them."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {flag[2:].replace("-", "_"): value for flag, value in itertools.pairwise(split) if flag.startswith("--")}


def current_words(words: Sequence[str]) -> list[str]:
    """The words of a command under the names of today."""
    result: list[str] = []
    told: dict[str, str] = {}
    options = _options(words)
    last = ""
    for word in words:
        flag, equals, value = word.partition("=")
        before = result[-1] if result else ""
        last, after = word, last
        if flag in FLAGS:
            told[flag] = FLAGS[flag]
            value = current_repair(value, options) if flag == COMPENSATE else value
            word = FLAGS[flag] + equals + value
        elif after == COMPENSATE:
            word = current_repair(word, options)
        elif (flag, value) in VALUES:
            told[f"{flag} {value}"] = f"{flag} {VALUES[flag, value]}"
            word = f"{flag}={VALUES[flag, value]}"
        elif (before, word) in VALUES:
            told[f"{before} {word}"] = f"{before} {VALUES[before, word]}"
            word = VALUES[before, word]
        result.append(word)
    for old, new in told.items():
        typer.echo(f"{old} is called {new} now; use that, as the old name will go.", err=True)
    return result
