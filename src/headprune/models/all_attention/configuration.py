"""The config of the All-attention Transformer. Like modeling.py, this file imports only transformers and its
dependencies: portable checkpoints contain both."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class AllAttentionConfig(PreTrainedConfig):
    """Settings of the All-attention Transformer (Sukhbaatar et al. 2019, arXiv 1907.01470).

    Each head of a layer has `num_persistent_vectors` learned keys and values beside those of the tokens; they replace
    the feed-forward layer, and have as many parameters as one of that width where `head_dim` x `num_attention_heads` is
    `hidden_size`. With `norm="post"` a layer is LayerNorm(x + attention(x)), as there; with "pre" it is x +
    attention(LayerNorm(x)), and no norm follows the last layer, as in the code of Shim et al. 2021 (arXiv 2110.03252).
    Rotary embeddings apply to a part of each head, `partial_rotary_factor` of `rope_parameters`.
    """

    model_type = "all_attention"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_persistent_vectors: int = 2048
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    norm: str = "post"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0  # of embeddings and of layer outputs before the residual addition
    rope_parameters: dict[str, Any] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by `@strict`: raises for values from which no model can be built."""
        if self.num_persistent_vectors < 1:
            raise ValueError(f"num_persistent_vectors must be 1 or more, not {self.num_persistent_vectors}.")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', not {self.norm!r}.")
        if self.head_dim is None or self.head_dim < 2:
            raise ValueError(
                f"head_dim must be 2 or more, because rotary embeddings rotate pairs, not {self.head_dim}."
            )
        if (self.rope_parameters or {}).get("rope_type", "default") != "default":
            raise ValueError("rope_type in rope_parameters must be 'default': this model supports no other.")

    @property
    def rotary_dim(self) -> int:
        """The width of the rotated part of each head: an even number, 2 or more."""
        width, rope = self.head_dim or 0, self.rope_parameters or {}
        return max(2, int(width * rope.get("partial_rotary_factor", 1.0)) // 2 * 2)
