"""The table of families: where each keeps its attention and feed-forward layers, one declarative entry per family."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headprune.errors import RegistrationError
from headprune.units.quirks import QUIRKS


@dataclass(frozen=True)
class Layout:
    """One kind of attention module: the end of its path, and its projections relative to it.

    A name given to several of q, k and v is a fused projection: blocks one after the other, or, `interleaved`, the
    q, k and v rows of each head side by side. A path that starts with `../` begins at the parent module.
    """

    suffix: str
    q: str
    k: str
    v: str
    o: str
    attention: Literal["self", "cross"] = "self"
    interleaved: bool = False
    like_q: tuple[str, ...] = ()  # further projections whose rows follow the query heads
    like_k: tuple[str, ...] = ()  # further projections whose rows follow the key heads
    tensors: tuple[str, ...] = ()  # further parameters whose first axis has an entry of every query head


@dataclass(frozen=True)
class FeedForward:
    """One kind of feed-forward layer: the linear maps that produce its neurons and the one that takes them, by their
    paths in the module that contains them all. A fused map has several `blocks`, one after the other."""

    maps: tuple[str, ...]
    down: str
    blocks: int = 1
    interleaved: bool = False  # the entries of the blocks alternate
    others: tuple[tuple[str, int], ...] = ()  # further tensors with an axis of neurons, and that axis
    within: str = ""  # the path of the module, numbers written as *; empty for any
    may_empty: bool = True


@dataclass(frozen=True)
class Family:
    """A group of model types that store their attention in the same way."""

    name: str
    model_types: tuple[str, ...]
    layouts: tuple[Layout, ...]
    stack: Literal["encoder", "decoder", "vision", "text"] = "encoder"
    head_dim: str = "head_dim"  # attribute of the attention module; head counts are read from the weights
    quirk: str = ""
    # names of two config numbers: how often a site runs = the first divided by the second
    applications: tuple[str, str] | None = None
    towers: tuple[str, ...] = ()  # words in paths, in order of execution, where modules are declared otherwise
    feed_forward: tuple[FeedForward, ...] = ()  # discovered where empty


_BERT = (
    Layout("attention.self", "query", "key", "value", "../output.dense"),
    Layout("crossattention.self", "query", "key", "value", "../output.dense", attention="cross"),
)
_BART = (
    Layout("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    Layout("encoder_attn", "q_proj", "k_proj", "v_proj", "out_proj", attention="cross"),
)
_LLAMA = (Layout("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),)
_BERT_NEURONS = (FeedForward(("intermediate.dense",), "output.dense"),)
_BART_NEURONS = (FeedForward(("fc1",), "fc2"),)
_NEOX_NEURONS = (FeedForward(("dense_h_to_4h",), "dense_4h_to_h"),)

FAMILIES: list[Family] = [
    Family(
        "bert",
        ("bert", "roberta", "xlm-roberta", "electra"),
        _BERT,
        head_dim="attention_head_size",
        feed_forward=_BERT_NEURONS,
    ),
    Family(
        "albert",
        ("albert",),
        (Layout("attention", "query", "key", "value", "dense"),),
        head_dim="attention_head_size",
        quirk="albert",
        applications=("num_hidden_layers", "num_hidden_groups"),
        feed_forward=(FeedForward(("ffn",), "ffn_output"),),
    ),
    Family(
        "distilbert",
        ("distilbert",),
        (Layout("attention", "q_lin", "k_lin", "v_lin", "out_lin"),),
        head_dim="attention_head_size",
        feed_forward=(FeedForward(("lin1",), "lin2"),),
    ),
    Family(
        "deberta-v2",
        ("deberta-v2",),
        (
            Layout(
                "attention.self",
                "query_proj",
                "key_proj",
                "value_proj",
                "../output.dense",
                like_q=("pos_query_proj",),
                like_k=("pos_key_proj",),
            ),
        ),
        head_dim="attention_head_size",
        feed_forward=_BERT_NEURONS,
    ),
    Family(
        "mpnet",
        ("mpnet",),
        (Layout("attention.attn", "q", "k", "v", "o"),),
        head_dim="attention_head_size",
        quirk="mpnet",
        feed_forward=_BERT_NEURONS,
    ),
    Family(
        "modernbert",
        ("modernbert",),
        (Layout("attn", "Wqkv", "Wqkv", "Wqkv", "Wo"),),
        quirk="modernbert",
        feed_forward=(FeedForward(("Wi",), "Wo", blocks=2),),
    ),
    Family(
        "gpt2",
        ("gpt2",),
        (
            Layout("attn", "c_attn", "c_attn", "c_attn", "c_proj"),
            Layout("crossattention", "q_attn", "c_attn", "c_attn", "c_proj", attention="cross"),
        ),
        stack="decoder",
        quirk="gpt2",
        feed_forward=(FeedForward(("c_fc",), "c_proj"),),
    ),
    Family(
        "gpt-neox",
        ("gpt_neox",),
        (Layout("attention", *("query_key_value",) * 3, "dense", interleaved=True),),
        stack="decoder",
        head_dim="head_size",
        feed_forward=_NEOX_NEURONS,
    ),
    Family(
        "bloom",
        ("bloom",),
        (Layout("self_attention", *("query_key_value",) * 3, "dense", interleaved=True),),
        stack="decoder",
        quirk="bloom",
        feed_forward=_NEOX_NEURONS,
    ),
    Family(
        "llama",
        ("llama", "mistral", "qwen2", "qwen3", "gemma2"),
        _LLAMA,
        stack="decoder",
        feed_forward=(FeedForward(("gate_proj", "up_proj"), "down_proj"),),
    ),
    Family(
        "all-attention",
        ("all_attention",),
        (replace(_LLAMA[0], tensors=("persistent_keys", "persistent_values")),),
        stack="decoder",
    ),
    Family(
        "phi3",
        ("phi3",),
        (Layout("self_attn", *("qkv_proj",) * 3, "o_proj"),),
        stack="decoder",
        feed_forward=(FeedForward(("gate_up_proj",), "down_proj", blocks=2),),
    ),
    Family(
        "t5",
        ("t5", "mt5"),
        (
            Layout("SelfAttention", "q", "k", "v", "o"),
            Layout("EncDecAttention", "q", "k", "v", "o", attention="cross"),
        ),
        head_dim="key_value_proj_dim",
        quirk="t5",
        feed_forward=(FeedForward(("wi",), "wo"), FeedForward(("wi_0", "wi_1"), "wo")),
    ),
    Family("bart", ("bart", "whisper"), _BART, feed_forward=_BART_NEURONS),
    Family("opt", ("opt",), _BART[:1], stack="decoder", feed_forward=_BART_NEURONS),
    Family(
        "vit",
        ("vit",),
        (Layout("attention", "q_proj", "k_proj", "v_proj", "o_proj"),),
        stack="vision",
        feed_forward=_BART_NEURONS,
    ),
    Family(
        "clip",
        ("clip", "clip_text_model", "clip_vision_model"),
        _BART[:1],
        stack="vision",
        towers=("vision_model", "text_model"),
        feed_forward=_BART_NEURONS,
    ),
]


def family_of(model_type: str) -> Family | None:
    """The table's entry for a model type, if there is one."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def supported_model_types() -> list[str]:
    return [model_type for family in FAMILIES for model_type in family.model_types]


def register_family(
    name: str,
    *,
    model_types: Sequence[str],
    layouts: Sequence[Layout],
    stack: Literal["encoder", "decoder", "vision", "text"] = "encoder",
    head_dim: str = "head_dim",
    quirk: str = "",
    applications: tuple[str, str] | None = None,
    towers: Sequence[str] = (),
    feed_forward: Sequence[FeedForward] = (),
) -> Family:
    """Register where a model family keeps its attention, and its feed-forward layers.

        headprune.register_family(
            "mymodel",
            model_types=["my_model_type"],
            layouts=[headprune.Layout("self_attn", q="wq", k="wk", v="wv", o="wo")],
        )

    The fields are those of `Layout`, `FeedForward` and `Family`; `model_types` are the values of `config.model_type`.
    Feed-forward layers that are not named are found by experiment.
    """
    if not name or not model_types or not layouts:
        raise RegistrationError("A family needs a name, at least one model type and at least one Layout.")
    if isinstance(model_types, str):
        raise RegistrationError(f"model_types must be a list of names, such as [{model_types!r}], not one string.")
    if any(family.name == name for family in FAMILIES):
        raise RegistrationError(f"A family named {name!r} exists already; choose another name.")
    for model_type in model_types:
        other = family_of(model_type)
        if other is not None:
            raise RegistrationError(f"Model type {model_type!r} belongs to family {other.name!r} already.")
    if quirk not in QUIRKS:
        near = difflib.get_close_matches(quirk, QUIRKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(QUIRKS)[1:])}."
        raise RegistrationError(f"There is no quirk {quirk!r}{hint}")
    family = Family(
        name,
        tuple(model_types),
        tuple(layouts),
        stack,
        head_dim,
        quirk,
        applications,
        tuple(towers),
        tuple(feed_forward),
    )
    FAMILIES.append(family)
    return family
