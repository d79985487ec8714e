"""Runs exported programs in PyTorch, without the model classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.program_runner import Part, ProgramRunner
from headprune.exports.programs.spec import Tensors
from headprune.exports.quiet import quiet
from headprune.exports.torch_program.write import read_shapes


def open_folder(folder: Path, *, threads: int | None = None, compiled: bool = True) -> ProgramRunner:
    """Open the programs of a folder, compiled ones where there are any and `compiled` is set."""
    parts = {}
    for name, shapes in read_shapes(folder).items():
        compiled_file, program_file = folder / f"{name}.aoti.pt2", folder / f"{name}.pt2"
        if not program_file.is_file():
            raise ExportError(f"{program_file} is missing; export the model again.")
        with quiet():
            if compiled and compiled_file.is_file():
                program: Any = torch._inductor.aoti_load_package(str(compiled_file))
            else:
                program = torch.export.load(program_file).module()
        parts[name] = Part(_call_function(program, threads), shapes)
    return ProgramRunner(parts)


def _call_function(program: Any, threads: int | None) -> Callable[[Tensors], Tensors]:
    def call(inputs: Tensors) -> Tensors:
        # Compiled code assumes the memory layout that it was compiled for.
        contiguous = {name: tensor.detach().contiguous() for name, tensor in inputs.items()}
        with torch.no_grad(), _with_threads(threads):
            return dict(program(inputs=contiguous))

    return call


@contextmanager
def _with_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
