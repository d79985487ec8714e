"""What the verbs of the command line share: options, and small helpers around them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.errors import HeadpruneError, RegistrationError, ScheduleError

if TYPE_CHECKING:
    from headprune.runs.experiment import Experiment

Model = Annotated[str, typer.Argument(help="A local folder or a hub name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
Data = Annotated[
    str,
    typer.Option(
        help="csv, tsv, jsonl or parquet with a text column; .txt for language models; .npz or a folder of images; "
        "or a data set's name."
    ),
]
TextColumn = Annotated[str | None, typer.Option(help="Column with the text; found by its usual names.")]
PairColumn = Annotated[str | None, typer.Option(help="Column with the second text of a pair.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column with the label; found by its usual names.")]
Split = Annotated[str | None, typer.Option(help="Split of a data set, or of an .npz with x_SPLIT and y_SPLIT.")]
Labels = Annotated[str, typer.Option(help="'given' in the data, or 'self' for the model's own predictions.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draw this many samples, by the seed.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch.")]
MaxLength = Annotated[int, typer.Option(min=2, help="Longer texts are cut to this many tokens.")]
Processor = Annotated[str | None, typer.Option(help="Where the tokenizer is, if not with the model.")]
Dtype = Annotated[str, typer.Option(help="Precision to compute in: float32, bfloat16 or float16.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python file or module to import first: it may register criteria and families."),
]
Keep = Annotated[str | None, typer.Option(help="Stop at this share (0.5) or number (36) of heads left.")]
Compensate = Annotated[
    str,
    typer.Option(
        help="What makes up for removed heads: 'lstsq' (the heads that stay, by least squares), 'mean' (the output "
        "bias) or 'none'."
    ),
]
MaxDrop = Annotated[
    float | None,
    typer.Option(help="The metric may fall at most this far below dense (0.01); perplexity may rise by this share."),
]
Schedule = Annotated[str, typer.Option(help="'greedy' scores again after every step, 'one-shot' only once.")]
Every = Annotated[int, typer.Option(min=1, help="Units to remove per step.")]
MinPerSite = Annotated[int, typer.Option(min=0, help="Leave at least this many heads at every site.")]
Calibration = Annotated[
    str | None, typer.Option(help="Data to score and repair on, apart from --data, which then evaluates.")
]
CalibrationSamples = Annotated[int, typer.Option(min=1, help="Samples to score and repair on.")]
EvaluationSamples = Annotated[int | None, typer.Option(min=1, help="Samples to evaluate on; all others by default.")]
SameData = Annotated[bool, typer.Option("--same-data", help="Score, repair and evaluate on the same samples.")]
MetricName = Annotated[str | None, typer.Option(help="accuracy, f1, matthews, pearson or perplexity; found by task.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again where a run is already.")]


def experiment_of(options: Mapping[str, Any]) -> Experiment:
    """The experiment that the options of a verb describe; what a verb does not offer keeps its default."""
    from headprune.data import Columns
    from headprune.runs.experiment import Experiment

    named = {field.name: options[field.name] for field in dataclasses.fields(Experiment) if field.name in options}
    if "keep" in named:
        named["keep"] = parse_keep(named["keep"])
    columns = Columns(options["text_column"], options["pair_column"], options["label_column"])
    return Experiment(**named, columns=columns)


def parse_keep(text: str | None) -> float | int | None:
    if text is None:
        return None
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ScheduleError(
            f"--keep takes a share such as 0.5 or a number of heads such as 36, not {text!r}."
        ) from None


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a sentence on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. What was done is in {out}; run the same command again to go on from there.", err=True)
        raise typer.Exit(130) from None


def import_plugins(names: list[str] | None) -> None:
    """Import Python files or modules that register criteria or families."""
    for name in names or ():
        try:
            if name.endswith(".py"):
                spec = importlib.util.spec_from_file_location(Path(name).stem, name)
                if spec is None or spec.loader is None or not Path(name).is_file():
                    raise ImportError("there is no such file")
                module = importlib.util.module_from_spec(spec)
                sys.modules[Path(name).stem] = module
                spec.loader.exec_module(module)
            else:
                importlib.import_module(name)
        except HeadpruneError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise RegistrationError(f"The plugin {name} cannot be imported: {reason}.") from error


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
