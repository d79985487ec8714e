"""Loads the inputs of a run: a model, its task, and its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.checkpoint.layer_files import load_on_disk
from headprune.checkpoint.paths import model_folder
from headprune.checkpoint.save_load import load
from headprune.criteria import Criterion
from headprune.data import Columns, Examples, load_examples
from headprune.data.tokenizers import load_tokenizer
from headprune.data.vocabulary_texts import refuse_changed_tokens, texts_of, tokens_in
from headprune.errors import DataError
from headprune.progress import Phase, report_phase
from headprune.search.config import InputConfig
from headprune.tasks import Task, task_of
from headprune.vocabulary.shrink import shrink_vocabulary
from headprune.vocabulary.token_tables import rows_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunInputs:
    """A model, its task, and its examples."""

    model: PreTrainedModel
    task: Task
    examples: Examples
    processor: Any = None  # of the data, where it is not the one in the folder of the model

    def check_labels(self, criterion: Criterion, labels: str, calibration: Examples | None = None) -> None:
        """Refuse a criterion that needs labels where neither the data that it scores nor the task has them."""
        implied = self.task.name in ("causal-lm", "image-text-to-text")
        scored = self.examples if calibration is None else calibration
        if criterion.needs_labels and labels == "given" and not scored.has_labels and not implied:
            raise DataError(
                f"Criterion {criterion.name!r} needs labels and the calibration data has none; name their column with "
                "--label-column, or take the model's own predictions with --labels self."
            )


def load_run_inputs(config: InputConfig, *, on_disk: Path | None = None) -> RunInputs:
    """Load a model, dense or pruned, and its data, both from local files or from the hub. With a folder
    `on_disk`, for weights that have to be converted, the weights stay on disk."""
    dtype = dtype_named(config.dtype)
    device = find_device(config.device)
    report_phase(Phase("loading the model"))
    if on_disk is not None:
        model = load_on_disk(config.model, on_disk, dtype=dtype)
    else:
        model = load(config.model, dtype=dtype).to(device)
    task = task_of(model, config.task)
    examples = read_examples(config, model, task, config.data)
    if config.vocabulary is None:
        return RunInputs(model, task, examples)
    return _shrink_vocabulary(config, RunInputs(model, task, examples))


def _shrink_vocabulary(config: InputConfig, inputs: RunInputs) -> RunInputs:
    """The inputs with a vocabulary shrunk to the tokens of all texts of the config, and the data read again with it."""
    model, task = inputs.model, inputs.task
    rows_of(model)  # raises for a model without tokens before a tokenizer is loaded
    before = {config.data: inputs.examples}
    if config.calibration is not None:
        before[config.calibration] = read_examples(config, model, task, config.calibration, labels=False)
    tokenizer = load_tokenizer(config.processor or str(model_folder(config.model)))
    texts = [
        text
        for source in (*(config.vocabulary or ()), *before)
        for text in texts_of(source, columns=columns_of(config), task=task, split=config.split)
    ]
    used = set().union(*(tokens_in(examples, task) for examples in before.values()))
    smaller, kept = shrink_vocabulary(model, tokenizer, texts, keep=used)
    after = {
        source: read_examples(config, model, task, source, smaller, labels=source == config.data) for source in before
    }
    for source, examples in before.items():
        refuse_changed_tokens(source, examples, after[source], task, kept)
    return RunInputs(model, task, after[config.data], smaller)


def load_dense(config: InputConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The dense model of a run, on the CPU; with a shrunk vocabulary where the run shrank it."""
    if config.vocabulary is not None:
        return load_run_inputs(config).model.to("cpu", dtype)
    return load(model_folder(config.model), dtype=dtype)


def columns_of(config: InputConfig, *, labels: bool = True) -> Columns:
    return Columns(
        config.text_column,
        config.pair_column,
        config.label_column if labels else None,
        config.context_column,
        config.choices_column,
    )


def read_examples(
    config: InputConfig,
    model: PreTrainedModel,
    task: Task,
    source: str,
    processor: Any = None,
    *,
    labels: bool = True,
) -> Examples:
    """The examples in a source, prepared by this processor, or by that of the config. Where `labels` are not needed,
    the source may be without the column that the config names for them; target texts are needed as inputs."""
    options: dict[str, Any] = {
        "columns": columns_of(config, labels=labels or task.name == "seq2seq-lm"),
        "split": config.split,
        "max_length": config.max_length,
        "seed": config.seed,
        "task": task,
    }
    report_phase(Phase(f"reading {source}"))
    default_processor = config.processor or str(model_folder(config.model))
    return load_examples(model, source, processor=default_processor if processor is None else processor, **options)


def dtype_named(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise DataError(f"There is no precision {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def find_device(name: str) -> torch.device:
    """A device by its name; 'auto' is CUDA where there is one, and else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # Each process has its own device, set at its start.
    if name == "cuda" and distributed.is_distributed() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DataError(f"There is no device {name!r}; choose cpu, cuda, cuda:1 or mps.") from None
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "meta": False,
    }
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not available.get(device.type, False) or (device.index or 0) >= count:
        choices = [kind for kind, exists in available.items() if exists]
        raise DataError(f"This machine has no device {name!r}; choose {' or '.join(choices)}.")
    return device
