"""Options and helpers of all verbs: options are created from the groups that declare them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli.config_file import config_parameter
from headprune.config.groups import ModelOptions
from headprune.config.option import Groups, Option, only, options_of
from headprune.errors import HeadpruneError

OPTIONS, OUTPUT = "Options", "Output"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=only(ModelOptions, "model")[0].help)]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="Python file or module to import first, which may register criteria and families; repeatable.",
        rich_help_panel="Model",
    ),
]
RunFolder = Annotated[
    Path, typer.Option(help="Directory of the run; an interrupted run is resumed.", rich_help_panel=OUTPUT)
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Start again, and replace what headprune wrote there before.", rich_help_panel=OUTPUT
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(help="Seeds, separated by commas, each with its own runs.", rich_help_panel="Compute"),
]
COMPUTE = "Compute"
Published = Annotated[
    Path | None, typer.Option(help="Folder with the authors' result files of Greedy-Gnorm.", rich_help_panel="Data")
]
Trials = Annotated[
    int | None,
    typer.Option(min=1, help="Runs of 'random', with different seeds.", rich_help_panel="Criteria"),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.", rich_help_panel=OUTPUT)]

FILE_FROM = 10  # a verb with more options has --config


def with_options(
    *groups: Groups, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of these groups, with these `defaults`; it gets their values as one keyword, `options`,
    by name. An option of a later group replaces one of the same name, and a parameter of the verb replaces both."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        direct = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
        replaced = {parameter.name for parameter in direct}
        by_name = {option.name: option for group in groups for option in options_of(group)}
        shared = [option for name, option in by_name.items() if name not in replaced]
        created = [_parameter(option, (defaults or {}).get(option.name, option.default)) for option in shared]
        from_file = [config_parameter(verb.__name__)] if len(direct) + len(created) > FILE_FROM else []

        def call(**values: Any) -> None:
            values.pop("config", None)  # read already
            options = {option.name: values.pop(option.name) for option in shared}
            verb(**values, **({"options": options} if "options" in signature.parameters else {}))

        parameters = [*direct, *created, *from_file]
        parameters.sort(key=_panel_index)
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__name__, call.__doc__ = verb.__name__, verb.__doc__
        return call

    return decorate


# The panels of the help from top to bottom; arguments, which have none, come first.
PANELS = (
    *("", OPTIONS, "Model", "Data", "Criteria", "Budget", "Pruning", "Gates", "Training", "Evaluation", "Compute"),
    *("Forecast", OUTPUT),
)


def _panel_index(parameter: inspect.Parameter) -> int:
    """The position of a parameter in the help; arguments stay in the order of the verb."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    panel = next((about.rich_help_panel for about in metadata if hasattr(about, "rich_help_panel")), None)
    return PANELS.index(panel or "")


def _parameter(option: Option, default: Any) -> inspect.Parameter:
    flag = option.flag
    if option.type is bool and default is not False:  # a flag that is on by default needs an opposite
        flag = f"{flag}/--no-{flag[2:]}"
    limits: dict[str, Any] = {} if option.minimum is None else {"min": option.minimum}
    about = typer.Option(flag, help=option.help_for(default), rich_help_panel=option.panel, **limits)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.required else default,
        annotation=Annotated[option.type if default is not None else option.type | None, about],
    )


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """On Ctrl-C print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. The same command resumes the work in {out}.", err=True)
        raise typer.Exit(130) from None


def say_resumed(out: Path) -> None:
    """Say on stderr that a run has steps already, which are repeated before new ones are taken."""
    from headprune.run_folder import read_run

    try:
        record, known = read_run(out)
    except HeadpruneError:  # there is none, or opening it says what is wrong
        return
    steps = len(known) - 1
    if record.get("result"):
        typer.echo(f"{out} is finished; it goes on only if other stopping rules are given.", err=True)
    elif steps > 0:
        repeated = "1 step is repeated first, with its repairs" if steps == 1 else f"{steps} steps are repeated first"
        typer.echo(f"Resuming {out}: {repeated}.", err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
