"""Exports to OpenVINO by way of ONNX; weights in int8 by NNCF."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.onnx.write import write_programs
from headprune.exports.program_runner import Part, ProgramRunner
from headprune.exports.programs import programs_of
from headprune.exports.programs.spec import Tensors
from headprune.exports.quiet import quiet, reason
from headprune.exports.runtime import Runtime, Source, runtime
from headprune.exports.sample_input import write_sample
from headprune.extras import require
from headprune.snippets.programs import OPENVINO, numpy_snippet


@runtime
class OpenVino(Runtime):
    name = "openvino"
    title = "OpenVINO"
    extra = "openvino"
    modules = ("onnx", "onnxscript", "openvino", "nncf")
    quantizations = ("int8",)
    install = "openvino"

    def refuse(self, source: Source) -> None:
        """PyTorch raises while tracing where a model cannot be exported."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        programs = programs_of(source)
        with tempfile.TemporaryDirectory() as temporary:
            write_programs(programs, Path(temporary))
            for program in programs.parts:
                convert(Path(temporary) / f"{program.name}.onnx", folder / f"{program.name}.xml", quantize)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        with require("openvino", "Exports to OpenVINO need"):
            import openvino
        # In float32: by default OpenVINO computes in bfloat16 where the processor can.
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        core = openvino.Core()
        models = {file.stem: core.compile_model(str(file), "CPU", settings) for file in sorted(folder.glob("*.xml"))}
        return ProgramRunner({name: _part(model) for name, model in models.items()})

    def snippet(self, folder: Path) -> str:
        return numpy_snippet(OPENVINO, self.open(folder).shapes)


def convert(onnx: Path, file: Path, quantize: str | None) -> None:
    """Convert an ONNX file to OpenVINO's format."""
    with require("openvino", "Exports to OpenVINO need"), quiet():
        import openvino

        try:
            model = openvino.convert_model(str(onnx))
        except RuntimeError as error:
            raise ExportError(
                f"OpenVINO cannot read this model ({reason(error)}); export it with --to onnx."
            ) from error
        if quantize is not None:
            import nncf

            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(model, str(file), compress_to_fp16=False)


def _part(model: Any) -> Part:
    shapes = {
        model_input.any_name: tuple(size.get_length() if size.is_static else None for size in model_input.partial_shape)
        for model_input in model.inputs
    }

    def call(inputs: Tensors) -> Tensors:
        results = model({name: tensor.detach().contiguous().numpy() for name, tensor in inputs.items()})
        return {each.any_name: torch.from_numpy(results[each].copy()) for each in model.outputs}

    return Part(call, shapes)
