"""A task: a model, and data in the form it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.criteria import Criterion
from headprune.data import Columns, Examples, load_examples
from headprune.errors import DataError
from headprune.store.checkpoint import load
from headprune.task.objectives import is_causal_lm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Task:
    model: PreTrainedModel
    examples: Examples

    def check_labels(self, criterion: Criterion, labels: str) -> None:
        """Refuse a criterion that needs labels where neither the data nor the model can give them."""
        if (
            criterion.needs_labels
            and labels == "given"
            and not self.examples.has_labels
            and not is_causal_lm(self.model)
        ):
            raise DataError(
                f"Criterion {criterion.name!r} needs labels and the data has none; name their column with "
                "--label-column, or take the model's own predictions with --labels self."
            )


def load_task(
    model: str,
    data: str,
    *,
    columns: Columns | None = None,
    split: str | None = None,
    processor: str | None = None,
    max_length: int = 128,
    dtype: str = "float32",
    seed: int = 0,
) -> Task:
    """Load a model, dense or pruned, and its data, both from local files or from the hub."""
    if dtype not in DTYPES:
        raise DataError(f"There is no precision {dtype!r}; choose one of {', '.join(DTYPES)}.")
    loaded = load(model, dtype=DTYPES[dtype])
    examples = load_examples(
        loaded,
        data,
        processor=processor or model,
        columns=columns,
        split=split,
        max_length=max_length,
        seed=seed,
    )
    return Task(loaded, examples)
