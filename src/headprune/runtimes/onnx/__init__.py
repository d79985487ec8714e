"""ONNX files, written by PyTorch's own exporter, run and quantised by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from headprune.runtimes.onnx.run import open_folder
from headprune.runtimes.onnx.write import write_programs
from headprune.runtimes.programs import programs_of
from headprune.runtimes.running import ProgramRunner
from headprune.runtimes.sample import write_sample
from headprune.runtimes.snippets import snippet
from headprune.runtimes.spec import Runtime, Source, runtime

LOAD = """
import numpy as np
import onnxruntime


def load(file):
    session = onnxruntime.InferenceSession(file)
    names = [each.name for each in session.get_outputs()]
    return lambda fed: dict(zip(names, session.run(names, fed)))
"""


@runtime
class OnnxRuntime(Runtime):
    name = "onnx"
    title = "ONNX Runtime"
    extra = "onnx"
    modules = ("onnx", "onnxscript", "onnxruntime")
    quantizations = ("int8",)
    install = "onnxruntime"
    in_caller = True

    def refuse(self, source: Source) -> None:
        """What cannot be traced is refused by PyTorch when it is tried."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        write_programs(programs_of(source), folder, quantize)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        return open_folder(folder, threads=threads)

    def snippet(self, folder: Path) -> str:
        return snippet(LOAD, ".onnx", {name: part.shapes for name, part in self.open(folder).parts.items()})
