"""Weights in int8 or int4 by torchao, after pruning; saved as plain integers and scales, and loaded bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import CheckpointError, ExportError, UnsupportedModelError
from headprune.extras import need, require
from headprune.hooks.offload import refuse_offloaded
from headprune.units.linear import is_quantized, refuse_quantized

NAME = "quantized.safetensors"
VARIANT = "quantized"  # in the name of the other weights: without these ones, plain transformers must not load them
SMALLEST = 8  # a group of fewer weights costs more in scales than int4 saves
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
Name = Literal["int8", "int4"]


class Stored(NamedTuple):
    """How the weights of a linear map are kept: so many bits, and one scale per output and so many inputs."""

    bits: int
    group: int


@dataclass(frozen=True)
class QuantizeResult:
    """What was quantised, by the path of the module; the rest is in floating point as before."""

    name: str
    layers: Mapping[str, Stored]

    @property
    def otherwise(self) -> dict[str, Stored]:
        """Layers in int8 where int4 was asked for, since no group of weights divides their width."""
        return {path: stored for path, stored in self.layers.items() if f"int{stored.bits}" != self.name}


def quantize(model: PreTrainedModel, name: Name = "int8", *, group_size: int = 64) -> QuantizeResult:
    """Keep the weights of linear maps as integers, in place: the last step, since nothing can be removed after it.

    "int8" has one scale per output; "int4" one per output and `group_size` inputs, or as many as divide the width of a
    pruned layer, and int8 where none do. Embeddings, the map to the vocabulary, norms and biases stay as they are.
    """
    if name not in ("int8", "int4"):
        raise ExportError(f"headprune.quantize knows int8 and int4, not {name!r}; choose one of them.")
    if not isinstance(group_size, int) or group_size < SMALLEST:
        raise ExportError(f"group_size must be a whole number of at least {SMALLEST}, not {group_size!r}.")
    refuse_quantized(model, "quantised")
    refuse_offloaded(model, "quantised")
    layers = {path: _way(module.in_features, name, group_size) for path, module in _linear_maps(model)}
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no torch.nn.Linear whose weights could be quantised.")
    with require("torchao", "Quantised models need"):
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    for path, (bits, group) in layers.items():
        if bits == 8:
            config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
        else:  # torchao's other int4 formats need a GPU or other packages
            config = IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(group))
        quantize_(model.get_submodule(path), config)
    return QuantizeResult(name, layers)


def _linear_maps(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """What is called as a linear map; subclasses are only asked for their weights at times."""
    shared = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if (
            type(module) is nn.Linear
            and module is not head
            and module.weight.numel()
            and id(module.weight) not in shared
        ):
            yield path, module


def _way(width: int, name: Name, group_size: int) -> Stored:
    group = next((size for size in range(min(group_size, width), SMALLEST - 1, -1) if width % size == 0), None)
    return Stored(8, width) if name == "int8" or group is None else Stored(4, group)


def save_quantized(model: PreTrainedModel, folder: Path, max_shard_size: str | int) -> None:
    """Integers and scales in a file of their own, two int4 in a byte; the rest as transformers writes it."""
    tensors, layers = {}, {}
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if not is_quantized(weight):
            continue
        bits = 4 if getattr(weight, "target_dtype", None) == INT4 else 8
        if type(weight).__name__ not in ("Int8Tensor", "IntxUnpackedToInt8Tensor") or weight.zero_point.any():
            raise CheckpointError(
                f"{path} was quantised in another way than by headprune.quantize; save it with torchao's own functions."
            )
        layers[path] = {"bits": bits, "group": weight.block_size[-1], "width": weight.shape[1]}
        tensors[f"{path}.data"] = _packed(weight.qdata) if bits == 4 else weight.qdata.contiguous()
        tensors[f"{path}.scale"] = weight.scale.contiguous()
    kept = {name: tensor for name, tensor in model.state_dict().items() if not is_quantized(tensor)}
    model.save_pretrained(folder, state_dict=kept, max_shard_size=max_shard_size, variant=VARIANT)
    save_file(tensors, folder / NAME, metadata={"layers": json.dumps(layers)})


def has_quantized(folder: Path) -> bool:
    return (folder / NAME).is_file()


def expect_quantized(kind: Any, folder: Path, options: dict[str, Any]) -> None:
    """Let a class, which lives for one loading, know which weights come from another file than the rest."""
    need(("torchao",), "torchao", "Quantised models need")
    options["variant"] = VARIANT
    with _fitting(folder), safe_open(folder / NAME, framework="pt") as file:
        own = [f"^{re.escape(path)}\\.weight$" for path in _layers(file)]
    kind._keys_to_ignore_on_load_missing = [*(kind._keys_to_ignore_on_load_missing or ()), *own]


def fill_quantized(model: PreTrainedModel, folder: Path) -> None:
    """Put in the weights that `save_quantized` kept apart."""
    with require("torchao", "Quantised models need"):
        from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor
    with _fitting(folder), safe_open(folder / NAME, framework="pt") as file:
        for path, (bits, group, width) in _layers(file).items():
            module = model.get_submodule(path)
            place, dtype = module.weight.device, module.weight.dtype
            data, scale = file.get_tensor(f"{path}.data"), file.get_tensor(f"{path}.scale").to(place)
            data = (_unpacked(data, width) if bits == 4 else data).to(place)
            if data.shape != module.weight.shape or scale.shape != (len(data), width // group):
                raise ValueError(f"{path} has another shape")
            zero = torch.zeros_like(scale, dtype=torch.int8)
            if bits == 4:
                weight: Any = IntxUnpackedToInt8Tensor(data, scale.to(dtype), zero, INT4, (1, group), dtype, None)
            else:
                weight = Int8Tensor(data, scale, [1, group], dtype, zero_point=zero)
            module.weight = nn.Parameter(weight, requires_grad=False)


def _layers(file: Any) -> dict[str, tuple[int, int, int]]:
    """Bits, size of a group and width of every layer in the file."""
    found = json.loads((file.metadata() or {})["layers"])
    return {path: (own["bits"], own["group"], own["width"]) for path, own in found.items()}


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder / NAME} does not fit the model ({reason}); save it again.") from None


def _packed(data: torch.Tensor) -> torch.Tensor:
    """Values of -8 to 7, two in a byte, the first in its lower half."""
    halves = (data + 8).to(torch.uint8)
    if halves.shape[1] % 2:
        halves = nn.functional.pad(halves, (0, 1))
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _unpacked(data: torch.Tensor, width: int) -> torch.Tensor:
    halves = torch.stack([data & 15, data >> 4], dim=2).flatten(1)[:, :width]
    return (halves.to(torch.int8) - 8).contiguous()
