"""How large token ids may be, and how long texts, from the tables that a model looks them up in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.errors import DataError

# Tables of positions that a text is looked up in by position, beside the table of its tokens.
POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe")


@dataclass(frozen=True)
class IdLimits:
    """The number of tokens that a model knows, and of positions; None where that is not known from tables alone. Some
    models give positions to tokens other than `padding` alone."""

    tokens: int | None
    positions: int | None
    padding: int | None = None
    by_mask: bool = False  # whether positions count the tokens that the mask has

    def check(self, number: int, batch: Mapping[str, Any]) -> None:
        """Raise for a batch that the model would fail on in its own code."""
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or not ids.numel():
            return
        if self.tokens is not None and not (int(ids.min()) >= 0 and int(ids.max()) < self.tokens):
            wrong = int(ids.max()) if int(ids.max()) >= self.tokens else int(ids.min())
            raise DataError(
                f"input_ids of batch {number} have the token {wrong}, but the model has {self.tokens}, numbered 0 to "
                f"{self.tokens - 1}; use the tokenizer of the model."
            )
        earlier = any(batch.get(name) is not None for name in ("position_ids", "past_key_values"))
        mask = batch.get("attention_mask")
        if self.by_mask and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            length = int(mask.sum(-1).max())
        else:
            length = ids.shape[-1] if self.padding is None else int((ids != self.padding).sum(-1).max())
        if self.positions is not None and not earlier and length > self.positions:
            raise DataError(
                f"The texts of batch {number} have {length} tokens, but the model takes {self.positions} at "
                "most; truncate them."
            )


def id_limits(model: Any) -> IdLimits:
    words = _word_table(model)
    if words is None:
        return IdLimits(None, None)
    for path, parent in model.named_modules():
        in_decoder = "decoder" in path.split(".") and bool(getattr(model.config, "is_encoder_decoder", False))
        if in_decoder or words not in parent.children() or hasattr(model.config, "reset_position_index_per_cell"):
            continue
        for name in POSITIONS:
            table = getattr(parent, name, None)
            if type(table) is nn.Embedding:
                padding = table.padding_idx
                return IdLimits(len(words.weight), table.num_embeddings - (padding + 1 if padding else 0), padding)
            offset: Any = getattr(table, "offset", None)
            if isinstance(table, nn.Embedding) and isinstance(offset, int):
                return IdLimits(len(words.weight), table.num_embeddings - offset, by_mask=True)
    return IdLimits(len(words.weight), None)


def _word_table(model: Any) -> nn.Embedding | None:
    """The table of tokens of a model of texts alone; ids of other models have placeholders of images and sounds too."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings") or config.get_text_config() is not config:
        return None
    try:
        words = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    plain = type(words) is nn.Embedding or type(words).__name__.endswith("ScaledWordEmbedding")
    return words if plain else None
