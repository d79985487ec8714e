"""Runs ONNX files in ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headprune.exports.program_runner import Part, ProgramRunner
from headprune.exports.programs.spec import Tensors
from headprune.extras import require


def open_folder(folder: Path, *, threads: int | None = None) -> ProgramRunner:
    with require("onnx", "Exports to ONNX need"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    parts = {}
    for file in sorted(folder.glob("*.onnx")):
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        parts[file.stem] = _part(session)
    return ProgramRunner(parts)


def _part(session: Any) -> Part:
    names = [output.name for output in session.get_outputs()]
    shapes = {
        entry.name: tuple(size if isinstance(size, int) else None for size in entry.shape)
        for entry in session.get_inputs()
    }

    def call(inputs: Tensors) -> Tensors:
        arrays = {name: tensor.detach().contiguous().numpy() for name, tensor in inputs.items()}
        return {name: torch.from_numpy(value) for name, value in zip(names, session.run(names, arrays), strict=True)}

    return Part(call, shapes)
