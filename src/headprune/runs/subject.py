"""What a run works on: a model, its task, and data in the form it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.criteria import Criterion
from headprune.data import Columns, Examples, load_examples
from headprune.data.encoder import load_tokenizer
from headprune.data.wording import refuse_others, texts_of, tokens_in
from headprune.errors import DataError
from headprune.search.config import Experiment
from headprune.store.checkpoint import load
from headprune.store.layer_files import load_on_disk
from headprune.store.places import model_folder
from headprune.tasks import Task, task_of
from headprune.vocabulary.shrink import shrink_vocabulary
from headprune.vocabulary.tables import rows_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Subject:
    model: PreTrainedModel
    task: Task
    examples: Examples
    processor: Any = None  # what prepares texts, where it is not the one at its usual place

    def check_labels(self, criterion: Criterion, labels: str) -> None:
        """Refuse a criterion that needs labels where neither the data nor the model can give them."""
        implied = self.task.name in ("causal-lm", "image-text-to-text")
        if criterion.needs_labels and labels == "given" and not self.examples.has_labels and not implied:
            raise DataError(
                f"Criterion {criterion.name!r} needs labels and the data has none; name their column with "
                "--label-column, or take the model's own predictions with --labels self."
            )


def load_subject(experiment: Experiment, *, on_disk: Path | None = None) -> Subject:
    """Load a model, dense or pruned, and its data, both from local files or from the hub. With a folder for what has to
    be written another way, the weights stay `on_disk`."""
    dtype = dtype_named(experiment.dtype)
    device = find_device(experiment.device)
    if on_disk is not None:
        model = load_on_disk(experiment.model, on_disk, dtype=dtype)
    else:
        model = load(experiment.model, dtype=dtype).to(device)
    task = task_of(model, experiment.task)
    examples = read_examples(experiment, model, task, experiment.data)
    if experiment.vocabulary is None:
        return Subject(model, task, examples)
    return _with_fewer_tokens(experiment, Subject(model, task, examples))


def _with_fewer_tokens(experiment: Experiment, subject: Subject) -> Subject:
    """The subject with the tokens of all texts that the experiment names, and the data read again with these."""
    model, task = subject.model, subject.task
    rows_of(model)  # refuses a model without tokens before a tokenizer is looked for
    before = {experiment.data: subject.examples}
    if experiment.calibration is not None:
        before[experiment.calibration] = read_examples(experiment, model, task, experiment.calibration)
    tokenizer = load_tokenizer(experiment.processor or str(model_folder(experiment.model)))
    texts = [
        text
        for source in (*(experiment.vocabulary or ()), *before)
        for text in texts_of(source, columns=columns_of(experiment), task=task, split=experiment.split)
    ]
    used = set().union(*(tokens_in(examples, task) for examples in before.values()))
    smaller, kept = shrink_vocabulary(model, tokenizer, texts, keep=used)
    after = {source: read_examples(experiment, model, task, source, smaller) for source in before}
    for source, examples in before.items():
        refuse_others(source, examples, after[source], task, kept)
    return Subject(model, task, after[experiment.data], smaller)


def columns_of(experiment: Experiment) -> Columns:
    return Columns(
        experiment.text_column,
        experiment.pair_column,
        experiment.label_column,
        experiment.context_column,
        experiment.choices_column,
    )


def read_examples(
    experiment: Experiment, model: PreTrainedModel, task: Task, source: str, processor: Any = None
) -> Examples:
    """The examples in a source, prepared by the processor that the experiment names, or by this one."""
    reading: dict[str, Any] = {
        "columns": columns_of(experiment),
        "split": experiment.split,
        "max_length": experiment.max_length,
        "seed": experiment.seed,
        "task": task,
    }
    place = experiment.processor or str(model_folder(experiment.model))
    return load_examples(model, source, processor=place if processor is None else processor, **reading)


def dtype_named(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise DataError(f"There is no precision {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def find_device(name: str) -> torch.device:
    """A device by its name; 'auto' is CUDA where there is one, and else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (
        name == "cuda" and distributed.is_distributed() and torch.cuda.is_available()
    ):  # each process has its own, set at its start
        return torch.device("cuda", torch.cuda.current_device())
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DataError(f"There is no device {name!r}; choose cpu, cuda, cuda:1 or mps.") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "meta": False}
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not there.get(device.type, False) or (device.index or 0) >= count:
        have = [kind for kind, found in there.items() if found]
        raise DataError(f"This machine has no device {name!r}; choose {' or '.join(have)}.")
    return device
