"""Programs as ONNX files, in float or with weights in int8."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.extras import require
from headprune.runtimes.programs import Program, Programs
from headprune.runtimes.words import quiet, reason

LARGEST = 1_500_000_000  # bytes of weights in one file; protobuf ends at two gigabytes


def write_programs(programs: Programs, folder: Path, quantize: str | None = None) -> None:
    """One file per program, named after it."""
    for program in programs.parts:
        name = f"{program.name}.onnx"
        if quantize is None:
            _write(program, folder / name)
            continue
        with tempfile.TemporaryDirectory() as place:
            _write(program, Path(place) / name)
            _quantize(Path(place) / name, folder / name, large=_bytes(program) > LARGEST)


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
    with require("onnx", "Exports to ONNX need"), quiet(), torch.no_grad():
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
                f"PyTorch cannot turn this model into ONNX ({reason(error)}); export it with --to torch, or report "
                "the model family."
            ) from error
        assert made is not None
        _forget_origins(made.model)
        made.save(file, external_data=_bytes(program) > LARGEST)


def _bytes(program: Program) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in program.module.state_dict().values())


def _forget_origins(model: Any) -> None:
    """Every node knows the lines of code that it comes from, with the paths of this machine: more than the weights of a
    small model, and nobody's business."""
    graphs = [model.graph, *model.functions.values()]
    for graph in graphs:
        graph.metadata_props.clear()
        graph.doc_string = None
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
                value.doc_string = None
        for value in (*graph.inputs, *getattr(graph, "initializers", {}).values()):
            value.metadata_props.clear()


def _translations() -> dict[Any, Any]:
    """Operations that PyTorch's exporter does not know. This one is in checks of image-text models."""
    from onnx import TensorProto
    from onnxscript import opset18 as op

    def all_true(self: Any) -> Any:
        return op.Cast(op.ReduceMin(op.Cast(self, to=TensorProto.INT32), keepdims=0), to=TensorProto.BOOL)

    return {torch.ops.aten._is_all_true.default: all_true}


def _quantize(file: Path, small: Path, *, large: bool) -> None:
    """Weights of matrix products in int8, activations when they are there: ONNX Runtime's dynamic quantisation.

    Seven bits of the eight are used: without VNNI, processors add products of eight bits in sixteen and overflow.
    """
    with require("onnx", "Quantised exports need"), quiet():
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        # Shapes inside the graph are those before PyTorch's exporter turned weights round; they are found again.
        model = onnx.load(file)
        del model.graph.value_info[:]
        quantize_dynamic(
            model,
            str(small),
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
            use_external_data_format=large,
        )
