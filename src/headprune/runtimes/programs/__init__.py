"""What of a model becomes a file of its own, and what goes in and out of it: for every runtime but llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import torch

from headprune.runtimes.programs.causal import causal_programs
from headprune.runtimes.programs.plain import plain_programs
from headprune.runtimes.programs.seq2seq import seq2seq_programs
from headprune.runtimes.programs.spec import Program, Programs
from headprune.runtimes.spec import Source

ROWS = 2  # of the example: a length of one would be taken for a constant

__all__ = ["Program", "Programs", "programs_of"]


def programs_of(source: Source) -> Programs:
    """With what is remembered of earlier tokens where the model writes text, and as one pass elsewhere."""
    source = replace(source, batch=_example(source))
    makers = {"causal-lm": causal_programs, "seq2seq-lm": seq2seq_programs}
    maker = makers.get(source.task.name)
    found = maker(source) if maker is not None else None
    return found or plain_programs(source)


def _example(source: Source) -> dict[str, torch.Tensor]:
    """So many rows of the batch, the first one again where it has fewer."""
    found = {}
    for name, value in source.batch.items():
        if isinstance(value, torch.Tensor) and value.dim():
            found[name] = (
                value[:ROWS].contiguous() if len(value) >= ROWS else value.expand(ROWS, *value.shape[1:]).contiguous()
            )
    return found
