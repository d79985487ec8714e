"""Exported programs in PyTorch, without the classes that they were traced from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.runtimes.programs.spec import Tensors
from headprune.runtimes.running import Part, ProgramRunner
from headprune.runtimes.torch_program.write import read_shapes
from headprune.runtimes.words import quiet


def open_folder(folder: Path, *, threads: int | None = None, compiled: bool = True) -> ProgramRunner:
    """The compiled programs where they are there and wanted."""
    parts = {}
    for name, shapes in read_shapes(folder).items():
        fast, plain = folder / f"{name}.aoti.pt2", folder / f"{name}.pt2"
        if not plain.is_file():
            raise ExportError(f"{plain} is missing; export the model again.")
        with quiet():
            if compiled and fast.is_file():
                program: Any = torch._inductor.aoti_load_package(str(fast))
            else:
                program = torch.export.load(plain).module()
        parts[name] = Part(_calling(program, threads), shapes)
    return ProgramRunner(parts)


def _calling(program: Any, threads: int | None) -> Callable[[Tensors], Tensors]:
    def call(inputs: Tensors) -> Tensors:
        # Compiled code reads memory in the order in which it was laid out when it was compiled.
        given = {name: tensor.detach().contiguous() for name, tensor in inputs.items()}
        with torch.no_grad(), _with_threads(threads):
            return dict(program(inputs=given))

    return call


@contextmanager
def _with_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
