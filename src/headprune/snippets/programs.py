"""Code that runs an exported model where nothing but its runtime is installed. `DIR` stands for the exported folder.

Every runtime has a function `load(name)`: it gives a function from arrays by name to arrays by name, which takes the
inputs of its program and ignores others. What follows is the same for all, in numpy or in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import NamedTuple

import torch

Shapes = Mapping[str, Sequence[int | None]]  # of a program's inputs; None where any length will do
PAST = "past_key_values."
NEW_TOKENS = 20
LARGEST_LITERAL = 256  # numbers; larger tensors are not written out

ONNX = """import numpy as np
import onnxruntime


def load(name):
    session = onnxruntime.InferenceSession(f"DIR/{name}.onnx")
    inputs, outputs = ([each.name for each in part] for part in (session.get_inputs(), session.get_outputs()))
    return lambda arrays: dict(zip(outputs, session.run(outputs, {key: arrays[key] for key in inputs})))
"""
OPENVINO = """import numpy as np
import openvino


def load(name):
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(f"DIR/{name}.xml", "CPU", settings)
    inputs = [each.any_name for each in model.inputs]

    def run(arrays):
        outputs = model({key: arrays[key] for key in inputs})
        return {each.any_name: outputs[each] for each in model.outputs}

    return run
"""
TORCH = """import json

import torch


def load(name):
    program = torch.export.load(f"DIR/{name}.pt2").module()
    with open("DIR/programs.json") as file:
        inputs = json.load(file)[name]  # in the order of the program
    return lambda tensors: program(inputs={key: tensors[key] for key in inputs})
"""
COMPILED = """import json

import torch


def load(name):  # the compiled program; torch.export.load(f"DIR/{name}.pt2").module() is the same on any processor
    program = torch._inductor.aoti_load_package(f"DIR/{name}.aoti.pt2")
    with open("DIR/programs.json") as file:
        inputs = json.load(file)[name]  # in the order of the program
    return lambda tensors: program(inputs={key: tensors[key].contiguous() for key in inputs})
"""
GGUF = '''"""pip install xllamacpp"""

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "DIR/model.gguf"
params.n_ctx = 2048
params.n_parallel = 1
server = xllamacpp.Server(params)
answer = server.handle_completions({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0})
print(answer["choices"][0]["text"])
'''


class Arrays(NamedTuple):
    """How a library of arrays writes what the code needs."""

    module: str
    zeros: str  # a cache of no tokens
    append: str
    shown: str  # one row of tokens as a list
    flat: str


NUMPY = Arrays(
    "np", "np.zeros((1, heads, 0, width), np.float32)", "np.concatenate([ids, new], axis=1)", "ids[0]", "ravel()[:8]"
)
TENSORS = Arrays(
    "torch",
    "torch.zeros(1, heads, 0, width)",
    "torch.cat([ids, new], dim=1)",
    "ids[0].tolist()",
    "flatten()[:8].tolist()",
)


def numpy_snippet(load: str, parts: Mapping[str, Shapes]) -> str:
    """For a runtime of numpy arrays: the sample input is the file of the folder."""
    return f'{load}\n\nsample = dict(np.load("DIR/sample.npz"))\n{_body(parts, NUMPY)}'


def torch_snippet(load: str, parts: Mapping[str, Shapes], sample: Mapping[str, torch.Tensor]) -> str:
    """For torch alone, which does not bring numpy: the sample input is written out."""
    names = [name for name in sample if name == "decoder_input_ids" or any(name in part for part in parts.values())]
    lines = "".join(f'    "{name}": {_literal(sample[name])},\n' for name in names)
    return f"{load}\n\nsample = {{\n{lines}}}\n{_body(parts, TENSORS)}"


def _body(parts: Mapping[str, Shapes], arrays: Arrays) -> str:
    if "decoder" in parts:
        return _encode_and_generate(parts["decoder"], arrays)
    if any(name.startswith(PAST) for name in parts["model"]):
        ids = 'model = load("model")\nids = sample["input_ids"]  # one text, as tokens\n'
        return ids + _generate("model", parts["model"], "", arrays)
    return f"""model = load("model")
for name, value in model(sample).items():
    print(name, tuple(value.shape), value.{arrays.flat})
"""


def _encode_and_generate(decoder: Shapes, arrays: Arrays) -> str:
    mask = 'encoded["encoder_attention_mask"] = sample["attention_mask"]\n'
    return f"""encoder, decoder = load("encoder"), load("decoder")
encoded = {{name.replace("present", "past_key_values"): value for name, value in encoder(sample).items()}}
{mask if "encoder_attention_mask" in decoder else ""}ids = sample["decoder_input_ids"][:, :1]
{_generate("decoder", decoder, "decoder.", arrays, ", **encoded")}"""


def _generate(program: str, shapes: Shapes, side: str, arrays: Arrays, more: str = "") -> str:
    """Greedy decoding with a KV cache, which is empty before the first token."""
    layers = {
        int(name.split(".")[1]): (shape[1], shape[3])
        for name, shape in shapes.items()
        if name.startswith(PAST) and name.endswith(f".{side}key") and (side or name.count(".") == 2)
    }
    module = arrays.module
    step = f"""inputs = {{"input_ids": new, "attention_mask": {module}.ones_like(ids), **past{more}}}
inputs["position_ids"] = {module}.arange(ids.shape[1])[None, -new.shape[1]:]
outputs = {program}(inputs)
new = outputs["logits"][:, -1:].argmax(-1)
past = {{name.replace("present", "past_key_values"): outputs[name] for name in outputs if name != "logits"}}
ids = {arrays.append}"""
    return f"""layers = {layers!r}  # KV heads and their width
past = {{f"past_key_values.{{layer}}.{side}{{part}}": {arrays.zeros}
        for layer, (heads, width) in layers.items() for part in ("key", "value")}}
new = ids
for _ in range({NEW_TOKENS}):
{indent(step, "    ")}
print({arrays.shown})
"""


def _literal(tensor: torch.Tensor) -> str:
    """Code that makes such a tensor: tokens as they are, and noise for images and audio."""
    shape = ", ".join(map(str, tensor.shape))
    if tensor.is_floating_point():
        return f"torch.randn({shape})"
    dtype = "" if tensor.dtype == torch.int64 else f", dtype={tensor.dtype}"
    if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
        return f"torch.full(({shape},), {tensor.flatten()[0].item()!r}{dtype})"
    if tensor.numel() > LARGEST_LITERAL:
        return f"torch.zeros({shape}, dtype={tensor.dtype})"
    return f"torch.tensor({tensor.tolist()!r}{dtype})"
