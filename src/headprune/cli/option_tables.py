"""Generates the tables of options in the documentation.

`python -m headprune.cli.option_tables docs` updates those in docs/cli.md and docs/runs.md. Each is between two
comments, `<!-- options of prune -->` and `<!-- end -->`; the text around them is not generated.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import typer

from headprune.cli.main import app
from headprune.config.option import options_of
from headprune.search.config import NO_SETTINGS, Experiment

OPTIONS = re.compile(r"(<!-- options of ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SETTINGS = re.compile(r"(<!-- settings -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("| option | default | meaning |", "|---|---|---|")
# Pages with more about an option.
PAGES = {
    "--data": "data.md",
    "--criterion": "criteria/index.md",
    "--method": "methods/index.md",
    "--repair": "repair.md",
    "--schedule": "pruning.md",
    "--rescore": "pruning.md",
    "--metric": "pruning.md",
    "--max-drop": "pruning.md",
    "--knee": "pruning.md",
    "--keep-parameters": "budgets.md",
    "--speedup": "latency.md",
    "--vocabulary": "vocabulary.md",
    "--activations-on-disk": "layerwise.md",
    "--study": "studies.md",
    "--on": "studies.md",
    "--distill": "recovery.md",
    "--l0": "gates.md",
    "--to": "export.md",
    "--plan": "scale.md",
    "--latency": "latency.md",
}


def with_tables(text: str) -> str:
    """A page with its tables updated."""
    program: Any = typer.main.get_command(app)
    commands = {"headprune": program, **commands_of(program)}

    def options(block: re.Match[str]) -> str:
        return f"{block[1]}\n{options_table(commands[block[2]])}\n\n{block[3]}"

    text = OPTIONS.sub(options, text)
    return SETTINGS.sub(lambda block: f"{block[1]}\n{settings_table()}\n\n{block[2]}", text)


def commands_of(program: Any) -> dict[str, Any]:
    """Every command by its words: "prune", "reproduce hies"."""
    commands: dict[str, Any] = {}
    for name, command in program.commands.items():
        if hasattr(command, "commands"):
            commands |= {f"{name} {rest}": each for rest, each in commands_of(command).items()}
        else:
            commands[name] = command
    return commands


def options_table(command: Any) -> str:
    """The options of a verb, by the panels of its help."""
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.opts[0].startswith("--"):
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    tables = ("\n".join([f"**{panel}**", "", *HEAD, *map(_row, options)]) for panel, options in panels.items())
    return "\n\n".join(tables)


def settings_table() -> str:
    """The settings of a run of `prune` in run.json."""
    rows = (
        f"| `{option.field}` | {_markdown(option.help_for(option.default))} |"
        for option in options_of(Experiment)
        if option.field not in NO_SETTINGS
    )
    return "\n".join(("| key | meaning |", "|---|---|", *rows))


def _row(parameter: Any) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    return f"| {flags} | {_default(parameter)} | {_markdown(parameter.help or '')}{_link(parameter.opts[0])} |"


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if default is None or default is False:
        return "none" if default is None else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _link(flag: str) -> str:
    page = PAGES.get(flag)
    return "" if page is None else f" [More]({page})"


def _markdown(text: str) -> str:
    """Text with quoted words and flags as code."""
    pattern = r"`[^`]*`|(?<!\w)'([^']+)'(?!\w)|(?<![\w-])--[a-z][a-z0-9-]*"
    return re.sub(pattern, lambda word: f"`{(word[1] or word[0]).strip('`')}`", text).replace("|", "\\|")


def main(folder: Path) -> None:
    for name in ("cli.md", "runs.md"):
        page = folder / name
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
