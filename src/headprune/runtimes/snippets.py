"""Code that runs exported programs with numpy and a runtime alone; people copy it, and tests execute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent

from headprune.runtimes.programs.seq2seq import STATES
from headprune.runtimes.spec import TOKENS

Shapes = Mapping[str, Sequence[int | None]]
PAST = "past_key_values."
ADVANCE = """new = outputs["logits"][:, -1:].argmax(-1)
past = {name.replace("present", "past_key_values"): outputs[name] for name in outputs if name != "logits"}
ids = np.concatenate([ids, new], axis=1)"""


def snippet(load: str, ending: str, parts: Mapping[str, Shapes]) -> str:
    """`load` defines `load(file)`, which gives a function from arrays by name to arrays by name."""
    if "decoder" in parts:
        body = _written(ending, parts["encoder"], parts["decoder"])
    elif any(name.startswith(PAST) for name in parts["model"]):
        body = _continued(ending, parts["model"])
    else:
        body = _passed(ending, parts["model"])
    return f"{load.strip()}\n\n\n{body.strip()}\n"


def _passed(ending: str, shapes: Shapes) -> str:
    return f"""
model = load("DIR/model{ending}")
sample = dict(np.load("DIR/sample.npz"))  # {", ".join(shapes)}
for name, value in model(sample).items():
    print(name, value.shape, value.ravel()[:8])
"""


def _continued(ending: str, shapes: Shapes) -> str:
    return f"""
model = load("DIR/model{ending}")
ids = np.load("DIR/sample.npz")["input_ids"]  # one text, as tokens
{_remembered(shapes, "")}
new = ids
for _ in range({TOKENS}):
{indent(_fed(shapes), "    ")}
    outputs = model(fed)
{indent(ADVANCE, "    ")}
print(ids[0])
"""


def _written(ending: str, read: Shapes, written: Shapes) -> str:
    carried = "" if STATES in written else f'\ndel read["{STATES}"]  # nothing looks at it'
    if "encoder_attention_mask" in written:
        carried += '\nread["encoder_attention_mask"] = sample["attention_mask"]'
    return f"""
encoder, decoder = load("DIR/encoder{ending}"), load("DIR/decoder{ending}")
sample = dict(np.load("DIR/sample.npz"))
found = encoder({{name: sample[name] for name in {list(read)!r}}})
read = {{name.replace("present", "past_key_values"): value for name, value in found.items()}}{carried}
ids = sample["decoder_input_ids"][:, :1]
{_remembered(written, "decoder.")}
new = ids
for _ in range({TOKENS}):
{indent(_fed(written, ", **read"), "    ")}
    outputs = decoder(fed)
{indent(ADVANCE, "    ")}
print(ids[0])
"""


def _remembered(shapes: Shapes, side: str) -> str:
    """What is remembered before the first token: keys and values of each layer that attends, for no tokens."""
    layers = {
        int(name.split(".")[1]): (shape[1], shape[3])
        for name, shape in shapes.items()
        if name.startswith(PAST) and name.endswith(f"{side}key") and (side or name.count(".") == 2)
    }
    return f"""heads = {layers!r}  # by layer: KV heads and their width
past = {{f"past_key_values.{{layer}}.{side}{{part}}": np.zeros((1, number, 0, width), np.float32)
        for layer, (number, width) in heads.items() for part in ("key", "value")}}"""


def _fed(shapes: Shapes, more: str = "") -> str:
    text = f'fed = {{"input_ids": new, "attention_mask": np.ones_like(ids), **past{more}}}'
    if "position_ids" in shapes:
        text += '\nfed["position_ids"] = np.arange(ids.shape[1])[None, -new.shape[1]:]'
    return text
