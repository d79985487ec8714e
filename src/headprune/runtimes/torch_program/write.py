"""Programs as files of torch.export: the graph and its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from headprune.errors import ExportError
from headprune.runtimes.programs import Program, Programs
from headprune.runtimes.torch_program.compiled import compile_program
from headprune.runtimes.words import quiet, reason

SHAPES = "programs.json"  # what each program takes, in its order: a compiled one cannot be asked
Shapes = dict[str, tuple[int | None, ...]]


def write_programs(programs: Programs, folder: Path, *, compiled: bool = True) -> None:
    """One file per program, named after it, and a compiled one beside it where that can be made."""
    shapes = {}
    for program in programs.parts:
        made, traced_as = traced(program)
        shapes[program.name] = _shapes(traced_as)
        if compiled:
            compile_program(made, folder / f"{program.name}.aoti.pt2")
        made.example_inputs = None  # real rows, which are not for everyone to see; compiled code does not hold them
        with quiet():
            torch.export.save(made, folder / f"{program.name}.pt2")
    (folder / SHAPES).write_text(json.dumps(shapes, indent=2) + "\n")


def read_shapes(folder: Path) -> Mapping[str, Shapes]:
    try:
        found = json.loads((folder / SHAPES).read_text())
        return {part: {name: tuple(shape) for name, shape in own.items()} for part, own in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise ExportError(f"{folder / SHAPES} is missing or damaged; export the model again.") from None


def traced(program: Program) -> tuple[ExportedProgram, Program]:
    """The graph, and the form of the program that it is of."""
    first: ExportError | None = None
    for attempt in program.attempts():
        try:
            return _traced(attempt), attempt
        except ExportError as error:
            first = first or error
    assert first is not None
    raise first


def _traced(program: Program) -> ExportedProgram:
    free = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in program.axes.items()}
    with quiet(), torch.no_grad():
        try:
            made = torch.export.export(
                program.module, (), kwargs={"inputs": dict(program.inputs)}, dynamic_shapes={"inputs": free}
            )
        except Exception as error:  # whatever tracing runs into: its errors have no common kind
            raise ExportError(
                f"PyTorch cannot trace this model ({reason(error)}); save it with headprune.save, or report the model "
                "family."
            ) from error
    # Examples are two long at least, from which tracing concludes that sums of lengths are four. Shorter ones compute
    # as well: nothing is remembered before the first token, and one token follows the other.
    for length, bounds in made.range_constraints.items():
        made.range_constraints[length] = ValueRanges(0, bounds.upper)
    return made


def _shapes(program: Program) -> dict[str, list[int | None]]:
    return {
        name: [None if axis in program.axes[name] else size for axis, size in enumerate(tensor.shape)]
        for name, tensor in program.inputs.items()
    }
