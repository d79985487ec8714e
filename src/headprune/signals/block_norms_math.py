"""Norms of weight gradients without weight gradients: the exact fast form for linear maps.

The gradient of the rows h of a weight is sum_t delta_t^h x_t^T over the tokens t, with x the inputs and delta the
gradients at the outputs, so its squared norm is sum_{t,t'} (delta_t^h . delta_t'^h) (x_t . x_t').
"""

from __future__ import annotations

import torch


def squared_block_norms(
    inputs: torch.Tensor, deltas: torch.Tensor, heads: int, gram: torch.Tensor | None = None
) -> torch.Tensor:
    """[batch, tokens, in] and [batch, tokens, heads*width] -> squared norm per sample and head, [batch, heads].

    With the Gram matrix of the inputs, [batch, tokens, tokens], it costs two products of the size of an attention
    map; without it the gradient itself is formed, sample by sample inside one batched product.
    """
    if gram is not None:
        products = deltas * torch.bmm(gram, deltas)
        return products.unflatten(-1, (heads, -1)).sum(dim=(1, 3)).clamp_min(0)
    gradients = torch.bmm(deltas.transpose(1, 2), inputs)
    return gradients.unflatten(1, (heads, -1)).square().sum(dim=(2, 3))


def gram_is_cheaper(tokens: int, in_features: int, rows: int, shared_by: int) -> bool:
    """Whether the Gram form takes fewer operations; `shared_by` projections use the same Gram matrix."""
    return tokens * (in_features / shared_by + rows) < in_features * rows


def gram_matrix(inputs: torch.Tensor) -> torch.Tensor:
    return torch.bmm(inputs, inputs.transpose(1, 2))
