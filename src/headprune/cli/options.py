"""What the verbs of the command line share: options, made from the declaration of experiments, and small helpers."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.search.config import Experiment

Model = Annotated[str, typer.Argument(help="A local folder or a hub name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draw this many samples, by the seed.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python file or module to import first: it may register criteria and families."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again where a run is already.")]
# What of an experiment says where in the data things are.
COLUMNS = ("text_column", "pair_column", "label_column", "context_column", "choices_column", "split")


def with_options(
    *leave_out: str, declared: type | None = Experiment, of_the_run: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb an option for every field of an experiment, or of what else is declared, but those left out, after
    its own; with other defaults where these say so. Verbs that begin with a run may ask for some that are as in the run
    if not given. It gets their values as one keyword, `options`."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "options"]
        names = {parameter.name for parameter in own}
        fields = [f for f in _fields(declared) if f.name not in names and f.name not in leave_out]
        made = [_of_the_run(field) for field in _fields(Experiment) if field.name in of_the_run]
        made += [_parameter(field, defaults.get(field.name, field.default)) for field in fields]

        def call(**values: Any) -> None:
            shared = {name: values.pop(name) for name in [parameter.name for parameter in made]}
            verb(**values, options=shared)

        named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *made]]
        ordered = sorted(named, key=lambda p: p.default is not inspect.Parameter.empty)  # required ones first
        call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in ordered}
        call.__name__, call.__doc__ = verb.__name__, verb.__doc__
        return call

    return decorate


def _fields(declared: Any) -> tuple[Any, ...]:
    return dataclasses.fields(declared) if declared else ()


def _of_the_run(field: Any) -> inspect.Parameter:
    usual = "" if field.default is None else f", or {field.default}"
    return _parameter(field, None, f" By default that of the run{usual}.")


def _parameter(field: Any, default: Any, more: str = "") -> inspect.Parameter:
    about = field.metadata
    kind = about["word"]
    flags = [about["flag"] or f"--{field.name.replace('_', '-')}"]
    if kind is bool and default is not False:  # what is usual must be possible to leave out
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    limits = {} if about["minimum"] is None else {"min": about["minimum"]}
    wanted = kind if default is not None else kind | None
    annotation: Any = Annotated[wanted, typer.Option(*flags, help=about["help"] + more, **limits)]
    required = field.name == "data"
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=annotation,
    )


def experiment_of(model: str, options: Mapping[str, Any], **own: Any) -> Experiment:
    """The experiment that the options of a verb describe; what a verb does not offer keeps its default."""
    values = {"model": model, **options, **own}
    for field in dataclasses.fields(Experiment):
        parse = field.metadata.get("parse")
        if parse and isinstance(values.get(field.name), str):
            values[field.name] = parse(values[field.name])
    return Experiment(**values)


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a sentence on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. What was done is in {out}; run the same command again to go on from there.", err=True)
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
