"""A model whose weights stay on disk: layers are loaded and unloaded one by one, and accelerate loads the other
modules.

Finished layers are written one by one, each file atomically; at the end they become the shards of a checkpoint.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from headprune.checkpoint.atomic_files import umask
from headprune.checkpoint.save_load import load
from headprune.errors import CheckpointError
from headprune.extras import need
from headprune.hooks.module_paths import submodule
from headprune.hooks.offload import remove_accelerate_hook

INDEX = "model.safetensors.index.json"
MMAP_BYTES = 1 << 20  # bytes from which malloc maps a block by itself
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
ONEDNN_CACHE = 32  # primitives that oneDNN caches: about as many as one layer needs, dense and pruned
SMALL = 64 << 20  # bytes up to which tensors outside of layers share a file


def load_on_disk(path: str | Path, scratch: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model, dense or pruned, with its weights on disk: each module loads its own while it runs, in this precision.
    `scratch` is for weights that transformers has to convert first, such as experts that it merges."""
    need(("accelerate",), "train", "Reading a model layer by layer needs")
    logging.getLogger("accelerate.big_modeling").addFilter(_without_meta_warnings)
    # In the stored precision: for another one transformers would read all weights to convert them.
    model = load(path, device_map={"": "disk"}, offload_folder=str(scratch))
    if dtype is not None:
        _read_as(model, dtype)
    return model


def _without_meta_warnings(record: logging.LogRecord) -> bool:
    """Weights on the meta device are intended here."""
    return "meta device" not in record.getMessage()


def limit_memory_growth() -> None:
    """Keep the memory of the process from growing with the depth of the model: the C library returns freed blocks to
    the system, where loading and unloading layers would fragment them, and oneDNN caches few primitives, which it
    creates for each shape, while every pruned layer has other shapes. oneDNN reads its limit when it first runs in half
    precision."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(ONEDNN_CACHE))
    with suppress(OSError, AttributeError, TypeError):  # only glibc has this
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MMAP_BYTES)


def _read_as(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Load weights in this precision from now on."""
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", weights), "index", None) or {}
        for entry in index.values():
            if getattr(torch, entry["dtype"]).is_floating_point:
                entry["dtype"] = str(dtype).removeprefix("torch.")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta" and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


class LayerFiles:
    """The layers of a model on disk; finished ones are written to the folder `parts`, in the precision `stored`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Iterable[str],
        parts: Path,
        *,
        stored: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.parts, self.stored = model, parts, stored
        self.device = device or torch.device("cpu")
        self.layers = list(layers)
        self.sources: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {}
        for path in self.layers:
            layer = model.get_submodule(path)
            for inner, module in layer.named_modules():
                weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
                for name, tensor in _direct_tensors(module):
                    if tensor.device.type == "meta" and weights is not None:
                        self.sources[".".join(filter(None, (path, inner, name)))] = weights, name
                remove_accelerate_hook(module)

    def outside(self) -> Any:
        """Nothing to do: accelerate loads modules outside of layers."""
        return nullcontext()

    def fetch(self, path: str) -> None:
        for name, (weights, attribute) in self.sources.items():
            if name.startswith(f"{path}."):
                _put(
                    self.model, name, weights[attribute].clone().to(self.device)
                )  # a copy, since the loaded tensor is a view of the file

    def put_back(self, path: str) -> None:
        for inner, module in self.model.get_submodule(path).named_modules():
            for name, tensor in list(_direct_tensors(module)):
                full = ".".join(filter(None, (path, inner, name)))
                if full in self.sources or name in module._parameters:
                    _put(self.model, full, tensor.to("meta"))

    def part(self, path: str) -> Path:
        return self.parts / f"layer-{self.layers.index(path):05}.safetensors"

    def write(self, path: str) -> None:
        """Write a layer as it is now; from now on its weights are rounded to the written precision."""
        layer = self.model.get_submodule(path)
        state = {f"{path}.{name}": self._round(tensor) for name, tensor in layer.state_dict().items()}
        _write(state, self.part(path))
        for name in layer.state_dict():
            tensor = _tensor(layer, name)
            if self.stored is not None and tensor.is_floating_point() and tensor.dtype != self.stored:
                tensor.data = tensor.data.to(self.stored).to(tensor.dtype)

    def read(self, path: str) -> None:
        """Load the written weights into the layer, which has been cut to their shapes."""
        for name, tensor in load_file(self.part(path)).items():
            before = _tensor(self.model, name)
            _put(self.model, name, tensor.to(before.dtype, copy=True).to(self.device))

    def _round(self, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.to(self.stored) if self.stored is not None and tensor.is_floating_point() else tensor
        return result.detach().cpu().contiguous()

    # --- the whole model ---

    def write_weights(self, folder: Path) -> None:
        """All weights as the shards of a checkpoint: those of layers are linked, the others read and written one by
        one."""
        files: dict[Path, list[str]] = {}
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors_outside():
            large = tensor.numel() * tensor.element_size() > SMALL
            if large:
                files[_write({name: tensor}, folder / f"part-{len(files)}")] = [name]
            else:
                pending[name] = tensor
        if pending:
            files[_write(pending, folder / f"part-{len(files)}")] = list(pending)
        for path in self.layers:
            if not self.part(path).is_file():  # of a tower that did not run on the data
                self.fetch(path)
                self.write(path)
                self.put_back(path)
            names = [f"{path}.{name}" for name in self.model.get_submodule(path).state_dict()]
            target = folder / f"part-{len(files)}"
            _link(self.part(path), target)
            files[target] = names
        total, weights = 0, dict[str, str]()
        for number, (file, names) in enumerate(files.items(), start=1):
            shard = f"model-{number:05}-of-{len(files):05}.safetensors"
            total += file.stat().st_size
            file.rename(folder / shard)
            weights |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _tensors_outside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors outside of layers, each once."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        inside = tuple(f"{path}." for path in self.layers)
        for name, tensor in self.model.state_dict().items():
            if name.startswith(inside) or name in tied:
                continue
            if tensor.device.type == "meta":
                path, _, attribute = name.rpartition(".")
                hook = getattr(submodule(self.model, path) if path else self.model, "_hf_hook", None)
                weights = getattr(hook, "weights_map", None)
                if weights is None:
                    raise CheckpointError(f"The weights of {name} cannot be read from the checkpoint.")
                tensor = weights[attribute]
            yield name, self._round(tensor)


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for group in (module._parameters, module._buffers):
        for name, tensor in group.items():
            if tensor is not None:
                yield name, tensor


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if attribute in module._parameters:
        module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[attribute] = value


def _write(state: dict[str, torch.Tensor], target: Path) -> Path:
    """Write a safetensors file atomically."""
    fresh = target.with_name(f".{target.name}.new")
    try:
        save_file(state, fresh, metadata={"format": "pt"})
        fresh.chmod(0o666 & ~umask())  # safetensors writes for the owner alone
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(fresh, target)
    except (OSError, SafetensorError) as error:
        fresh.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"Cannot write to {target.parent}: {reason}; make room and run the same command again, which resumes at "
            "this layer."
        ) from None
    return target


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder at this path; what a killed process left in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
