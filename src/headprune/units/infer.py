"""Reading a model family that is not in the table: which linear maps feed the attention, from names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from headprune.units.code import forward_code
from headprune.units.families import Family, Layout
from headprune.units.linear import in_features, is_plain, out_features
from headprune.units.paths import absolute, submodule
from headprune.units.quirks import CACHE_ARGUMENTS, is_empty

INFERRED = Family("inferred", (), ())

QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
)
OUTPUT = ("o_proj", "out_proj", "o", "dense", "c_proj", "Wo", "wo", "out_lin", "proj", "projection", "to_out.0")
PARENT_OUTPUT = ("../output.dense", "../dense", "../out_proj", "../output")
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head", "d_kv")
HEAD_COUNT = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
CROSS_WORDS = ("cross", "encoder_attn", "encdec", "enc_dec")


def find_attention(model: nn.Module) -> list[tuple[str, Layout]]:
    """Path and layout of every module whose projections can be recognised without doubt.

    Fused projections are not guessed: whether q, k and v come block after block or head by head cannot be seen in a
    weight, and a wrong guess would be silently wrong.
    """
    found = []
    for path, module in model.named_modules():
        layout = _layout(model, path, module)
        if layout is not None:
            found.append((path, layout))
    return found


def _layout(model: nn.Module, path: str, module: Any) -> Layout | None:
    children = dict(module.named_children())
    cross = any(word in path.lower() for word in CROSS_WORDS)
    if is_empty(module):
        inside = module.headprune_empty["o"]
        output = inside or next(o for o in PARENT_OUTPUT if submodule(model, absolute(path, o)) is not None)
        return Layout(path, "q", "k", "v", output, attention="cross" if cross else "self")
    for names in QUERY_KEY_VALUE:
        if not all(name in children and is_plain(children[name]) for name in names):
            continue
        q, k, v = (children[name] for name in names)
        if out_features(k) != out_features(v) or out_features(q) % out_features(k):
            return None
        for name in (*OUTPUT, *PARENT_OUTPUT):
            found = submodule(model, absolute(path, name))
            if found is not None and is_plain(found) and in_features(found) == out_features(q):
                return Layout(path, *names, name, attention="cross" if cross else "self")
    return None


def head_dim(module: nn.Module, rows: int, pruned: bool) -> int | None:
    """The width of a head; a head count serves only while no head has gone, since it may not follow removals."""
    for name in HEAD_DIM:
        width = getattr(module, name, None)
        if isinstance(width, int):
            return width
    if not pruned:
        for name in HEAD_COUNT:
            count = getattr(module, name, None)
            if isinstance(count, int) and count and rows % count == 0:
                return rows // count
    return None


def obstacle(module: nn.Module, width: int, heads: int, kv_heads: int) -> str:
    """Why a family that nobody described should not be pruned: something else in it may have a head axis."""
    known = {name for names in QUERY_KEY_VALUE for name in names} | {name.split(".")[0] for name in OUTPUT}
    sizes = {count * per for count in (heads, kv_heads) for per in (1, width)} - {1, width}
    for name, child in module.named_children():
        if name not in known and any(sizes & set(parameter.shape) for parameter in child.parameters()):
            return f"its {name} may have a head axis, and headprune does not know this family"
        if _normalised(child) not in (0, width) and not list(child.parameters()):
            return f"its {name} normalises {_normalised(child)} numbers at once, which is more than one head of {width}"
    code = forward_code(module)
    if code is None or not any(code.reach.issuperset(names) for names in QUERY_KEY_VALUE):
        return "the code of its forward cannot be seen (a wrapper hides it?), and headprune does not know this family"
    if any(name in code.arguments for name in CACHE_ARGUMENTS) and not hasattr(module, "layer_idx"):
        return "it keeps a KV cache but does not say which layer it is"
    for name in ("embed_dim", "hidden_size", "d_model"):
        if name in code.reach:
            return f"its forward code counts on {name}, and headprune does not know this family"
    if "chunk" in code.names:
        return (
            "its forward code splits tensors with chunk, which may pair heads, and headprune does not know this family"
        )
    return ""


def _normalised(module: nn.Module) -> int:
    """How many numbers a normalisation takes together; 0 where the module does not say so."""
    shape = getattr(module, "normalized_shape", ())
    return int(shape[-1]) if shape else 0


def stack(model: nn.Module, path: str) -> str:
    """Which part of a model a site belongs to, where its path does not say."""
    if hasattr(model.config, "patch_size"):
        return "vision"
    return "decoder" if getattr(model.get_submodule(path), "is_causal", False) else "encoder"


def first_unread(model: nn.Module, read: Sequence[str] = ()) -> str:
    """The first module that looks like attention and belongs to none of the paths that were read."""
    for path, module in model.named_modules():
        looks = "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()
        own_weights = any(is_plain(child) for child in module.children()) or list(module.parameters(recurse=False))
        related = any(path == p or p.startswith(path + ".") or path.startswith(p + ".") for p in read)
        if looks and own_weights and not related:
            return f"{path} ({type(module).__name__})"
    return ""
