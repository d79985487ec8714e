"""Programs of torch.export: they run with torch alone, and compiled by AOTInductor where there is a C++ compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headprune.runtimes.programs import programs_of
from headprune.runtimes.running import ProgramRunner
from headprune.runtimes.sample import read_sample, write_sample
from headprune.runtimes.spec import Runtime, Source, runtime
from headprune.runtimes.torch_program.int8 import with_int8_weights
from headprune.runtimes.torch_program.run import open_folder
from headprune.runtimes.torch_program.snippet import snippet
from headprune.runtimes.torch_program.write import read_shapes, write_programs


@runtime
class TorchProgram(Runtime):
    name = "torch"
    title = "PyTorch (torch.export)"
    extra = ""  # nothing more than headprune itself needs
    modules = ("torch",)
    quantizations = ("int8",)
    install = "torch"

    def __init__(self, *, compiled: bool = True) -> None:
        self.compiled = compiled  # whether a compiler is used where there is one: that takes longer than all the rest

    def refuse(self, source: Source) -> None:
        """What cannot be traced is refused by PyTorch when it is tried."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        if quantize is not None:
            source = replace(source, model=with_int8_weights(source.model))
        write_programs(programs_of(source), folder, compiled=self.compiled)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        return open_folder(folder, threads=threads, compiled=self.compiled)

    def snippet(self, folder: Path) -> str:
        return snippet(read_shapes(folder), read_sample(folder), compiled=any(folder.glob("*.aoti.pt2")))
