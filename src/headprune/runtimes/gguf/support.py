"""Which models llama.cpp's `deci` computes as transformers does; the others are refused with what to do instead."""

from __future__ import annotations

from typing import Any

from headprune.errors import ExportError
from headprune.runtimes.gguf import rope
from headprune.runtimes.gguf.layers import head_size
from headprune.runtimes.gguf.write import context_length
from headprune.runtimes.spec import Source

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
    """Raise ExportError for what has no home in a file that llama.cpp reads."""
    model: Any = source.model
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or not name.endswith("ForCausalLM"):
        raise ExportError(f"{name} has no home in GGUF, which holds models that write text; {INSTEAD}.")
    if config.model_type not in FAMILY:
        raise ExportError(
            f"{name} has no home in GGUF once its layers differ: only the Llama family has (Llama, Mistral, Qwen2); "
            f"{INSTEAD}."
        )
    _refuse_computation(model)
    stranger = next((path for path, _ in model.named_parameters() if not _known(path)), None)
    if stranger is not None:
        raise ExportError(f"llama.cpp's deci has no place for {stranger} of this {name}; {INSTEAD}.")
    _refuse_length(source)


def _refuse_computation(model: Any) -> None:
    """What the config asks for and `deci` does not do."""
    config, name = model.config, type(model).__name__
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ExportError(f"llama.cpp's deci computes SiLU, and this {name} {activation}; {INSTEAD}.")
    kind = rope.rope_type(model)
    if kind not in rope.FIXED:
        raise ExportError(
            f"Rotary positions of type {kind} depend on the length of a text, which GGUF cannot say; {INSTEAD}."
        )
    size = head_size(model)
    if 2 * model.model.rotary_emb.inv_freq.numel() != size:
        raise ExportError(f"llama.cpp's deci rotates whole heads, and this {name} a part of each; {INSTEAD}.")
    scales = [module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
    if any(abs(scale * size**0.5 - 1) > 1e-6 for scale in scales):
        raise ExportError(f"The attention of this {name} has a scale of its own; {INSTEAD}.")


def _refuse_length(source: Source) -> None:
    """Texts that llama.cpp would be asked for beyond what its answers are right for, or that it does not take."""
    mask, ids = source.batch.get("attention_mask"), source.batch["input_ids"]
    longest, room = int(ids.shape[-1] if mask is None else mask.sum(-1).max()), context_length(source.model.config)
    if longest >= room:
        raise ExportError(
            f"The data has a text of {longest} tokens, and GGUF takes less than the {room} that this model looks back "
            "at; give shorter texts."
        )


def _known(path: str) -> bool:
    parts = path.split(".", 3)
    return path in REST or (parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in LAYER)
