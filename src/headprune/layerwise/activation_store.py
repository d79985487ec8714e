"""Activations of all batches between two layers: in memory, or in files where there is not enough of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headprune.errors import RunError


class ActivationStore:
    """A list of tensors, one for each batch, that may lie on disk."""

    def __init__(self, folder: Path | None = None, name: str = "") -> None:
        self.folder, self.name = folder, name
        self._held: list[torch.Tensor | None] = []

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """This tensor for this batch; batches come in their order at first."""
        while len(self._held) <= number:
            self._held.append(None)
        if self.folder is None:
            self._held[number] = tensor
        else:
            try:
                save_file({"stream": tensor.contiguous()}, self._file(number))
            except (OSError, SafetensorError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise RunError(
                    f"Cannot write activations to {self.folder}: {reason}; make room and run the same command again, "
                    "which goes on with this layer."
                ) from None

    def append(self, tensor: torch.Tensor) -> None:
        self.put(len(self), tensor)

    def __getitem__(self, number: int) -> torch.Tensor:
        held = self._held[number]
        # A clone, so that no file is mapped when it is written again.
        return load_file(self._file(number))["stream"].clone() if held is None else held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(len(self)))

    def clear(self) -> None:
        if self.folder is not None:
            for number in range(len(self)):
                self._file(number).unlink(missing_ok=True)
        self._held = []

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}-{number:06}.safetensors"
