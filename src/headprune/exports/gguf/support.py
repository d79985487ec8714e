"""Refuses models that llama.cpp's `deci` does not compute as transformers does."""

from __future__ import annotations

from typing import Any

from headprune.errors import ExportError
from headprune.exports.gguf import rope
from headprune.exports.gguf.layers import head_size
from headprune.exports.gguf.write import context_length
from headprune.exports.runtime import Source

FAMILY = ("llama", "mistral", "qwen2")
MAPS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
LAYER = {
    *(f"{path}.{kind}" for path in MAPS for kind in ("weight", "bias")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
REST = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
INSTEAD = "export it with --to onnx"


def refuse_model(source: Source) -> None:
    """Raise ExportError for a model that a GGUF file cannot represent."""
    model: Any = source.model
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or not name.endswith("ForCausalLM"):
        raise ExportError(f"{name} cannot be exported to GGUF, which is for causal language models; {INSTEAD}.")
    if config.model_type not in FAMILY:
        raise ExportError(
            f"{name} cannot be exported to GGUF with layers that differ: only Llama, Mistral and Qwen2 can; {INSTEAD}."
        )
    _refuse_computation(model)
    unknown = next((path for path, _ in model.named_parameters() if not _is_supported(path)), None)
    if unknown is not None:
        raise ExportError(f"llama.cpp's deci has no tensor for {unknown} of this {name}; {INSTEAD}.")
    _refuse_length(source)


def _refuse_computation(model: Any) -> None:
    """Refuse settings of the config that `deci` does not support."""
    config, name = model.config, type(model).__name__
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ExportError(f"llama.cpp's deci computes SiLU, and this {name} has {activation}; {INSTEAD}.")
    kind = rope.rope_type(model)
    if kind not in rope.FIXED:
        raise ExportError(
            f"Rotary positions of type {kind} depend on the length of a text, which GGUF does not support; {INSTEAD}."
        )
    size = head_size(model)
    if 2 * model.model.rotary_emb.inv_freq.numel() != size:
        raise ExportError(f"llama.cpp's deci rotates whole heads, and this {name} only a part of each; {INSTEAD}.")
    scales = [module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
    if any(abs(scale * size**0.5 - 1) > 1e-6 for scale in scales):
        raise ExportError(f"llama.cpp's deci scales attention by the head size, and this {name} does not; {INSTEAD}.")


def _refuse_length(source: Source) -> None:
    """Refuse texts that are longer than the context in which llama.cpp computes the same."""
    mask, ids = source.batch.get("attention_mask"), source.batch["input_ids"]
    longest, limit = int(ids.shape[-1] if mask is None else mask.sum(-1).max()), context_length(source.model.config)
    if longest >= limit:
        raise ExportError(
            f"The data has a text of {longest} tokens, and GGUF needs fewer than the context of {limit} tokens of this "
            "model; use shorter texts."
        )


def _is_supported(path: str) -> bool:
    parts = path.split(".", 3)
    return path in REST or (parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in LAYER)
