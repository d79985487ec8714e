"""Inputs without data: of the form that a model takes, and of no meaning. They show whether two programs agree."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import ExportError
from headprune.measure.examples import example_inputs

LENGTHS = (12, 7)
ROWS = 3


def made_up_batches(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Two batches of different sizes and lengths, by a seed."""
    random = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        shapes = next(iter(example_inputs(model, length)), None)
        if shapes is None:
            raise ExportError(f"What {type(model).__name__} takes is not known; give data to check the export on.")
        batch = {name: _filled(name, like, ROWS - number, model, random) for name, like in shapes.items()}
        if "input_ids" in batch:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            if not model.config.is_encoder_decoder:
                batch["attention_mask"][1, : length // 3] = 0
        found.append(batch)
    return found


def _filled(name: str, like: torch.Tensor, rows: int, model: PreTrainedModel, random: torch.Generator) -> torch.Tensor:
    shape = (rows, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=random)
    words = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    return torch.randint(0, int(words), shape, generator=random)
