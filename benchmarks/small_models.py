"""Small random models of every model type that the installed transformers knows, and their outputs."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.discovery.twin import Run, randomise, sample_runs, small_config

DEPTH = 2
# Where a type has no base class, the first of these that has one for it.
MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)


def model_class(config: Any) -> type | None:
    for name in MAPPINGS:
        classes = getattr(modeling_auto, name, {}).get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, tuple) else classes
    return _class_beside(type(config))


def _class_beside(config: type) -> type | None:
    """The first model class beside the config that is built from it: parts of models are in no mapping."""
    module = config.__module__.replace("configuration_", "modeling_")
    try:
        home = importlib.import_module(module)
    except ImportError:
        return None
    classes = [
        kind
        for name, kind in vars(home).items()
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.__module__ == module
        if kind.__dict__.get("config_class", kind.config_class) is config and not name.endswith("PreTrainedModel")
    ]
    return classes[0] if classes else None


def build(model_type: str) -> tuple[Any, list[Run]]:
    config = small_config(CONFIG_MAPPING[model_type](), keep_heads=False, depth=DEPTH)
    kind: Any = model_class(config)
    if kind is None:
        raise LookupError("there is no model class for this config alone")
    torch.manual_seed(0)
    model = kind(config).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    randomise(model, 0)
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        runs = sample_runs(model)
        if runs:
            return model, runs
    raise RuntimeError("no inputs were found that it runs on")


def outputs(model: Any, runs: Sequence[Run]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            tensors.append(value)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                if "attentions" not in str(name) and name != "past_key_values":
                    take(item)
        elif type(value) in (tuple, list):
            for item in value:
                take(item)

    for run in runs:
        torch.manual_seed(0)
        with torch.no_grad():
            take(model.get_submodule(run.path)(**copy.deepcopy(run.inputs)))
    return tensors


def agree(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Equal but for rounding, relative to the largest number; some code takes steps in float32 whatever else."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return False
    for one, other in zip(expected, actual, strict=True):
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return False
        if finite.any():
            scale = max(1.0, float(one[finite].abs().max()))
            allowed = scale * (1e-5 if one.dtype == torch.float64 else 1e-4)
            if not float((one[finite] - other[finite]).abs().max()) <= allowed:
                return False
    return True
