"""Checks of batches and options before the model runs."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import TransformersKwargs

from headprune.batches import batch_size
from headprune.errors import DataError
from headprune.tasks.id_limits import id_limits
from headprune.tasks.spec import forward_arguments

# Inputs of a model, and their minimal number of axes, including that of the samples.
AXES = {
    **dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask"), 2
    ),
    "inputs_embeds": 3,
}
LABELS = ("labels", "start_positions", "end_positions")
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}  # of token ids
# What modules of transformers, and the losses of its models, read from the keywords that are passed on to them.
KEYWORDS = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__, "shift_labels"}
KEYWORDS |= {"token_type_ids", "special_tokens_mask", "length", "cache_position"}  # of tokenizers and of generation
IDS = ("input_ids", "decoder_input_ids", "token_type_ids", "decoder_token_type_ids")
# Options that transformers' wrappers of a forward take, although its signature does not have them.
OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")

log = logging.getLogger(__name__)


def checked_batches(batches: Any, model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """The batches one by one, with tensors where inputs or labels are lists or arrays; raises for one that is
    invalid."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise DataError("batches must be an iterable of batches, such as [batch] for a single one.")
    takes = forward_arguments(model)
    keywords = _keywords(model) if takes is None else None
    limits = id_limits(model)
    for number, batch in enumerate(batches):
        converted = _converted(number, batch) if isinstance(batch, Mapping) else batch
        _check_batch(number, converted)
        limits.check(number, converted)
        for name, value in converted.items():
            if takes is not None and name not in (*takes, *LABELS, *OPTIONS):
                raise _unknown_entry(number, name, model, {*takes, *LABELS})
            if keywords is not None and isinstance(value, torch.Tensor) and not _is_keyword(name, keywords):
                raise _unknown_entry(number, name, model, keywords)
        yield converted


def _keywords(model: nn.Module) -> set[str] | None:
    """The names of the tensors that this model or a module of it takes; None where its forward, which takes any
    keyword, is not of transformers, so that it may read any."""
    if not getattr(type(model).forward, "__module__", "").startswith("transformers."):
        return None
    classes = {type(module) for module in model.modules()}
    return {*KEYWORDS, *LABELS}.union(*(inspect.signature(kind.forward).parameters for kind in classes))


def _is_keyword(name: str, keywords: set[str]) -> bool:
    """Models of two parts take keywords of either with its name in front."""
    parts = (name.partition("encoder_")[2], name.partition("decoder_")[2])
    return name in keywords or any(part in keywords for part in parts)


def _unknown_entry(number: int, name: str, model: nn.Module, known: set[str]) -> DataError:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    fix = f"did you mean {near[0]!r}?" if near else "leave it out."
    return DataError(f"Batch {number} has an entry {name!r}, which {type(model).__name__} does not take; {fix}")


def _converted(number: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, with other values where tensors are needed, and without labels that are None."""
    changed = {
        name: _tensor(number, name, value)
        for name, value in batch.items()
        if not (value is None and name in (*LABELS, "label"))
    }
    same = all(changed.get(name) is value for name, value in batch.items() if value is not None)
    same = same and len(changed) == len(batch)
    return batch if same else changed


def _tensor(number: int, name: str, value: Any) -> Any:
    array = isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf"  # not of texts
    if array or (isinstance(value, (list, tuple, numpy.ndarray)) and name in (*AXES, *LABELS)):
        try:
            value = torch.tensor(value if array or not isinstance(value, numpy.ndarray) else value.tolist())
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{name} of batch {number} cannot become a tensor ({error}); give numbers, in rows of equal length."
            ) from None
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_inference():  # made under torch.inference_mode, which no backward pass can use
        value = value.clone()
    if name in IDS:
        if value.is_floating_point() or value.is_complex():
            raise DataError(
                f"{name} of batch {number} must be whole numbers, not {value.dtype}; convert them to int64."
            )
        return value if value.dtype in (torch.int32, torch.int64) else value.long()  # tables take no others
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
    for name, mask_name in MASKS.items():
        ids: Any = batch.get(name)
        mask: Any = batch.get(mask_name)
        flat = isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.dim() == mask.dim() == 2
        # A cache has the keys of earlier tokens, which the mask is for as well.
        if flat and ids.shape != mask.shape and batch.get("past_key_values") is None:
            raise DataError(
                f"{name} of batch {number} has {ids.shape[1]} columns and {mask_name} {mask.shape[1]}; give both one "
                "column per token."
            )


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
