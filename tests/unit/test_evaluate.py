"""Quality from logits, and the evaluator's manners; that it equals plain forwards is in equivalence/test_greedy.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import SequenceClassifierOutput

import headprune
from headprune.measure.evaluator import Evaluator
from headprune.measure.quality import Quality
from helpers import assert_unchanged, hook_count, state_of
from scoring import labelled
from zoo import ZOO


def logits_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def test_quality_adds_up_over_batches() -> None:
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], seed) for seed in (0, 1)]
    quality = Quality(headprune.task_of(model))
    for batch in batches:
        quality.add(batch, SequenceClassifierOutput(logits=logits_of(model, batch)))
    logits = torch.cat([logits_of(model, batch) for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert quality.samples == 6
    assert torch.equal(quality.predictions, logits.argmax(-1))
    assert torch.equal(quality.labels, labels)
    assert quality.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-6)
    assert quality.counted_loss == quality.loss


def test_without_labels_there_are_predictions_and_no_loss() -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(0)
    quality = Evaluator([batch])(model, headprune.resolve(model))
    assert torch.equal(quality.predictions, logits_of(model, batch).argmax(-1))
    assert (quality.labels, quality.loss, quality.counted_loss) == (None, None, None)


def test_nothing_is_known_before_the_first_batch() -> None:
    quality = Quality(headprune.task_of(ZOO["bert"].build()))
    assert (quality.predictions, quality.labels, quality.loss) == (None, None, None)


@pytest.mark.parametrize("name", ["bert", "t5", "albert"])
def test_the_model_stays_as_it_was(name: str) -> None:
    """Also in training mode, whose dropout must not be seen, and with a forward of its own on a layer."""
    model = ZOO[name].build()
    expected = Evaluator([labelled(ZOO[name], 0)])(model, headprune.resolve(model)).loss
    model.train()
    before = state_of(model)
    evaluator = Evaluator([labelled(ZOO[name], 0)])
    for changed in (None, [0], [len(headprune.resolve(model)) - 1]):
        assert evaluator(model, headprune.resolve(model), changed).loss == expected
        assert model.training
        assert_unchanged(model, before)
        assert not any("forward" in vars(module) for module in model.modules())


def test_an_error_in_the_model_leaves_no_hooks() -> None:
    model = ZOO["bert"].build()
    evaluator = Evaluator([labelled(ZOO["bert"], 0)])
    sites = headprune.resolve(model)
    evaluator(model, sites)
    model.bert.encoder.layer[2].forward = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        evaluator(model, sites, [2])
    assert hook_count(model) == 0
    assert [number for number, layer in enumerate(model.bert.encoder.layer) if "forward" in vars(layer)] == [2]


def test_no_removal_since_the_last_time_runs_no_layer() -> None:
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], 0)]
    evaluator = Evaluator(batches)
    sites = headprune.resolve(model)
    first = evaluator(model, sites)
    calls: list[int] = []
    handles = [
        layer.intermediate.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in model.bert.encoder.layer
    ]
    assert evaluator(model, sites, []).loss == first.loss
    assert calls == []
    for handle in handles:
        handle.remove()
