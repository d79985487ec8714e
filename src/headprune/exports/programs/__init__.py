"""Splits a model into programs, one file each, with named inputs and outputs: for every runtime but llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import torch

from headprune.exports.programs.causal import causal_programs
from headprune.exports.programs.forward import plain_programs
from headprune.exports.programs.seq2seq import seq2seq_programs
from headprune.exports.programs.spec import Program, Programs
from headprune.exports.runtime import Source

ROWS = 2  # of the example: a length of 1 would be traced as a constant

__all__ = ["Program", "Programs", "programs_of"]


def programs_of(source: Source) -> Programs:
    """Programs with a KV cache where the model generates text, else one forward pass."""
    source = replace(source, batch=_example_batch(source))
    makers = {"causal-lm": causal_programs, "seq2seq-lm": seq2seq_programs}
    maker = makers.get(source.task.name)
    programs = maker(source) if maker is not None else None
    return programs or plain_programs(source)


def _example_batch(source: Source) -> dict[str, torch.Tensor]:
    """`ROWS` rows of the batch, the first one repeated where it has fewer."""
    batch = {}
    for name, value in source.batch.items():
        if isinstance(value, torch.Tensor) and value.dim():
            batch[name] = (
                value[:ROWS].contiguous() if len(value) >= ROWS else value.expand(ROWS, *value.shape[1:]).contiguous()
            )
    return batch
