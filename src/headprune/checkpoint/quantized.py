"""Quantises weights to int8 or int4 with torchao, after pruning; saves integers and scales, and loads them exactly."""

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
VARIANT = "quantized"  # in the file names of the other weights, so that plain transformers does not load these alone
SMALLEST = 8  # smaller groups cost more in scales than int4 saves
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
Name = Literal["int8", "int4"]


class WeightFormat(NamedTuple):
    """The format of the weights of a linear map: bits, and the number of inputs that share a scale, per output."""

    bits: int
    group: int


@dataclass(frozen=True)
class QuantizeResult:
    """The formats of quantised layers, by module path; other weights are in floating point as before."""

    name: str
    layers: Mapping[str, WeightFormat]

    @property
    def otherwise(self) -> dict[str, WeightFormat]:
        """Layers in int8 instead of int4, since no group size divides their width."""
        return {path: stored for path, stored in self.layers.items() if f"int{stored.bits}" != self.name}


def quantize(model: PreTrainedModel, name: Name = "int8", *, group_size: int = 64) -> QuantizeResult:
    """Quantise the weights of linear maps in place: the last step, since units cannot be removed afterwards.

    "int8" has one scale per output; "int4" one per output and `group_size` inputs, or as many as divide the width of a
    pruned layer, and int8 where none do. Embeddings, the map to the vocabulary, norms and biases stay as they are.
    """
    if name not in ("int8", "int4"):
        raise ExportError(f"headprune.quantize takes int8 or int4, not {name!r}; choose one of them.")
    if not isinstance(group_size, int) or group_size < SMALLEST:
        raise ExportError(f"group_size must be a whole number of at least {SMALLEST}, not {group_size!r}.")
    refuse_quantized(model, "quantised")
    refuse_offloaded(model, "quantised")
    layers = {path: _weight_format(module.in_features, name, group_size) for path, module in _linear_maps(model)}
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
    """Linear maps that are called as modules; of subclasses some models only read the weights."""
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


def _weight_format(width: int, name: Name, group_size: int) -> WeightFormat:
    group = next((size for size in range(min(group_size, width), SMALLEST - 1, -1) if width % size == 0), None)
    return WeightFormat(8, width) if name == "int8" or group is None else WeightFormat(4, group)


def save_quantized(model: PreTrainedModel, folder: Path, max_shard_size: str | int) -> None:
    """Write integers and scales into one file, two int4 in a byte, and the rest as transformers does."""
    tensors, layers = {}, {}
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if not is_quantized(weight):
            continue
        bits = 4 if getattr(weight, "target_dtype", None) == INT4 else 8
        if type(weight).__name__ not in ("Int8Tensor", "IntxUnpackedToInt8Tensor") or weight.zero_point.any():
            raise CheckpointError(f"{path} was not quantised by headprune.quantize; save it with torchao's functions.")
        layers[path] = {"bits": bits, "group": weight.block_size[-1], "width": weight.shape[1]}
        tensors[f"{path}.data"] = _pack_int4(weight.qdata) if bits == 4 else weight.qdata.contiguous()
        tensors[f"{path}.scale"] = weight.scale.contiguous()
    others = {name: tensor for name, tensor in model.state_dict().items() if not is_quantized(tensor)}
    model.save_pretrained(folder, state_dict=others, max_shard_size=max_shard_size, variant=VARIANT)
    save_file(tensors, folder / NAME, metadata={"layers": json.dumps(layers)})


def has_quantized(folder: Path) -> bool:
    return (folder / NAME).is_file()


def expect_quantized(kind: Any, folder: Path, options: dict[str, Any]) -> None:
    """Tell the class of one `from_pretrained` which weights are in another file."""
    need(("torchao",), "torchao", "Quantised models need")
    options["variant"] = VARIANT
    with _refuse_mismatch(folder), safe_open(folder / NAME, framework="pt") as file:
        patterns = [f"^{re.escape(path)}\\.weight$" for path in _layers(file)]
    kind._keys_to_ignore_on_load_missing = [*(kind._keys_to_ignore_on_load_missing or ()), *patterns]


def fill_quantized(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights that `save_quantized` wrote into their own file."""
    with require("torchao", "Quantised models need"):
        from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor
    with _refuse_mismatch(folder), safe_open(folder / NAME, framework="pt") as file:
        for path, (bits, group, width) in _layers(file).items():
            module = model.get_submodule(path)
            device, dtype = module.weight.device, module.weight.dtype
            data, scale = file.get_tensor(f"{path}.data"), file.get_tensor(f"{path}.scale").to(device)
            data = (_unpack_int4(data, width) if bits == 4 else data).to(device)
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
    entries = json.loads((file.metadata() or {})["layers"])
    return {path: (entry["bits"], entry["group"], entry["width"]) for path, entry in entries.items()}


@contextmanager
def _refuse_mismatch(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder / NAME} does not fit the model ({reason}); save it again.") from None


def _pack_int4(data: torch.Tensor) -> torch.Tensor:
    """Values of -8 to 7, two in a byte, the first in its lower half."""
    halves = (data + 8).to(torch.uint8)
    if halves.shape[1] % 2:
        halves = nn.functional.pad(halves, (0, 1))
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _unpack_int4(data: torch.Tensor, width: int) -> torch.Tensor:
    halves = torch.stack([data & 15, data >> 4], dim=2).flatten(1)[:, :width]
    return (halves.to(torch.int8) - 8).contiguous()
