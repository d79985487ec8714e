"""OpenVINO's own files, read from ONNX ones; weights in int8 by NNCF."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.extras import require
from headprune.runtimes.onnx.write import write_programs
from headprune.runtimes.programs import programs_of
from headprune.runtimes.programs.spec import Tensors
from headprune.runtimes.running import Part, ProgramRunner
from headprune.runtimes.sample import write_sample
from headprune.runtimes.snippets import snippet
from headprune.runtimes.spec import Runtime, Source, runtime
from headprune.runtimes.words import quiet, reason

LOAD = """
import numpy as np
import openvino


def load(file):
    model = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    taken = {each.any_name for each in model.inputs}

    def run(fed):
        outputs = model({name: fed[name] for name in taken})
        return {each.any_name: outputs[each] for each in model.outputs}

    return run
"""


@runtime
class OpenVino(Runtime):
    name = "openvino"
    title = "OpenVINO"
    extra = "openvino"
    modules = ("onnx", "onnxscript", "openvino", "nncf")
    quantizations = ("int8",)
    install = "openvino"

    def refuse(self, source: Source) -> None:
        """What cannot be traced is refused by PyTorch when it is tried."""

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        programs = programs_of(source)
        with tempfile.TemporaryDirectory() as place:
            write_programs(programs, Path(place))
            for program in programs.parts:
                convert(Path(place) / f"{program.name}.onnx", folder / f"{program.name}.xml", quantize)
        write_sample(source, folder)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> ProgramRunner:
        with require("openvino", "Exports to OpenVINO need"):
            import openvino
        # In float32 as it was written: by itself OpenVINO would compute in bfloat16 where the processor can.
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        core = openvino.Core()
        models = {file.stem: core.compile_model(str(file), "CPU", settings) for file in sorted(folder.glob("*.xml"))}
        return ProgramRunner({name: _part(model) for name, model in models.items()})

    def snippet(self, folder: Path) -> str:
        return snippet(LOAD, ".xml", {name: part.shapes for name, part in self.open(folder).parts.items()})


def convert(onnx: Path, file: Path, quantize: str | None) -> None:
    """Read an ONNX file, and write it as OpenVINO's."""
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
        given.any_name: tuple(size.get_length() if size.is_static else None for size in given.partial_shape)
        for given in model.inputs
    }

    def call(inputs: Tensors) -> Tensors:
        found = model({name: tensor.detach().contiguous().numpy() for name, tensor in inputs.items()})
        return {each.any_name: torch.from_numpy(found[each].copy()) for each in model.outputs}

    return Part(call, shapes)
