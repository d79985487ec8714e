"""The published notebooks' procedure, for comparison: weight gradients, one whole pass per layer, batches of 32, and
an evaluation of one sentence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel


def notebook_scores(
    model: PreTrainedModel, batches: Sequence[Mapping[str, torch.Tensor]], layers: Sequence[int]
) -> None:
    """Gnorm of the given layers as the notebooks compute it: forward and backward over all batches per layer."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    samples = sum(batch["input_ids"].shape[0] for batch in batches)
    for layer in layers:
        attention = model.base_model.encoder.layer[layer].attention.self
        if not hasattr(attention, "query"):  # no head is left in this layer
            continue
        heads = attention.query.weight.shape[0] // attention.attention_head_size
        totals = {name: torch.zeros(heads) for name in ("query", "key", "value")}
        for batch in batches:
            model.zero_grad()
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            logits.norm().backward()
            for name, total in totals.items():
                gradient = getattr(attention, name).weight.grad
                total += gradient.unflatten(0, (heads, -1)).flatten(1).norm(dim=1)
        product = torch.ones(heads)
        for total in totals.values():
            product *= total / samples
    model.zero_grad(set_to_none=True)


def notebook_accuracy(model: PreTrainedModel, samples: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Accuracy, one unpadded sentence after the other."""
    right = 0
    with torch.no_grad():
        for sample in samples:
            logits = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits
            right += int(logits.argmax(-1).item() == int(sample["labels"]))
    return right / len(samples)


def one_by_one(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Every sample of the batches alone and without padding."""
    samples = []
    for batch in batches:
        for row in range(batch["input_ids"].shape[0]):
            length = int(batch["attention_mask"][row].sum())
            samples.append(
                {
                    "input_ids": batch["input_ids"][row : row + 1, :length],
                    "attention_mask": batch["attention_mask"][row : row + 1, :length],
                    "labels": batch["labels"][row : row + 1],
                }
            )
    return samples
