"""Writes programs as ONNX files, in float or with weights in int8."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.programs import Program, Programs
from headprune.exports.quiet import quiet, reason
from headprune.extras import require

LARGEST = 1_500_000_000  # bytes of weights in one file; protobuf is limited to two gigabytes


def write_programs(programs: Programs, folder: Path, quantize: str | None = None) -> None:
    """One file per program, named after it."""
    for program in programs.parts:
        name = f"{program.name}.onnx"
        if quantize is None:
            _write(program, folder / name)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            _write(program, Path(temporary) / name)
            _quantize(Path(temporary) / name, folder / name, large=_bytes(program) > LARGEST)


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
            exported = torch.onnx.export(
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
        assert exported is not None
        _remove_source_paths(exported.model)
        exported.save(file, external_data=_bytes(program) > LARGEST)


def _bytes(program: Program) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in program.module.state_dict().values())


def _remove_source_paths(model: Any) -> None:
    """Remove the source lines of nodes, with paths of this machine: they take more space than the weights of a small
    model."""
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
    """Operations that PyTorch's exporter does not support; this one is used in checks of image-text models."""
    from onnx import TensorProto
    from onnxscript import opset18 as op

    def all_true(self: Any) -> Any:
        return op.Cast(op.ReduceMin(op.Cast(self, to=TensorProto.INT32), keepdims=0), to=TensorProto.BOOL)

    return {torch.ops.aten._is_all_true.default: all_true}


def _quantize(file: Path, quantized: Path, *, large: bool) -> None:
    """ONNX Runtime's dynamic quantisation of matrix products: weights in int8 in the file, activations at run time.

    Only seven bits are used: without VNNI, processors add products of eight bits in sixteen and overflow.
    """
    with require("onnx", "Quantised exports need"), quiet():
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        # Shapes inside the graph are those before PyTorch's exporter transposed weights; they are inferred again.
        model = onnx.load(file)
        del model.graph.value_info[:]
        quantize_dynamic(
            model,
            str(quantized),
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
            use_external_data_format=large,
        )
