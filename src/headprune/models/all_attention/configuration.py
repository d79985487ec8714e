"""The numbers of an All-attention Transformer. As modeling.py, this file needs transformers alone: portable checkpoints
carry both."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class AllAttentionConfig(PreTrainedConfig):
    """Settings of the All-attention Transformer (Sukhbaatar et al. 2019, arXiv 1907.01470).

    Each head of a layer has `num_persistent_vectors` keys and values of its own beside those of the tokens; they stand in
    for a feed-forward layer. As many parameters as a feed-forward layer of width f has are in f / 2 of them per head, if
    `head_dim` x `num_attention_heads` is `hidden_size`; the paper takes 2048 for a width of 512.
    """

    model_type = "all_attention"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    head_dim: int | None = None  # hidden_size / num_attention_heads where it is not given
    num_persistent_vectors: int = 1024
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0  # of embeddings and of what a layer adds
    rope_parameters: dict[str, Any] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by `@strict`: numbers that no model can be built from are refused."""
        if self.num_persistent_vectors < 1:
            raise ValueError(f"num_persistent_vectors must be 1 or more, not {self.num_persistent_vectors}.")
        if self.head_dim is None or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, as rotary positions turn pairs of numbers, not {self.head_dim}.")
