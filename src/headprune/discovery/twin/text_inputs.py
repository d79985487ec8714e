"""Dummy text inputs and others, by the names of a forward's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .module_facts import BATCH, Facts

# Makers of all inputs but ids, images and audio; `count` is the number of tokens.
Maker = Callable[[Facts, int], Any]


def boxes(facts: Facts, count: int) -> torch.Tensor:
    width = facts.number("dim_bbox", default=4)
    corners = torch.rand(BATCH, count, 2, generator=facts.generator) * 0.4
    box = torch.cat([corners, corners + 0.1 + 0.4 * torch.rand(BATCH, count, 2, generator=facts.generator)], dim=-1)
    if width == 8:
        return box[..., [0, 1, 2, 1, 2, 3, 0, 3]].to(facts.device, facts.dtype)
    if facts.find("max_2d_position_embeddings") and not facts.find("relative_bias_args"):
        top = facts.number("max_2d_position_embeddings") - 1
        return (box * min(top, 1000)).long().to(facts.device)
    return box.to(facts.device, facts.dtype)


def mentions(facts: Facts, count: int) -> torch.Tensor:
    positions = -torch.ones(BATCH, 2, facts.number("max_mention_length", default=4), dtype=torch.long)
    positions[:, 0, :2] = torch.tensor([0, 1])
    positions[:, 1, :1] = 3
    return positions.to(facts.device)


def decoder_ids(facts: Facts, count: int) -> torch.Tensor:
    return facts.ids(facts.vocabulary(decoder=True), BATCH, count, avoid=facts.special())


def series(facts: Facts) -> tuple[int, int]:
    context = facts.number("context_length", default=16)
    lags = facts.find("lags_sequence")
    return context + (max(lags) if isinstance(lags, list | tuple) and lags else 0), facts.number(
        "prediction_length", default=4
    )


def past(facts: Facts, *extra: int) -> torch.Tensor:
    channels = facts.number("num_input_channels", "input_size", default=1)
    shape = (BATCH, series(facts)[0], channels)
    return facts.floats(*(shape if channels > 1 or facts.find("num_input_channels") else shape[:2]))


TEXT: dict[str, Maker] = {
    "attention_mask": lambda facts, count: facts.ones(BATCH, count),
    "bbox": boxes,
    "entity_ids": lambda facts, count: facts.ids(
        facts.number("entity_vocab_size", default=8), BATCH, 2, avoid=frozenset({0})
    ),
    "entity_attention_mask": lambda facts, count: facts.ones(BATCH, 2),
    "entity_token_type_ids": lambda facts, count: facts.ones(BATCH, 2) * 0,
    "entity_position_ids": mentions,
    "visual_feats": lambda facts, count: facts.floats(BATCH, 5, facts.number("visual_feat_dim", default=8)),
    "visual_pos": lambda facts, count: facts.floats(BATCH, 5, facts.number("visual_pos_dim", default=4)),
    "visual_embeds": lambda facts, count: facts.floats(BATCH, 5, facts.number("visual_embedding_dim", default=8)),
    "qformer_input_ids": lambda facts, count: facts.ids(
        facts.number("vocab_size", among="qformer", default=8), BATCH, 5
    ),
    "qformer_attention_mask": lambda facts, count: facts.ones(BATCH, 5),
    "image_embeds_position_mask": lambda facts, count: torch.zeros(BATCH, count, device=facts.device, dtype=torch.bool),
    "protein_input_ids": lambda facts, count: facts.ids(
        facts.number("vocab_size", among="protein", default=8), BATCH, 7
    ),
    "protein_attention_mask": lambda facts, count: facts.ones(BATCH, 7),
    "classes_input_ids": lambda facts, count: facts.ids(facts.vocabulary(), BATCH * 2, count),
    "classes_attention_mask": lambda facts, count: facts.ones(BATCH * 2, count),
    "classes_structure": lambda facts, count: facts.ones(BATCH) * 2,
    "tasks_input_ids": lambda facts, count: facts.ids(facts.vocabulary(), BATCH, count),
    "tasks_attention_mask": lambda facts, count: facts.ones(BATCH, count),
}

OTHER: dict[str, Maker] = {
    "decoder_input_ids": decoder_ids,
    "input_points": lambda facts, count: facts.floats(BATCH, 1, 2, 2).abs() * 5,
    "input_labels": lambda facts, count: facts.ones(BATCH, 1, 2).int(),
    "task_inputs": lambda facts, count: facts.ids(
        facts.number("text_encoder_vocab_size", default=8), BATCH, facts.number("task_seq_len", default=7)
    ).to(facts.dtype),
    "prompt_pixel_values": lambda facts, count: facts.floats(BATCH, 3, *image_size(facts)),
    "prompt_masks": lambda facts, count: facts.floats(BATCH, 3, *image_size(facts)),
    "past_values": past,
    "past_time_features": lambda facts, count: facts.floats(BATCH, series(facts)[0], facts.number("num_time_features")),
    "past_observed_mask": lambda facts, count: torch.ones_like(past(facts)),
    "future_values": lambda facts, count: facts.floats(BATCH, series(facts)[1]),
    "future_time_features": lambda facts, count: facts.floats(
        BATCH, series(facts)[1], facts.number("num_time_features")
    ),
    "past_values_padding": lambda facts, count: facts.ones(BATCH, series(facts)[0]) * 0,
    "freq": lambda facts, count: facts.ones(BATCH, 1) * 0,
    "states": lambda facts, count: facts.floats(BATCH, count, facts.number("state_dim")),
    "actions": lambda facts, count: facts.floats(BATCH, count, facts.number("act_dim")),
    "rewards": lambda facts, count: facts.floats(BATCH, count, 1),
    "returns_to_go": lambda facts, count: facts.floats(BATCH, count, 1),
    "timesteps": lambda facts, count: torch.arange(count, device=facts.device).expand(BATCH, -1),
    "flattened_patches": lambda facts, count: torch.cat(
        [
            torch.stack([torch.arange(1, 5).repeat_interleave(2), torch.arange(1, 3).repeat(4)], -1)
            .expand(BATCH, -1, -1)
            .to(facts.device, facts.dtype),
            facts.floats(
                BATCH,
                8,
                facts.number("patch_embed_hidden_size", "num_channels", default=3)
                if facts.find("patch_embed_hidden_size")
                else 768,
            ),
        ],
        dim=-1,
    ),
    "last_hidden_state": lambda facts, count: facts.floats(
        BATCH, 1, facts.number("input_size", "hidden_size", default=8)
    ),
    "query_embeds": lambda facts, count: facts.floats(BATCH, count, facts.number("hidden_size", default=8)),
    "inputs_embeds": lambda facts, count: facts.floats(BATCH, count, facts.number("hidden_size", "d_model", default=8)),
    "hidden_states": lambda facts, count: facts.floats(BATCH, count, facts.number("hidden_size", "d_model", default=8)),
    "encoder_hidden_states": lambda facts, count: facts.floats(
        BATCH, 5, facts.number("encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", default=8)
    ),
}


def image_size(facts: Facts) -> tuple[int, int]:
    size = facts.find("image_size")
    side = size[-1] if isinstance(size, list | tuple) else size
    return (int(side), int(side))
