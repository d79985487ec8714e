"""The published notebooks' procedure, and the exact form, on a real model with real sentences."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import headprune
from helpers import SHARED
from oracles import Oracle, relative_differences
from score_helpers import TOLERANCE

MODEL, SENTENCES = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2" / "dev.tsv"
pytestmark = pytest.mark.skipif(
    not (MODEL.is_dir() and SENTENCES.is_file()), reason="the shared model and sentences are not beside this checkout"
)


@functools.cache
def real_model() -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32).eval()


def real_batches(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The first sentences of the file, in its order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()[1 : count + 1]
    pairs = [line.rsplit("\t", 1) for line in lines]
    batches = []
    for start in range(0, count, size):
        texts, labels = zip(*pairs[start : start + size], strict=True)
        batch = dict(tokenizer(list(texts), padding=True, return_tensors="pt"))
        batches.append({**batch, "labels": torch.tensor([int(label) for label in labels])})
    return batches


def notebook_scores(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, float]:
    """One backward per batch of the Frobenius norm of its logits; the norm of each head's block of that gradient,
    summed over batches and divided by the number of samples; the product of Q, K and V. And the accuracy."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    sums = {name: torch.zeros(layers, heads, dtype=torch.float64) for name in ("query", "key", "value")}
    right = 0
    for batch in batches:
        model.zero_grad()
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        right += int((logits.argmax(-1) == batch["labels"]).sum())
        torch.linalg.matrix_norm(logits, "fro").backward()
        for layer in range(layers):
            attention = model.bert.encoder.layer[layer].attention.self
            for name, total in sums.items():
                gradient = getattr(attention, name).weight.grad
                for head, block in enumerate(gradient.chunk(heads, dim=0)):
                    total[layer, head] += block.norm().double()
    model.zero_grad()
    samples = sum(len(batch["labels"]) for batch in batches)
    return (sums["query"] / samples) * (sums["key"] / samples) * (sums["value"] / samples), right / samples


def test_the_aggregation_batch_is_the_notebooks_procedure() -> None:
    model, batches = real_model(), real_batches(64, 32)
    expected, accuracy = notebook_scores(model, batches)
    result = headprune.score(model, batches, criterion="gnorm", aggregation="batch")
    assert result.samples == 64
    assert result.accuracy == accuracy
    assert 0.75 < accuracy < 1
    assert expected.shape == (6, 12)
    assert float(relative_differences(result.scores, expected).max()) <= TOLERANCE


def test_the_mean_over_samples_is_exact_on_a_real_model_and_ranks_heads_otherwise() -> None:
    """Real activations share a large common part, against which gradients of keys cancel: float32 has to stand that."""
    model, batches = real_model(), real_batches(6, 3)
    names = ["gnorm", "his", "entropy", "gnorm(aggregation=batch)"]
    actual = headprune.score(model, batches, criteria=names).scores
    oracle = Oracle(model, batches)
    for name, expected in {"gnorm": oracle.gnorm(), "his": oracle.his(), "entropy": oracle.entropy()}.items():
        assert float(relative_differences(actual[name], expected).max()) <= TOLERANCE, name
    orders = [actual[name].flatten().argsort().tolist() for name in ("gnorm", "gnorm(aggregation=batch)")]
    assert orders[0] != orders[1]
