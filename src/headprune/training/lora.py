"""LoRA (Hu et al. 2021): low-rank matrices beside the linear layers are trained, and merged into them at the end."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.errors import TrainingError
from headprune.extras import require


def linear_maps(model: PreTrainedModel) -> list[str]:
    """The paths of the linear layers to adapt. A tied weight (embeddings) would change in both of its modules, and one
    without rows or columns has nothing to change."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight.numel() and uses[id(module.weight)] == 1
    ]


@contextmanager
def lora(model: PreTrainedModel, rank: int) -> Iterator[Any]:
    """The model with LoRA of this rank, to train. When the block ends, the adapters are merged into the weights; when
    it fails, they are unloaded. A rank of 0 is the model itself."""
    if not rank:
        yield model
        return
    with require("lora", "LoRA needs"):
        from peft import LoraConfig, get_peft_model
    targets = linear_maps(model)
    if not targets:
        raise TrainingError("No linear layer is left in the model that LoRA could adapt; train it with lora=0.")
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on transposed weights (Conv1D), which it handles
        wrapped: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    complete = False
    try:
        yield wrapped
        complete = True
    finally:
        wrapped.merge_and_unload() if complete else wrapped.unload()
        for name in ("peft_config", "active_adapter", "_hf_peft_config_loaded"):  # which peft leaves
            vars(model).pop(name, None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = requires_grad[name]
