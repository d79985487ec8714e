"""The sizes of arXiv 2110.03252, counted on a configuration of our class, with what the authors' model has besides."""

from __future__ import annotations

from typing import Any

import torch

from headprune.models import AllAttentionConfig, AllAttentionForCausalLM
from headprune.surgery.remove_units import remove_units
from headprune.units import sites_of

# config/wt103_all_16l_train_gating.json and inference.py of aiha-lab/Attention-Head-Pruning.
LAYERS, HEADS, WIDTH, PERSISTENT, POSITIONS = 16, 8, 512, 2048, 512
VOCABULARY, CUTOFFS, DIVISOR = 267_735, (20_000, 40_000, 200_000), 4
LEFT = 73  # of 128 heads: 43 % are removed
# Heads per layer that inference.py lists, by the weight of L0.
LISTED = {
    0.01: (8, 3, 7, 6, 6, 6, 6, 7, 6, 7, 8, 8, 7, 8, 7, 6),
    0.015: (6, 4, 6, 5, 4, 5, 5, 6, 5, 6, 7, 5, 6, 6, 6, 5),
    0.02: (5, 2, 5, 4, 3, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3),
}
PUBLISHED = {LAYERS * HEADS: 53.8, LEFT: 30.7}  # heads -> millions of parameters


def paper_sizes() -> list[dict[str, Any]]:
    """Parameters of the model of the paper, dense and with 43 % of its heads removed.

    `counted` are those of our class without its token table. `relative_positions` are parts that the authors' layers
    have and ours do not: per head a map of positions and two biases of queries; per layer a bias of the output map.
    Both papers' numbers are far below the sum with the `adaptive` tables, which are equal in both rows.
    """
    rows = []
    for heads, published in PUBLISHED.items():
        counted = count_outside_embeddings(heads)
        relative = heads * (WIDTH // HEADS) * (WIDTH + 2) + LAYERS * WIDTH
        total = counted + relative
        rows.append(
            {
                "heads": heads,
                "published_millions": published,
                "counted": counted,
                "relative_positions": relative,
                "total": total,
                "percent_to_published": round(100 * (total / (1e6 * published) - 1), 2),
                "adaptive": adaptive_tables(),
            }
        )
    return rows


def count_outside_embeddings(heads: int) -> int:
    """Parameters of our class with this number of heads, without its token table, on the meta device."""
    config = AllAttentionConfig(
        vocab_size=8,  # its table is not counted
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_persistent_vectors=PERSISTENT,
        norm="pre",
    )
    with torch.device("meta"):
        model = AllAttentionForCausalLM(config)
    # Which heads are removed makes no difference to the size, so the same number leaves every layer, nearly.
    units = [unit for number in range(HEADS) for site in sites_of(model) for unit in site.units()[number]]
    remove_units(model, units[: LAYERS * HEADS - heads])
    return sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)


def adaptive_tables() -> int:
    """Parameters of the authors' adaptive embeddings: tokens in bands, each of a quarter of the width of the band
    before, with a map to the full width. Their adaptive softmax shares these."""
    bands = zip((0, *CUTOFFS), (*CUTOFFS, VOCABULARY), strict=True)
    widths = [WIDTH // DIVISOR**number for number in range(len(CUTOFFS) + 1)]
    return sum(width * (end - start) + width * WIDTH for width, (start, end) in zip(widths, bands, strict=True))
