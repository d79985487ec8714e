"""Programs as ONNX files, in float or with weights in int8."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.extras import needed
from headprune.runtimes.programs import Program, Programs

LARGEST = 1_500_000_000  # bytes of weights in one file; protobuf ends at two gigabytes


def write_programs(programs: Programs, folder: Path, quantize: str | None = None) -> None:
    """One file per program, named after it."""
    for program in programs.parts:
        file = folder / f"{program.name}.onnx"
        _write(program, file)
        if quantize is not None:
            _quantize(file)


def _write(program: Program, file: Path) -> None:
    first: ExportError | None = None
    for attempt in program.attempts():
        try:
            return _write_form(attempt, file)
        except ExportError as error:
            first = first or error
    assert first is not None
    raise first


def _write_form(program: Program, file: Path) -> None:
    outputs = list(program.outputs())
    with needed("onnx", "Exports to ONNX need"), quiet(), torch.no_grad():
        try:
            made = torch.onnx.export(
                program.module,
                (),
                kwargs={"inputs": dict(program.inputs)},
                dynamo=True,
                dynamic_shapes={"inputs": {name: dict(axes) for name, axes in program.axes.items()}},
                input_names=list(program.inputs),
                output_names=outputs,
                verbose=False,
                custom_translation_table=_translations(),
            )
        except torch.onnx.OnnxExporterError as error:
            raise ExportError(
                f"PyTorch cannot turn this model into ONNX ({_reason(error)}); export it with --to torch, or report "
                "the model family."
            ) from error
        assert made is not None
        weights = sum(tensor.numel() * tensor.element_size() for tensor in program.module.state_dict().values())
        made.save(file, external_data=weights > LARGEST)


def _translations() -> dict[Any, Any]:
    """Operations that PyTorch's exporter does not know. This one is in checks of image-text models."""
    from onnx import TensorProto
    from onnxscript import opset18 as op

    def all_true(self: Any) -> Any:
        return op.Cast(op.ReduceMin(op.Cast(self, to=TensorProto.INT32), keepdims=0), to=TensorProto.BOOL)

    return {torch.ops.aten._is_all_true.default: all_true}


def _quantize(file: Path) -> None:
    """Weights of matrix products in int8, activations when they are there: ONNX Runtime's dynamic quantisation.

    Seven bits of the eight are used: without VNNI, processors add products of eight bits in sixteen and overflow.
    """
    with needed("onnx", "Quantised exports need"), quiet():
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        # Shapes inside the graph are those before PyTorch's exporter turned weights round; they are found again.
        model = onnx.load(file)
        del model.graph.value_info[:]
        quantize_dynamic(
            model,
            str(file),
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
            use_external_data_format=model.ByteSize() > LARGEST,
        )


def _reason(error: BaseException) -> str:
    """The first cause, in a line: PyTorch's own messages are pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the remarks of exporters on their own progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # Bars are drawn on stdout, which is for what was asked for.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
