"""The program of one forward pass: the inputs of the task, and all tensors in the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headprune.exports.programs.spec import (
    BATCH,
    SEQUENCE,
    SOURCE,
    TARGET,
    Axes,
    ModelProgram,
    Program,
    Programs,
    Tensors,
)
from headprune.exports.runtime import Source

LEFT_OUT = ("loss", "past_key_values")
FIXED = {"bbox": 1, "pixel_mask": 2}  # number of last axes with a fixed length
OF_ANY_LENGTH = ("inputs_embeds", "input_values", "encoder_hidden_states")  # floats whose second axis is a length


class ForwardProgram(ModelProgram):
    """One forward pass: the inputs of the task, and all tensors of the output."""

    def __init__(self, model: Any, constants: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.constants = dict(constants)

    def forward(self, inputs: Tensors) -> Tensors:
        return tensors_of(self.model(**inputs, **self.constants))


def tensors_of(output: Any) -> Tensors:
    """The tensors in an output, without those of an encoder, which its decoder has used."""
    items = output if isinstance(output, Mapping) else {f"output_{n}": value for n, value in enumerate(output)}
    return {
        name: value
        for name, value in items.items()
        if isinstance(value, torch.Tensor) and name not in LEFT_OUT and not name.startswith("encoder_")
    }


def plain_programs(source: Source) -> Programs:
    all_inputs = source.task.inputs(source.batch)
    inputs = {name: value for name, value in all_inputs.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in all_inputs.items() if name not in inputs and value is not None}
    axes = {name: axes_of(name, value) for name, value in inputs.items()}
    return Programs("plain", (Program("model", ForwardProgram(source.model, constants), inputs, axes),))


def axes_of(name: str, tensor: torch.Tensor) -> Axes:
    """The axes of any length: those of ids, masks and audio; images have a fixed size."""
    free = tensor.dim() - FIXED.get(name, 0) if not tensor.is_floating_point() else 1
    if tensor.is_floating_point() and name in OF_ANY_LENGTH:
        free = min(2, tensor.dim())
    return dict(zip(range(free), _names(name, tensor.dim()), strict=False))


def _names(name: str, axes: int) -> Iterator[str]:
    """Runtimes assume that axes of one name have the same length, so those of a decoder have another name."""
    yield BATCH
    yield from (f"choices_{number}" for number in range(axes - 2))
    yield {"decoder": TARGET, "encoder": SOURCE}.get(name.partition("_")[0], SEQUENCE)
