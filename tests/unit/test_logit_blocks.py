"""Evaluation of large vocabularies: logits in blocks of tokens give what whole ones give, with the model's own head."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import headprune
from headprune.hooks import logit_blocks
from headprune.measure.evaluator import Evaluator
from score_helpers import labelled
from zoo import ZOO


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt2"])  # plain; capped; with tied embeddings
@pytest.mark.parametrize("tokens", [1, 4])
def test_blocks_give_the_quality_of_whole_logits(name: str, tokens: int) -> None:
    model: Any = ZOO[name].build()
    batch = labelled(ZOO[name], 0)
    sites = headprune.resolve(model)
    whole = Evaluator([batch])(model, sites)
    made: list[int] = []
    part = logit_blocks.States.part

    def counted(self: logit_blocks.States, first: int, end: int) -> torch.Tensor:
        made.append(end - first)
        return part(self, first, end)

    size = len(batch["input_ids"]) * model.config.vocab_size * 4 * tokens
    with (
        mock.patch.object(logit_blocks, "LIMIT", 0),
        mock.patch.object(logit_blocks, "BLOCK", size),
        mock.patch.object(logit_blocks.States, "part", counted),
    ):
        actual = Evaluator([batch])(model, sites)
    assert max(made) == tokens
    assert sum(made) == batch["input_ids"].shape[1] + 1  # the last token is tried first
    assert actual.samples == whole.samples
    assert torch.equal(actual.values, whole.values)
    assert torch.equal(actual.labels, whole.labels)
    assert torch.equal(actual.sample_ids, whole.sample_ids)
    assert actual.loss_parts is not None
    assert whole.loss_parts is not None
    assert torch.equal(actual.loss_parts[1], whole.loss_parts[1])
    assert torch.allclose(actual.loss_parts[0], whole.loss_parts[0], rtol=1e-5, atol=0)


def test_a_head_that_looks_at_the_place_of_tokens_runs_whole() -> None:
    """A forward that adds something by the number of tokens gives other logits for a block."""
    model: Any = ZOO["llama-gqa"].build()

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            places = torch.arange(output.logits.shape[1])[None, :, None]
            output.logits = (output.logits + places)[:, -logits_to_keep:]
            return output

    batch = labelled(ZOO["llama-gqa"], 0)
    model.__class__ = Odd
    sites = headprune.resolve(ZOO["llama-gqa"].build())
    whole = Evaluator([batch])(model, sites)
    with mock.patch.object(logit_blocks, "LIMIT", 0):
        actual = Evaluator([batch])(model, sites)
    assert actual.loss == whole.loss
