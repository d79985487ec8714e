"""A dummy input to try an exported model on; real rows may be confidential."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from headprune.checkpoint.processors import has_tokenizer
from headprune.data.tokenizers import load_tokenizer
from headprune.exports.runtime import Source

NAME = "sample.npz"
TEXT = "A short text to try the model on"
MAX_TOKENS = 128  # of the dummy input


def write_sample(source: Source, folder: Path) -> None:
    """Write the inputs of one row as arrays by name."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in sample_inputs(source).items()}
    numpy.savez(folder / NAME, **arrays)


def sample_inputs(source: Source) -> dict[str, torch.Tensor]:
    """Inputs of the shapes of a row of the batch: a text where there is a tokenizer, else seeded random numbers."""
    inputs = source.task.inputs(source.batch)
    row = {name: value[:1] for name, value in inputs.items() if isinstance(value, torch.Tensor) and name != "labels"}
    ids = _text(source)
    random = torch.Generator().manual_seed(0)
    return {name: _dummy_like(name, value, ids, random) for name, value in row.items()}


def _dummy_like(name: str, value: torch.Tensor, ids: torch.Tensor | None, random: torch.Generator) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=random)
    if not name.startswith("decoder_") and ids is not None and value.dim() == 2:
        value = value[:, :1].expand(1, ids.shape[1])
        if name == "input_ids":
            return ids.contiguous()
    elif value.dim() == 2:
        value = value[:, :MAX_TOKENS]
    if name.endswith("mask"):
        return torch.ones_like(value)
    if not name.endswith("input_ids"):
        return torch.zeros_like(value) if name == "token_type_ids" else value.contiguous()
    return torch.randint(int(value.min()), int(value.max()) + 1, value.shape, generator=random)


def _text(source: Source) -> torch.Tensor | None:
    """The tokens of a text; None where there is no tokenizer, or the model takes no text."""
    if source.folder is None or "input_ids" not in source.batch:
        return None
    if not has_tokenizer(source.folder):
        return None
    return torch.tensor([load_tokenizer(source.folder)(TEXT)["input_ids"]])


def read_sample(folder: Path) -> Mapping[str, torch.Tensor]:
    with numpy.load(folder / NAME) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}
