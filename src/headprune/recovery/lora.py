"""LoRA (Hu et al. 2021): small matrices beside the linear maps are trained, and added to them at the end."""

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
    """The paths of the linear maps to adapt. One whose weight is another module's too (tied embeddings) would change
    both, and one without rows or columns has nothing to change."""
    users = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight.numel() and users[id(module.weight)] == 1
    ]


@contextmanager
def adapted(model: PreTrainedModel, rank: int) -> Iterator[Any]:
    """The model with LoRA of this rank, to train; when the block ends, what was learned is in the model's own weights,
    and when it fails the model is as it was. A rank of 0 is the model itself."""
    if not rank:
        yield model
        return
    with require("lora", "LoRA needs"):
        from peft import LoraConfig, get_peft_model
    targets = linear_maps(model)
    if not targets:
        raise TrainingError("No linear map is left in the model that LoRA could be added to; train it with lora=0.")
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on maps that are stored the other way round, which it handles
        wrapped: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    learned = False
    try:
        yield wrapped
        learned = True
    finally:
        wrapped.merge_and_unload() if learned else wrapped.unload()
        for name in ("peft_config", "active_adapter", "_hf_peft_config_loaded"):  # of a model that is none any more
            vars(model).pop(name, None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = trained[name]
