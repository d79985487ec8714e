"""Logits of a large vocabulary in blocks of tokens: the body of a language model runs once, its head on some tokens at
a time.

The model's own forward makes the logits, with the body standing in for itself and giving what it gave for these tokens;
so a cap, a scale or a bias of the head is the model's. That this is so is tried on the last token of every batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.calls import gives, standing_in
from headprune.hooks.outputs import largest_difference
from headprune.task import Task

LIMIT = 1 << 28  # bytes of logits in float32 above which they are made in blocks
BLOCK = 1 << 25  # bytes of logits in float32 that are made together


@dataclass(frozen=True)
class States:
    """What the body of a model gave for a batch."""

    model: PreTrainedModel
    inputs: Mapping[str, Any]
    output: Any
    shape: torch.Size  # of the logits

    def blocks(self) -> Iterator[torch.Tensor]:
        """Logits [batch x some tokens x vocabulary], token after token."""
        rows, tokens, classes = self.shape
        size = max(1, BLOCK // (rows * classes * 4))
        for first in range(0, tokens, size):
            yield self.part(first, min(first + size, tokens))

    def part(self, first: int, end: int) -> torch.Tensor:
        own = self.output.last_hidden_state[:, first:end]
        given = type(self.output)(**{**self.output, "last_hidden_state": own})
        with standing_in([(self.model.base_model, gives(given))]):
            return self.model(**self.inputs).logits


def states(model: PreTrainedModel, task: Task, inputs: Mapping[str, Any]) -> States | None:
    """Run the body of the model. None where logits are small or not those of a causal language model, and where the
    model gives other logits for a block: then it has to run as a whole."""
    ids = inputs.get("input_ids")
    classes = getattr(model.config.get_text_config(), "vocab_size", None)
    if task.name != "causal-lm" or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not classes:
        return None
    body: Any = model.base_model
    known = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    if ids.numel() * int(classes) * 4 <= LIMIT or body is model or not known:
        return None
    seen: list[Any] = []
    run = body.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(run(*args, **kwargs))
        return seen[-1]

    with standing_in([(body, watch)]):
        last = model(**inputs, logits_to_keep=1).logits
    if len(seen) != 1 or not isinstance(getattr(seen[0], "last_hidden_state", None), torch.Tensor):
        return None
    found = States(model, inputs, seen[0], torch.Size((*ids.shape, last.shape[-1])))
    if seen[0].last_hidden_state.shape[:2] != ids.shape:
        return None
    alone = found.part(ids.shape[1] - 1, ids.shape[1])
    if alone.shape != last.shape:
        return None
    difference, allowed = largest_difference([last], [alone])
    finite = bool(torch.isfinite(last).all())
    return found if difference <= allowed or not finite else None
