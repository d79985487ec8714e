"""The way in: from a file, a folder or a data set's name to examples that a model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.data import images, texts
from headprune.data.batches import Examples
from headprune.data.columns import Columns
from headprune.data.files import is_there, read_text, suffix_of
from headprune.data.tables import read_table
from headprune.errors import DataError
from headprune.tasks import Task, task_of

__all__ = ["load_examples", "read_table"]


def load_examples(
    model: PreTrainedModel,
    source: str | Path,
    *,
    processor: Any,
    columns: Columns | None = None,
    split: str | None = None,
    max_length: int = 128,
    seed: int = 0,
    task: Task | None = None,
) -> Examples:
    """The examples in a file, folder or data set, as this model takes them.

    `processor` is where the tokenizer or image processor is, usually the model's own folder or hub name; for texts it
    may be the tokenizer itself. `task` is the model's own unless given. Tables are read and their labels checked at
    once; texts and images are prepared when they are first used, so `load_examples(...).sample(8, seed=0)` prepares
    eight.
    """
    columns, place = columns or Columns(), Path(source)
    task = task or task_of(model)
    if images.takes(model, task):
        examples = images.load(model, task, source, processor=processor, columns=columns, split=split)
    elif task.name not in texts.MAKERS or getattr(model, "main_input_name", "") in OTHER_INPUTS:
        raise DataError(f"No file can be read for {type(model).__name__} ({task.name}); give batches from Python.")
    elif suffix_of(place) == ".txt":
        examples = texts.from_plain_text(model, task, _plain(place), processor, max_length, seed)
    else:
        examples = texts.from_table(model, task, read_table(source, split), columns, processor, max_length, seed)
    if not len(examples):
        raise DataError(f"{source} has no examples; give a file with at least one row that has something to predict.")
    return examples


OTHER_INPUTS = ("input_features", "input_values", "pixel_values_videos")  # of audio and video


def _plain(path: Path) -> str:
    if not is_there(path):
        raise DataError(f"There is no file {path}; check the path.")
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty; give a file with some text.")
    return text
