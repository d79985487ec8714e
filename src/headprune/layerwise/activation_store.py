"""Hidden states of all batches between two layers: in memory, or in files where it is too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headprune.errors import RunError


@dataclass
class MemoryLimit:
    """Bytes that several stores may together hold in memory."""

    left: int

    def take(self, size: int) -> bool:
        """Whether there is room for as many; then they are taken."""
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


class ActivationStore:
    """A list of tensors, one per batch: in memory without a folder, else in files; with a `limit` in files only when it
    is reached."""

    def __init__(self, folder: Path | None = None, name: str = "", limit: MemoryLimit | None = None) -> None:
        self.folder, self.name, self.limit = folder, name, limit
        self._tensors: list[torch.Tensor | None] = []

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Store the tensor of this batch."""
        while len(self._tensors) <= number:
            self._tensors.append(None)
        if self.folder is None or (self.limit is not None and self.limit.take(tensor.nbytes)):
            self._tensors[number] = tensor
        else:
            try:
                save_file({"stream": tensor.contiguous()}, self._file(number))
            except (OSError, SafetensorError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise RunError(
                    f"Cannot write activations to {self.folder}: {reason}; make room and run the same command again, "
                    "which resumes."
                ) from None

    def append(self, tensor: torch.Tensor) -> None:
        self.put(len(self), tensor)

    def __getitem__(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        # A clone, since a file that is memory-mapped cannot be overwritten safely.
        return load_file(self._file(number))["stream"].clone() if tensor is None else tensor

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def clear(self) -> None:
        if self.folder is not None:
            for number in range(len(self)):
                self._file(number).unlink(missing_ok=True)
        self._tensors = []

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}-{number:06}.safetensors"
