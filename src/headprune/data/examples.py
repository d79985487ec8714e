"""Loads the examples of a file, a folder or a data set as inputs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.checkpoint.paths import model_in
from headprune.checkpoint.save_load import load_structure
from headprune.data import images, texts
from headprune.data.batching import Examples
from headprune.data.columns import Columns
from headprune.data.files import is_there, read_text, suffix_of
from headprune.data.tables import read_table
from headprune.errors import DataError
from headprune.tasks import Task, task_of


def load_examples(
    model: PreTrainedModel | str | Path,
    source: str | Path,
    *,
    processor: Any = None,
    columns: Columns | None = None,
    split: str | None = None,
    max_length: int = 128,
    seed: int = 0,
    task: Task | None = None,
) -> Examples:
    """The examples in a file, folder or data set, as inputs of this model, read as the command line reads them:
    `load_examples(model, "dev.tsv").batches(32)`.

    `model` is a model, or the folder, run or hub name of one, of which only the config is read. `source` is a csv,
    tsv, jsonl, json or parquet file, .txt, .npz or a folder of images, or the name of a data set.
    `processor` is the folder or hub name of the tokenizer or image processor, by default that of the model; for texts
    it may be the tokenizer itself. `task` defaults to the task of the model. Tables are read and their labels checked
    at once; texts and images are preprocessed on first use, so `load_examples(...).sample(8, seed=0)` preprocesses
    eight.
    """
    if not isinstance(model, PreTrainedModel):
        folder = model_in(model)
        model, processor = load_structure(folder), folder if processor is None else processor
    elif processor is None:
        processor = own_processor(model)
    columns, path = columns or Columns(), Path(source)
    task = task or task_of(model)
    if images.expects_images(model, task):
        examples = images.load(model, task, source, processor=processor, columns=columns, split=split)
    elif task.name not in texts.MAKERS or getattr(model, "main_input_name", "") in OTHER_INPUTS:
        raise DataError(f"Files cannot be read for {type(model).__name__} ({task.name}); pass batches from Python.")
    elif suffix_of(path) == ".txt":
        examples = texts.from_plain_text(model, task, _read_plain_text(path), processor, max_length, seed)
    else:
        examples = texts.from_table(model, task, read_table(source, split), columns, processor, max_length, seed)
    if not len(examples):
        raise DataError(f"{source} has no examples; give a file with at least one row that has a target.")
    return examples


def own_processor(model: PreTrainedModel) -> str:
    """Where a model was loaded from, and its tokenizer or image processor usually is."""
    if not model.name_or_path:
        raise DataError(
            "The model does not say where its tokenizer or image processor is; name the place with processor=..., or "
            "give batches."
        )
    return model.name_or_path


OTHER_INPUTS = ("input_features", "input_values", "pixel_values_videos")  # of audio and video


def _read_plain_text(path: Path) -> str:
    if not is_there(path):
        raise DataError(f"There is no file {path}; check the path.")
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty; give a file with some text.")
    return text
