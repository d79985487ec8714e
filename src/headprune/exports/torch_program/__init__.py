"""Exports to torch.export: programs run with torch alone, compiled by AOTInductor where there is a C++ compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headprune.exports.program_runner import ProgramRunner
from headprune.exports.programs import programs_of
from headprune.exports.runtime import Runtime, Source, runtime
from headprune.exports.sample_input import read_sample, write_sample
from headprune.exports.torch_program.int8 import with_int8_weights
from headprune.exports.torch_program.run import open_folder
from headprune.exports.torch_program.write import read_shapes, write_programs
from headprune.snippets.programs import COMPILED, TORCH, torch_snippet


@runtime
class TorchProgram(Runtime):
    name = "torch"
    title = "PyTorch (torch.export)"
    extra = ""  # no further packages
    modules = ("torch",)
    quantizations = ("int8",)
    install = "torch"

    def __init__(self, *, compiled: bool = True) -> None:
        self.compiled = compiled  # whether to compile where there is a compiler, which takes longer than all the rest

    def refuse(self, source: Source) -> None:
        """PyTorch raises while tracing where a model cannot be exported."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        if quantize is not None:
            source = replace(source, model=with_int8_weights(source.model))
        write_programs(programs_of(source), folder, compiled=self.compiled)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        return open_folder(folder, threads=threads, compiled=self.compiled)

    def snippet(self, folder: Path) -> str:
        load = COMPILED if any(folder.glob("*.aoti.pt2")) else TORCH
        return torch_snippet(load, read_shapes(folder), read_sample(folder))
