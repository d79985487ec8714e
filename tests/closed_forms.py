"""How many parameters leave with one unit of heads, by hand and from the config alone, for every storage of the zoo.

No weight and no module is looked at here: this is the arithmetic that surgery has to agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def unit(
    hidden: int,
    width: int,
    *,
    group: int = 1,
    bias: tuple[bool, bool, bool] = (True, True, True),
    memory: int | None = None,
) -> int:
    """Parameters of one unit: `group` query heads with their key and value head.

    Rows of q, k and v with their biases, and the columns of o, whose bias stays. `memory` is the width of what keys
    and values are made from where that is not the hidden state (cross-attention).
    """
    memory = hidden if memory is None else memory
    q = group * width * (hidden + bias[0])
    k = width * (memory + bias[1])
    v = width * (memory + bias[2])
    o = hidden * group * width
    return q + k + v + o


def _bert(c: Any) -> list[int]:
    one = unit(c.hidden_size, c.hidden_size // c.num_attention_heads)
    # A decoder with cross-attention has two sites per layer, of the same size here.
    return [one] * c.num_hidden_layers * (2 if getattr(c, "add_cross_attention", False) else 1)


def _albert(c: Any) -> list[int]:
    """One site however many layers: its parameters are there once."""
    return [unit(c.hidden_size, c.hidden_size // c.num_attention_heads)]


def _distilbert(c: Any) -> list[int]:
    return [unit(c.dim, c.dim // c.n_heads)] * c.n_layers


def _deberta(c: Any) -> list[int]:
    """A head of DeBERTa also has rows in the projections of the relative positions, unless they share q's and k's.
    The position key has a bias like the key, and so has the position query."""
    width = c.hidden_size // c.num_attention_heads
    positions = 0 if c.share_att_key else len(c.pos_att_type) * width * (c.hidden_size + 1)
    return [unit(c.hidden_size, width) + positions] * c.num_hidden_layers


def _modernbert(c: Any) -> list[int]:
    """One fused projection, without biases by default."""
    return [
        unit(c.hidden_size, c.hidden_size // c.num_attention_heads, bias=(c.attention_bias,) * 3)
    ] * c.num_hidden_layers


def _gpt2(c: Any) -> list[int]:
    """Conv1D with biases. In cross-attention keys and values are fused, and queries apart: the same number."""
    return [unit(c.n_embd, c.n_embd // c.n_head)] * c.n_layer * (2 if c.add_cross_attention else 1)


def _bloom(c: Any) -> list[int]:
    return [unit(c.hidden_size, c.hidden_size // c.n_head)] * c.n_layer


def _neox(c: Any) -> list[int]:
    bias = (c.attention_bias,) * 3
    return [unit(c.hidden_size, c.hidden_size // c.num_attention_heads, bias=bias)] * c.num_hidden_layers


def _opt(c: Any) -> list[int]:
    return [
        unit(c.hidden_size, c.hidden_size // c.num_attention_heads, bias=(c.enable_bias,) * 3)
    ] * c.num_hidden_layers


def _llama(c: Any, *, bias: bool | None = None) -> list[int]:
    """Grouped KV heads: one key and value head leaves with the query heads that read it."""
    bias = c.attention_bias if bias is None else bias
    group = c.num_attention_heads // c.num_key_value_heads
    return [unit(c.hidden_size, c.head_dim, group=group, bias=(bias,) * 3)] * c.num_hidden_layers


def _all_attention(c: Any) -> list[int]:
    """A head has learned keys and values of its own as well."""
    own = 2 * c.num_persistent_vectors * c.head_dim
    return [unit(c.hidden_size, c.head_dim, bias=(c.attention_bias,) * 3) + own] * c.num_hidden_layers


def _qwen2(c: Any) -> list[int]:
    return _llama(c, bias=True)


def _without_bias(c: Any) -> list[int]:
    """Mistral and Phi-3 (fused). Their head width is `head_dim` where the config has one."""
    group = c.num_attention_heads // c.num_key_value_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return [unit(c.hidden_size, width, group=group, bias=(False,) * 3)] * c.num_hidden_layers


def _t5(c: Any) -> list[int]:
    """No biases; the table of relative positions belongs to the whole stack and stays."""
    return [unit(c.d_model, c.d_kv, bias=(False,) * 3)] * (c.num_layers + 2 * c.num_decoder_layers)


def _bart(c: Any, *, key_bias: bool = True) -> list[int]:
    encoder = unit(c.d_model, c.d_model // c.encoder_attention_heads, bias=(True, key_bias, True))
    decoder = unit(c.d_model, c.d_model // c.decoder_attention_heads, bias=(True, key_bias, True))
    return [encoder] * c.encoder_layers + [decoder] * (2 * c.decoder_layers)


def _whisper(c: Any) -> list[int]:
    """Whisper's keys have no bias."""
    return _bart(c, key_bias=False)


def _vit(c: Any) -> list[int]:
    bias = (c.qkv_bias,) * 3
    return [unit(c.hidden_size, c.hidden_size // c.num_attention_heads, bias=bias)] * c.num_hidden_layers


def _tower(c: Any) -> list[int]:
    return [unit(c.hidden_size, c.hidden_size // c.num_attention_heads)] * c.num_hidden_layers


def _clip(c: Any) -> list[int]:
    return _tower(c.vision_config) + _tower(c.text_config)


UNIT_PARAMETERS: dict[str, Callable[[Any], list[int]]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "mpnet", "camembert", "bert-decoder-cross"), _bert),
    "albert": _albert,
    "all-attention": _all_attention,
    "distilbert": _distilbert,
    **dict.fromkeys(("deberta-v2", "deberta-v3"), _deberta),
    "modernbert": _modernbert,
    **dict.fromkeys(("gpt2", "gpt2-cross"), _gpt2),
    "gpt-neox": _neox,
    "opt": _opt,
    "bloom": _bloom,
    **dict.fromkeys(("llama", "llama-gqa", "llama-mqa", "qwen3", "gemma2", "granite"), _llama),
    "qwen2": _qwen2,
    **dict.fromkeys(("mistral", "phi3"), _without_bias),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bart", "marian"), _bart),
    "whisper": _whisper,
    **dict.fromkeys(("vit", "dinov2"), _vit),
    "clip": _clip,
    **dict.fromkeys(("clip-text", "clip-vision", "siglip-vision"), _tower),
}
