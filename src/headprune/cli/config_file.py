"""`--config FILE`: options of a verb from YAML, or from the run.json of an earlier run; the command line has
priority."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.renamed_options import current_options
from headprune.config.groups import DataOptions, EvaluationOptions, ModelOptions
from headprune.config.option import options_of
from headprune.config.option_file import nearest, read_options
from headprune.config.training import TrainingOptions
from headprune.errors import ConfigError
from headprune.training.gate_config import GateConfig

# Verbs that accept the run.json of a run, and the verbs of such a run.
PRUNED, TRAINED, EITHER = ("prune",), ("train",), ("prune", "train")
RUNS_OF = {
    **dict.fromkeys(("inspect", "score", "prune", "compare"), PRUNED),
    **dict.fromkeys(("finetune", "evaluate", "export"), EITHER),
    "train": TRAINED,
}
# Verbs that begin with a run take from another one how data is read and measured. Its model and its data are not
# theirs, and other options of the same name mean something else there, such as the seed of a training.
READING = {
    option.name
    for group in (ModelOptions, DataOptions, EvaluationOptions)
    for option in options_of(group)
    if option.name not in ("model", "data")
}


def config_parameter(verb: str) -> inspect.Parameter:
    """The option `--config` of a verb."""
    run = f", or the run.json of a run of {' or '.join(f'`headprune {maker}`' for maker in RUNS_OF[verb])}"
    about = typer.Option(
        "--config",
        help=f"File with options: YAML with their names{run}. Options on the command line have priority.",
        is_eager=True,  # parsed before the options whose defaults it changes
        callback=read_config,
        rich_help_panel="Options",
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, about]
    )


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a file the defaults of the verb's options."""
    if path is not None:
        context.default_map = config_values(path, context.command)
    return path


def config_values(path: Path, command: Any) -> dict[str, Any]:
    """Parameter -> value as text, as on the command line."""
    verb = command.name
    content = read_options(path, ConfigError, kind="file", example="criterion: his")
    run = isinstance(content.get("settings"), Mapping)
    named = {parameter.opts[0].removeprefix("--").replace("-", "_"): parameter for parameter in command.params}
    parameters = {name: parameter for name, parameter in named.items() if name != "config"}
    if run:
        settings = _settings_of_run(path, content["settings"], verb)
        content = {name: value for name, value in settings.items() if name in parameters}
    content = current_options(verb, content)
    for name in content:
        if name not in parameters:
            raise ConfigError(f"{path} has {name!r}, which is not an option of {verb}; {nearest(name, parameters)}")
    values = {parameters[name].name: _text(path, parameters[name], value) for name, value in content.items()}
    return {name: value for name, value in values.items() if value is not None}


def _text(path: Path, parameter: Any, value: Any) -> Any:
    """A value as on the command line: a text, a list of texts for an option that can be repeated, or a flag; so that
    both are checked in the same way."""
    flag = parameter.opts[0]
    if isinstance(value, bool) != bool(getattr(parameter, "is_flag", False)) and value is not None:
        expected = "true or false" if not isinstance(value, bool) else "a value"
        raise ConfigError(f"{flag} takes {expected}, but {path} has {value!r}.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        raise ConfigError(f"{flag} takes a value, but {path} has a mapping there.")
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    texts = [str(part) for part in (value if isinstance(value, list) else [value])]
    return texts if several else ",".join(texts)


def _settings_of_run(path: Path, settings: Mapping[str, Any], verb: str) -> dict[str, Any]:
    """The settings of a run by the names of their options."""
    from headprune.search.settings import migrated

    maker = "train" if isinstance(settings.get("gates"), Mapping) else "prune"
    if maker not in RUNS_OF[verb]:
        raise ConfigError(f"{path} is of a run of `{maker}`, whose options are not those of {verb}; use a YAML file.")
    if RUNS_OF[verb] == EITHER:
        return {name: value for name, value in migrated(settings).items() if name in READING}
    if maker == "prune":
        return migrated(settings)
    gates, training = settings["gates"], settings.get("training") or {}
    return {
        **settings,
        **{option.name: gates.get(option.field) for option in options_of(GateConfig)},
        **{option.name: training.get(option.field) for option in options_of(TrainingOptions)},
        "data": training.get("data"),
        "eval_data": training.get("evaluation"),
        "finetune_epochs": training.get("finetune_epochs"),
        "gate_rate": training.get("gate_rate"),
    }
