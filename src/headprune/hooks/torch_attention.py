"""nn.MultiheadAttention with a forward that calls its output projection, so that hooks see it, and that runs with fewer
heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class HookableAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with a forward that calls `out_proj` as a module, so that hooks see its inputs, and
    that reads the number of heads from its weights."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        single = query.dim() == 2
        if single:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query, key, value)
        bias = self._bias(q, k, key_padding_mask, attn_mask)
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            weights = torch.softmax(scores if bias is None else scores + bias, dim=-1)
            heads = nn.functional.dropout(weights, self.dropout, self.training) @ v
        else:
            dropped = self.dropout if self.training else 0.0
            weights = None
            heads = nn.functional.scaled_dot_product_attention(q, k, v, bias, dropped)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def _project(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self.in_proj_weight is not None:
            maps = self.in_proj_weight.chunk(3)
        else:
            maps = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        states = [nn.functional.linear(*arguments) for arguments in zip(inputs, maps, biases, strict=True)]
        if self.bias_k is not None:
            extras: Any = (self.bias_k, self.bias_v)
            for position, extra in enumerate(extras, start=1):
                states[position] = torch.cat([states[position], extra.expand(len(states[position]), -1, -1)], dim=1)
        if self.add_zero_attn:
            for position in (1, 2):
                states[position] = nn.functional.pad(states[position], (0, 0, 0, 1))
        return [state.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for state in states]

    def _bias(
        self, q: torch.Tensor, k: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Both masks as one that is added to the scores, [batch or 1, heads or 1, queries, keys]."""
        parts = []
        if mask is not None:
            mask = mask.unflatten(0, (len(q), -1)) if mask.dim() == 3 else mask[None, None]
            kept = getattr(self, "headprune_kept", None)
            if kept and mask.shape[1] not in (1, len(kept)):  # a mask per original head
                mask = mask.index_select(1, torch.tensor(kept, device=mask.device))
            parts.append(self._additive(mask, q))
        if padding is not None:
            parts.append(self._additive(padding[:, None, None], q))
        if not parts:
            return None
        total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return nn.functional.pad(total, (0, k.shape[-2] - total.shape[-1]))

    def _additive(self, mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A boolean mask is True where a key is masked out."""
        return (
            torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
        )


def expose(model: nn.Module) -> list[tuple[Any, bool]]:
    """Let torch's attention modules call their output projections, and return them with what `hide` needs to undo that.
    Their outputs and weights stay the same."""
    exposed = []
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            exposed.append((module, module._qkv_same_embed_dim))
            module.__class__ = HookableAttention
            module._qkv_same_embed_dim = False  # otherwise torch's encoder layers do not call the module
    return exposed


def hide(exposed: list[tuple[Any, bool]]) -> None:
    """Give these modules their class back, unless heads were removed from them meanwhile."""
    for module, same in exposed:
        pruned = hasattr(module, "headprune_kept") or type(module) is not HookableAttention
        if not pruned:
            module.__class__ = nn.MultiheadAttention
            module._qkv_same_embed_dim = same


@contextmanager
def exposing(model: nn.Module) -> Iterator[None]:
    """Within a block torch's attention modules call their output projections."""
    exposed = expose(model)
    try:
        yield
    finally:
        hide(exposed)


def original_class(module: nn.Module) -> type:
    """The class of a module before headprune changed it."""
    kind = type(module)
    return nn.MultiheadAttention if kind is HookableAttention else getattr(kind, "_base_class", kind)
