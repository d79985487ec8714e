"""Exports to ONNX by PyTorch's exporter; ONNX Runtime runs and quantises the files."""

from __future__ import annotations

from pathlib import Path

from headprune.exports.onnx.run import open_folder
from headprune.exports.onnx.write import write_programs
from headprune.exports.program_runner import ProgramRunner
from headprune.exports.programs import programs_of
from headprune.exports.runtime import Runtime, Source, runtime
from headprune.exports.sample_input import write_sample
from headprune.snippets.programs import ONNX, numpy_snippet


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
        """PyTorch raises while tracing where a model cannot be exported."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        write_programs(programs_of(source), folder, quantize)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        return open_folder(folder, threads=threads)

    def snippet(self, folder: Path) -> str:
        return numpy_snippet(ONNX, self.open(folder).shapes)
