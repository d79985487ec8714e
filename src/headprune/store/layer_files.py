"""A model whose weights stay on disk: accelerate reads what is no layer when it runs, and layers come and go in turn.

Layers that are done are written one by one, each file in one step; at the end they become the shards of a checkpoint.
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

from headprune.errors import CheckpointError
from headprune.extras import need
from headprune.hooks.offload import undress
from headprune.hooks.paths import submodule
from headprune.store.checkpoint import load
from headprune.store.files import umask

INDEX = "model.safetensors.index.json"
MAPPED = 1 << 20  # bytes from which a block is mapped by itself
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
PROGRAMS = 32  # of oneDNN: about as many as one layer needs, dense and pruned
SMALL = 64 << 20  # bytes of tensors beside the layers that share a file


def load_on_disk(path: str | Path, scratch: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model, dense or pruned, without its weights: each module reads its own when it runs, in this precision, and
    forgets them. `scratch` takes what transformers has to write another way, such as experts that it joins."""
    need(("accelerate",), "train", "Reading a model layer by layer needs")
    logging.getLogger("accelerate.big_modeling").addFilter(_not_of_meta)
    # In the precision that they are stored in: asked for another one, transformers would read all of them to convert.
    model = load(path, device_map={"": "disk"}, offload_folder=str(scratch))
    if dtype is not None:
        _read_as(model, dtype)
    return model


def _not_of_meta(record: logging.LogRecord) -> bool:
    """That weights are not there is what is asked for."""
    return "meta device" not in record.getMessage()


def give_memory_back() -> None:
    """Let the process not grow with the depth of the model: blocks of the C library go back to the system when they are
    freed, where layers that come and go would leave holes, and oneDNN keeps few of the programs that it makes for each
    shape, where every layer has shapes of its own. The latter it reads when it first runs in half precision."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(PROGRAMS))
    with suppress(OSError, AttributeError, TypeError):  # only glibc has this
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MAPPED)


def _read_as(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Weights are read in this precision from here on."""
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
    """The layers of a model that is on disk; what is done is written to `parts`, in the precision `stored`."""

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
                for name, tensor in _own_tensors(module):
                    if tensor.device.type == "meta" and weights is not None:
                        self.sources[".".join(filter(None, (path, inner, name)))] = weights, name
                undress(module)

    def outside(self) -> Any:
        """Accelerate sees to what is no layer."""
        return nullcontext()

    def fetch(self, path: str) -> None:
        for name, (weights, own) in self.sources.items():
            if name.startswith(f"{path}."):
                _put(self.model, name, weights[own].clone().to(self.device))  # what is read is a view of the file

    def put_back(self, path: str) -> None:
        for inner, module in self.model.get_submodule(path).named_modules():
            for name, tensor in list(_own_tensors(module)):
                full = ".".join(filter(None, (path, inner, name)))
                if full in self.sources or name in module._parameters:
                    _put(self.model, full, tensor.to("meta"))

    def part(self, path: str) -> Path:
        return self.parts / f"layer-{self.layers.index(path):05}.safetensors"

    def write(self, path: str) -> None:
        """Write a layer as it is now; from here on it has the numbers that were written."""
        layer = self.model.get_submodule(path)
        state = {f"{path}.{name}": self._rounded(tensor) for name, tensor in layer.state_dict().items()}
        _write(state, self.part(path))
        for name in layer.state_dict():
            tensor = _tensor(layer, name)
            if self.stored is not None and tensor.is_floating_point() and tensor.dtype != self.stored:
                tensor.data = tensor.data.to(self.stored).to(tensor.dtype)

    def read(self, path: str) -> None:
        """The layer, cut to the shapes that it was written in, gets what was written."""
        for name, tensor in load_file(self.part(path)).items():
            before = _tensor(self.model, name)
            _put(self.model, name, tensor.to(before.dtype, copy=True).to(self.device))

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        rounded = tensor.to(self.stored) if self.stored is not None and tensor.is_floating_point() else tensor
        return rounded.detach().cpu().contiguous()

    # --- the whole ---

    def write_weights(self, folder: Path) -> None:
        """All weights as the shards of a checkpoint: those of layers are linked, the others read and written one by
        one."""
        files: dict[Path, list[str]] = {}
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in self._beside():
            large = tensor.numel() * tensor.element_size() > SMALL
            if large:
                files[_write({name: tensor}, folder / f"part-{len(files)}")] = [name]
            else:
                pending[name] = tensor
        if pending:
            files[_write(pending, folder / f"part-{len(files)}")] = list(pending)
        for path in self.layers:
            if not self.part(path).is_file():  # of a tower that does not run on the data
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

    def _beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that belong to no layer, each once."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        inside = tuple(f"{path}." for path in self.layers)
        for name, tensor in self.model.state_dict().items():
            if name.startswith(inside) or name in tied:
                continue
            if tensor.device.type == "meta":
                path, _, own = name.rpartition(".")
                hook = getattr(submodule(self.model, path) if path else self.model, "_hf_hook", None)
                weights = getattr(hook, "weights_map", None)
                if weights is None:
                    raise CheckpointError(f"The weights of {name} cannot be read from the checkpoint.")
                tensor = weights[own]
            yield name, self._rounded(tensor)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (module._parameters, module._buffers):
        for name, tensor in named.items():
            if tensor is not None:
                yield name, tensor


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, own = name.rpartition(".")
    return getattr(model.get_submodule(path), own)


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in module._parameters:
        module._parameters[own] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[own] = value


def _write(state: dict[str, torch.Tensor], target: Path) -> Path:
    """In one step, and on the disk before it counts."""
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
            f"Cannot write to {target.parent}: {reason}; make room and run the same command again, which goes on with "
            "this layer."
        ) from None
    return target


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """A folder that is empty at first and gone afterwards; one that a kill left is emptied."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
