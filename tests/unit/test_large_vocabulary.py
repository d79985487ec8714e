"""A large vocabulary: what scoring needs beside the logits themselves, counted and not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.measure.savings import _TensorMeter
from headprune.signals.objectives import sign_gradient, token_signs
from headprune.tasks.spec import cross_entropies

VOCABULARY, SAMPLES, TOKENS = 20_000, 4, 64
LOGITS = SAMPLES * TOKENS * VOCABULARY * 4  # bytes


def model_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        max_position_embeddings=TOKENS,
    )
    ids = torch.randint(5, VOCABULARY, (SAMPLES, TOKENS))
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def peak(work: Callable[[], Any]) -> float:
    """The most that tensors held at once, in logits."""
    with _TensorMeter() as meter:
        work()
    return meter.peak / LOGITS


@pytest.mark.parametrize("criterion", ["residual-gradient", "gnorm"])
def test_scores_need_little_more_than_the_logits(criterion: str) -> None:
    """A backward pass cannot do without a gradient at the logits, which is as large; another third is all there may be
    on top of it (it used to be 2.7)."""
    model, batch = model_and_batch()

    def forward() -> None:
        with torch.no_grad():
            model(**batch, use_cache=False)

    extra = peak(lambda: headprune.score(model, [batch], criterion=criterion)) - peak(forward)
    assert 1.0 <= extra <= 1.3


def test_losses_are_taken_in_blocks_and_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, VOCABULARY, generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, 40), generator=generator)
    targets[0, 3] = -100
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    with torch.no_grad():
        actual = cross_entropies(logits, targets)
        assert peak(lambda: cross_entropies(logits, targets)) < 2 * 4 * (1 << 20) / LOGITS + 0.2
    assert torch.equal(actual.flatten(), expected)
    assert actual[0, 3] == 0


def test_signs_do_not_depend_on_blocks_or_on_the_batch() -> None:
    whole = token_signs(50, 37, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    parts = torch.cat([token_signs(count, 37, generator) for count in (1, 20, 29)])
    assert torch.equal(whole, parts)
    assert set(whole.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(whole.mean())) < 5 / (50 * 37) ** 0.5  # five standard deviations of independent signs
    rows = whole @ whole.T / 37  # of independent signs the rows are nearly orthogonal
    assert float((rows - torch.eye(50)).abs().max()) < 6 / 37**0.5


def test_signs_of_padding_are_none_and_those_of_a_token_add_up_to_none() -> None:
    model, batch = model_and_batch()
    batch["attention_mask"][1, 50:] = 0
    logits = torch.zeros(SAMPLES, TOKENS, VOCABULARY)
    gradient = sign_gradient(headprune.task_of(model), logits, batch)
    assert not gradient[1, 50:].any()
    assert float(gradient.sum(-1).abs().max()) < VOCABULARY * 1e-6
    alone = sign_gradient(
        headprune.task_of(model), logits[1:2, :50], {name: value[1:2, :50] for name, value in batch.items()}
    )
    assert torch.equal(alone[0], gradient[1, :50])
