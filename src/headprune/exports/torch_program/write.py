"""Writes programs as files of torch.export: graph and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from headprune.errors import ExportError
from headprune.exports.programs import Program, Programs
from headprune.exports.quiet import quiet, reason
from headprune.exports.torch_program.compiled import compile_program

SHAPES = "programs.json"  # the inputs of each program in order, which a compiled one does not tell
Shapes = dict[str, tuple[int | None, ...]]


def write_programs(programs: Programs, folder: Path, *, compiled: bool = True) -> None:
    """One file per program, named after it, and a compiled one beside it where possible."""
    shapes = {}
    for program in programs.parts:
        exported, variant = trace(program)
        shapes[program.name] = _shapes(variant)
        if compiled:
            compile_program(exported, folder / f"{program.name}.aoti.pt2")
        exported.example_inputs = None  # real rows, which may be confidential; compiled code does not contain them
        with quiet():
            torch.export.save(exported, folder / f"{program.name}.pt2")
    (folder / SHAPES).write_text(json.dumps(shapes, indent=2) + "\n")


def read_shapes(folder: Path) -> Mapping[str, Shapes]:
    try:
        records = json.loads((folder / SHAPES).read_text())
        return {part: {name: tuple(shape) for name, shape in shapes.items()} for part, shapes in records.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise ExportError(f"{folder / SHAPES} is missing or damaged; export the model again.") from None


def trace(program: Program) -> tuple[ExportedProgram, Program]:
    """The graph, and the variant of the program that was traced."""
    first: ExportError | None = None
    for attempt in program.attempts():
        try:
            return _trace_once(attempt), attempt
        except ExportError as error:
            first = first or error
    assert first is not None
    raise first


def _trace_once(program: Program) -> ExportedProgram:
    free = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in program.axes.items()}
    with quiet(), torch.no_grad():
        try:
            exported = torch.export.export(
                program.module, (), kwargs={"inputs": dict(program.inputs)}, dynamic_shapes={"inputs": free}
            )
        except Exception as error:  # errors of tracing have no common class
            raise ExportError(
                f"PyTorch cannot trace this model ({reason(error)}); save it with headprune.save, or report the model "
                "family."
            ) from error
    # Examples have lengths of at least 2, from which tracing concludes that sums of lengths are at least 4. Shorter
    # ones are valid too: the KV cache is empty before the first token, and tokens are generated one by one.
    for length, bounds in exported.range_constraints.items():
        exported.range_constraints[length] = ValueRanges(0, bounds.upper)
    return exported


def _shapes(program: Program) -> dict[str, list[int | None]]:
    return {
        name: [None if axis in program.axes[name] else size for axis, size in enumerate(tensor.shape)]
        for name, tensor in program.inputs.items()
    }
