"""Checks of batches and options before the model runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from headprune.batches import batch_size
from headprune.errors import DataError
from headprune.tasks.spec import forward_arguments

# Inputs of a model, and their minimal number of axes, including that of the samples.
AXES = {
    **dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask"), 2
    ),
    "inputs_embeds": 3,
}
LABELS = ("labels", "start_positions", "end_positions")
# Options that transformers' wrappers of a forward take, although its signature does not have them.
OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")

log = logging.getLogger(__name__)


def checked_batches(batches: Any, model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """The batches one by one, with tensors where inputs or labels are lists or arrays; raises for one that is
    invalid."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise DataError("batches must be an iterable of batches, such as [batch] for a single one.")
    takes = forward_arguments(model)
    for number, batch in enumerate(batches):
        converted = _converted(number, batch) if isinstance(batch, Mapping) else batch
        _check_batch(number, converted)
        for name in converted:
            if takes is not None and name not in (*takes, *LABELS, *OPTIONS):
                raise DataError(
                    f"Batch {number} has an entry {name!r}, which {type(model).__name__} does not take; leave it out."
                )
        yield converted


def _converted(number: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, with other values where tensors are needed."""
    changed = {name: _tensor(number, name, value) for name, value in batch.items()}
    same = all(changed[name] is value for name, value in batch.items())
    return batch if same else changed


def _tensor(number: int, name: str, value: Any) -> Any:
    array = isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf"  # not of texts
    if array or (isinstance(value, (list, tuple)) and name in (*AXES, *LABELS)):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name} of batch {number} cannot become a tensor ({error}); give numbers, in rows of equal length."
            ) from None
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_inference():  # made under torch.inference_mode, which no backward pass can use
        value = value.clone()
    # Losses take classes as int64 only.
    return value.long() if name in LABELS and not value.is_floating_point() else value


def _check_batch(number: int, batch: Any) -> None:
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise DataError(f"Batch {number} must be a dict of tensors, the inputs of the model, but it is {batch!r:.60}.")
    for name, axes in AXES.items():
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() < axes:
            raise DataError(
                f"{name} of batch {number} has shape {list(value.shape)}, which has no axis for samples; stack rows to "
                "batches, or use value.unsqueeze(0) for a single one."
            )
    if "label" in batch and "labels" not in batch:
        raise DataError(f'Batch {number} has a "label" entry; models of transformers take "labels", so rename it.')
    if not batch_size(batch):
        raise DataError(f"Batch {number} has no samples; leave it out.")
    sizes = {name: len(value) for name, value in batch.items() if name in (*AXES, "labels") and _has_axis(value)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in sizes.items())
        raise DataError(f"The entries of batch {number} have different numbers of samples ({counts}); make them equal.")


def _has_axis(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def check_labels_word(labels: str) -> None:
    if labels not in ("given", "self"):
        raise DataError(f'labels must be "given" or "self", not {labels!r}.')


def warn_of_precision(model: nn.Module) -> None:
    """Warn once per model that half precision is inexact: many checkpoints are stored in it."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.dtype in (torch.float16, torch.bfloat16) and id(model) not in _warned:
        _warned.clear()
        _warned.add(id(model))
        log.warning(
            "The model computes in %s, so scores and losses are rough; load it with dtype=torch.float32 for exact "
            "ones.",
            str(parameter.dtype).removeprefix("torch."),
        )


_warned: set[int] = set()
