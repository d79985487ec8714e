"""The four experiments of the paper as data, and the commands that repeat them with headprune.

Checkpoints, data sets, columns, splits, row counts and batch sizes are from the authors' public notebooks.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.data.tables import read_table
from headprune.errors import DataError
from headprune.extras import require
from headprune.papers.paper_models import ReproductionError, find_model
from headprune.runs.compare import compare
from headprune.search.config import Experiment
from headprune.search.settings import command_words

MAX_LENGTH = 512  # the notebooks truncate texts only at the maximum length of the model
TRIALS = 25
AGGREGATIONS = ("sample", "batch")  # the paper's formula, the notebooks' computation


@dataclass(frozen=True)
class Protocol:
    """One experiment. Rows are taken from the front of the split, as the notebooks do."""

    key: str
    checkpoint: str
    dataset: str
    split: str
    text: str
    label: str
    batch_size: int
    random_step: int  # heads between two measurements of a random trial
    configuration: str | None = None
    pair: str | None = None
    labels: Mapping[int, int] | None = None  # label in the data -> label of the model; other rows are dropped
    calibration: int | None = None  # rows to score on, with any label; None: the rows that are evaluated
    evaluation: int | None = None  # rows to evaluate on, after dropping; None: all
    trials: int = TRIALS

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "labels": None if self.labels is None else {str(k): v for k, v in self.labels.items()}}


PROTOCOLS = (
    Protocol(
        key="bert",
        checkpoint="hw2942/bert-base-chinese-finetuning-financial-news-sentiment-v2",
        dataset="hw2942/financial-news-sentiment",
        split="train",  # 2,329 rows: the notebook scores and evaluates on the training split
        text="Title",
        label="labels",
        batch_size=32,
        random_step=6,
        trials=100,
    ),
    Protocol(
        key="albert",
        checkpoint="Alireza1044/albert-base-v2-mnli",
        dataset="nyu-mll/glue",
        configuration="mnli",
        split="validation_matched",  # 9,815 rows
        text="premise",
        pair="hypothesis",
        label="label",
        batch_size=32,
        random_step=1,
    ),
    Protocol(
        key="roberta",
        checkpoint="siebert/sentiment-roberta-large-english",
        dataset="rahmaabusalma/tweets_sentiment_analysis",
        split="validation",  # 5,205 rows
        text="text",
        label="label",
        labels={0: 0, 2: 1},  # the model has no neutral class: neutral tweets are dropped from the evaluation
        calibration=252,
        evaluation=1000,
        batch_size=4,
        random_step=16,
    ),
    Protocol(
        key="xlm-roberta",
        checkpoint="papluca/xlm-roberta-base-language-detection",
        dataset="papluca/language-identification",
        split="validation",  # 10,000 rows
        text="text",
        label="labels",
        calibration=504,
        evaluation=3000,
        batch_size=8,
        random_step=6,
    ),
)


def find_protocol(key: str) -> Protocol:
    find_model(key)  # raises for a name that is not in the paper
    return next(protocol for protocol in PROTOCOLS if protocol.key == key)


@dataclass(frozen=True)
class PreparedData:
    """The files that the commands read: columns text, pair where there is one, label."""

    evaluation: Path
    calibration: Path | None
    rows: int  # of the evaluation


def prepare_data(protocol: Protocol, folder: Path, *, source: str | Path | None = None) -> PreparedData:
    """Load the split, drop and map labels, and write the calibration and the evaluation rows as csv files.

    `source` is a local table with the same columns, in place of the data set.
    """
    table = _load_dataset(protocol) if source is None else read_table(source)
    for name in (protocol.text, protocol.pair, protocol.label):
        if name is not None and name not in table:
            raise ReproductionError(
                f"The data for {protocol.key} has no column {name!r}; it has {', '.join(map(repr, table))}."
            )
    texts = [table[protocol.text]] if protocol.pair is None else [table[protocol.text], table[protocol.pair]]
    headings = ["text", "pair"][: len(texts)]
    rows = list(islice(_labelled_rows(protocol, texts, table[protocol.label]), protocol.evaluation))
    if not rows:
        raise ReproductionError(
            f"No row of the data for {protocol.key} has a label of its model; check the column {protocol.label!r}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = folder / f"{protocol.key}-evaluation.csv"
    write_text(evaluation, _csv([*headings, "label"], rows))
    if protocol.calibration is None:
        return PreparedData(evaluation, None, len(rows))
    calibration = folder / f"{protocol.key}-calibration.csv"
    # Without labels: the criteria need none, and neutral tweets, which are among these rows, have no class.
    write_text(calibration, _csv(headings, list(islice(zip(*texts, strict=True), protocol.calibration))))
    return PreparedData(evaluation, calibration, len(rows))


def _labelled_rows(
    protocol: Protocol, texts: Sequence[Sequence[Any]], labels: Iterable[Any]
) -> Iterable[tuple[Any, ...]]:
    for *parts, label in zip(*texts, labels, strict=True):
        if protocol.labels is None:
            yield (*parts, label)
        elif label in protocol.labels:
            yield (*parts, protocol.labels[label])


def _load_dataset(protocol: Protocol) -> dict[str, list[Any]]:
    with require("data", "Data sets by name need"):
        import datasets
    try:
        data = datasets.load_dataset(protocol.dataset, protocol.configuration, split=protocol.split)
    except Exception as error:
        raise DataError(
            f"The data set {protocol.dataset} could not be loaded from the hub ({type(error).__name__}); check the "
            "connection, or give a local table with the same columns."
        ) from error
    return {column: list(data[column]) for column in data.column_names}


def _csv(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return stream.getvalue()


@dataclass(frozen=True)
class Curves:
    """One comparison of the paper's figures: criteria that run with the same settings."""

    experiment: Experiment
    criteria: tuple[str, ...]
    out: Path
    trials: int = 1

    def command(self) -> str:
        """The command line of this comparison."""
        words = [*command_words(self.experiment.settings(), "compare"), "--criteria", ",".join(self.criteria)]
        if self.trials > 1:
            words += ["--trials", str(self.trials)]
        return shlex.join([*words, "--out", str(self.out)])


def comparisons(
    protocol: Protocol,
    out: Path,
    data: PreparedData,
    *,
    checkpoint: str | None = None,
    aggregation: str = "sample",
    trials: int | None = None,
) -> list[Curves]:
    """The comparisons behind the curves of a model: greedy, static entropy, and random.

    The paper scores gnorm again after every removal, and entropy once, on the dense model.
    """
    greedy = Experiment(
        model=checkpoint or protocol.checkpoint,
        data=str(data.evaluation),
        repair="none",
        rescore="every",
        pair_column="pair" if protocol.pair is not None else None,
        same_data=data.calibration is None,
        calibration=None if data.calibration is None else str(data.calibration),
        calibration_samples=data.rows if protocol.calibration is None else protocol.calibration,
        batch_size=protocol.batch_size,
        max_length=MAX_LENGTH,
    )
    static = replace(greedy, schedule="one-shot")
    gnorm = "gnorm" if aggregation == "sample" else f"gnorm(aggregation={aggregation})"
    folder = out / protocol.key
    return [
        Curves(greedy, (gnorm, f"inverse:{gnorm}"), folder / "greedy"),
        Curves(static, ("entropy", "inverse:entropy"), folder / "static"),
        Curves(replace(static, every=protocol.random_step), ("random",), folder / "random", trials or protocol.trials),
    ]


def run_protocol(
    key: str,
    out: Path,
    *,
    checkpoint: str | None = None,
    source: str | Path | None = None,
    aggregation: str = "sample",
    trials: int | None = None,
) -> Path:
    """Prepare the data and make all runs of one model in out/KEY; interrupted ones are resumed. Returns that folder."""
    protocol = find_protocol(key)
    if aggregation not in AGGREGATIONS:
        raise ReproductionError(f"There is no aggregation {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}.")
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the runs.")
    data = prepare_data(protocol, out / "data", source=source)
    for curves in comparisons(protocol, out, data, checkpoint=checkpoint, aggregation=aggregation, trials=trials):
        compare(curves.experiment, curves.criteria, curves.out, trials=curves.trials)
    return out / key
