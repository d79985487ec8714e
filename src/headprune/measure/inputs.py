"""Made-up batches and weights: how long a pass takes does not depend on what is in them."""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.examples import example_inputs


def made_up(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Any]:
    """The most complete batch of random inputs that the model runs on."""
    reason = "it takes neither text, nor images, nor sound"
    for shapes in example_inputs(model, length):
        batch = _filled(model, shapes, batch_size)
        try:
            with torch.no_grad(), evaluating(model):
                model(**batch)
            return batch
        except Exception as error:  # whatever a model says to inputs that are not for it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    raise UnsupportedModelError(
        f"{type(model).__name__} does not run on made-up inputs of {length} tokens ({reason}); give a batch."
    )


def _filled(model: PreTrainedModel, shapes: dict[str, torch.Tensor], batch_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    device, dtype = input_device(model), next(model.parameters()).dtype
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", None) or 2)
    batch: dict[str, Any] = {}
    for name, shape in shapes.items():
        size = (batch_size, *shape.shape[1:])
        if shape.is_floating_point():
            batch[name] = torch.randn(size, generator=generator).to(device, dtype)
        else:
            batch[name] = torch.randint(min(5, vocabulary - 1), vocabulary, size, generator=generator).to(device)
    taken = inspect.signature(model.forward).parameters
    if "input_ids" in batch and "attention_mask" in taken:
        mask = torch.ones_like(batch["input_ids"])
        if batch_size > 1:  # batches of texts are padded, and a mask has its price
            mask[-1, ..., -1] = 0
        batch["attention_mask"] = mask
    if "use_cache" in taken:
        batch["use_cache"] = False
    return batch


def materialised(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or, where it has shapes only, one like it with random weights."""
    if not any(parameter.device.type == "meta" for parameter in model.parameters()):
        return model
    with suppress(Exception), torch.device("cpu"):
        return type(model)(copy.deepcopy(model.config)).eval()
    raise UnsupportedModelError(
        f"{type(model).__name__} could not be made with random weights; load the model with its weights first."
    )
