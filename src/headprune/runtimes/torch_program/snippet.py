"""Code that runs exported programs with torch alone, which does not bring numpy; people copy it, tests execute it."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent

import torch

from headprune.runtimes.programs.seq2seq import STATES
from headprune.runtimes.spec import TOKENS
from headprune.runtimes.torch_program.write import Shapes

PAST = "past_key_values."
SHOWN = 256  # more numbers than this are not written down

LOAD = """
import torch


def load(name):
    program = torch.export.load(f"DIR/{name}.pt2").module()
    return lambda fed: program(inputs=fed)
"""
COMPILED = """
import torch


def load(name):  # the compiled program; torch.export.load(f"DIR/{name}.pt2").module() is the same on any processor
    program = torch._inductor.aoti_load_package(f"DIR/{name}.aoti.pt2")
    return lambda fed: program(inputs={key: value.contiguous() for key, value in fed.items()})
"""


def snippet(parts: Mapping[str, Shapes], sample: Mapping[str, torch.Tensor], *, compiled: bool) -> str:
    if "decoder" in parts:
        body = _written(parts["encoder"], parts["decoder"], sample)
    elif "position_ids" in parts["model"] or any(name.startswith(PAST) for name in parts["model"]):
        body = _continued(parts["model"], sample)
    else:
        body = _passed(parts["model"], sample)
    load = COMPILED if compiled else LOAD
    return f"{load.strip()}\n\n\n{body.strip()}\n"


def _passed(shapes: Shapes, sample: Mapping[str, torch.Tensor]) -> str:
    return f"""
model = load("model")
{_literals("inputs", shapes, sample)}
for name, value in model(inputs).items():
    print(name, tuple(value.shape), value.flatten()[:8].tolist())
"""


def _continued(shapes: Shapes, sample: Mapping[str, torch.Tensor]) -> str:
    return f"""
model = load("model")
ids = {_literal(sample["input_ids"])}  # one text, as tokens
{_loop("model", shapes, "")}
"""


def _written(read: Shapes, written: Shapes, sample: Mapping[str, torch.Tensor]) -> str:
    carried = f'\nread["{STATES}"] = found["{STATES}"]' if STATES in written else ""
    if "encoder_attention_mask" in written:
        carried += '\nread["encoder_attention_mask"] = inputs["attention_mask"]'
    return f"""
encoder, decoder = load("encoder"), load("decoder")
{_literals("inputs", read, sample)}
found = encoder(inputs)
read = {{key.replace("present", "past_key_values"): found[key] for key in found if key.startswith("present")}}{carried}
ids = {_literal(sample["decoder_input_ids"][:, :1])}
{_loop("decoder", written, "decoder.", ", **read")}
"""


def _loop(name: str, shapes: Shapes, side: str, more: str = "") -> str:
    """The most probable token, again and again. Where no layer attends, nothing is remembered, and all is read anew."""
    layers = {
        int(given.split(".")[1]): (shape[1], shape[3])
        for given, shape in shapes.items()
        if given.startswith(PAST) and given.endswith(f".{side}key") and (side or given.count(".") == 2)
    }
    new = "new" if layers else "ids"
    positions = f'fed["position_ids"] = torch.arange(ids.shape[1])[None, -{new}.shape[1]:]\n'
    step = f"""fed = {{"input_ids": {new}, "attention_mask": torch.ones_like(ids), **past{more}}}
{positions if "position_ids" in shapes else ""}outputs = {name}({{key: fed[key] for key in order}})
new = outputs["logits"][:, -1:].argmax(-1)
past = {{key.replace("present", "past_key_values"): outputs[key] for key in outputs if key != "logits"}}
ids = torch.cat([ids, new], dim=1)"""
    return f"""heads = {layers!r}  # by layer: KV heads and their width
past = {{f"past_key_values.{{layer}}.{side}{{part}}": torch.zeros(1, number, 0, width)
        for layer, (number, width) in heads.items() for part in ("key", "value")}}
order = {list(shapes)!r}
new = ids
for _ in range({TOKENS}):
{indent(step, "    ")}
print(ids[0].tolist())"""


def _literals(name: str, shapes: Shapes, sample: Mapping[str, torch.Tensor]) -> str:
    lines = "".join(f'    "{given}": {_literal(sample[given])},\n' for given in shapes)
    return f"{name} = {{\n{lines}}}"


def _literal(tensor: torch.Tensor) -> str:
    """Code that makes such a tensor: tokens as they are, and noise for images and sound."""
    shape = ", ".join(map(str, tensor.shape))
    if tensor.is_floating_point():
        return f"torch.randn({shape})"
    kind = "" if tensor.dtype == torch.int64 else f", dtype={tensor.dtype}"
    if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
        return f"torch.full(({shape},), {tensor.flatten()[0].item()!r}{kind})"
    if tensor.numel() > SHOWN:
        return f"torch.zeros({shape}, dtype={tensor.dtype})"
    return f"torch.tensor({tensor.tolist()!r}{kind})"
