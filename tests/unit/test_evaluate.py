"""Predictions from logits, and the evaluator; that it equals plain forwards is in equivalence/test_greedy.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import SequenceClassifierOutput

import headprune
from headprune.measure.evaluator import Evaluator
from headprune.measure.predictions import Predictions
from helpers import assert_unchanged, hook_count, state_of
from run_helpers import counted_calls
from score_helpers import labelled
from zoo import ZOO


def logits_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def test_quality_adds_up_over_batches() -> None:
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], seed) for seed in (0, 1)]
    predictions = Predictions(headprune.task_of(model))
    for batch in batches:
        predictions.add(batch, SequenceClassifierOutput(logits=logits_of(model, batch)))
    logits = torch.cat([logits_of(model, batch) for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert predictions.samples == 6
    assert torch.equal(predictions.values, logits.argmax(-1))
    assert torch.equal(predictions.labels, labels)
    assert predictions.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-6)
    assert predictions.token_loss == predictions.loss


def test_without_labels_there_are_predictions_and_no_loss() -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(0)
    predictions = Evaluator([batch])(model, headprune.resolve(model))
    assert torch.equal(predictions.values, logits_of(model, batch).argmax(-1))
    assert (predictions.labels, predictions.loss, predictions.token_loss) == (None, None, None)


def test_nothing_is_known_before_the_first_batch() -> None:
    predictions = Predictions(headprune.task_of(ZOO["bert"].build()))
    assert (predictions.values, predictions.labels, predictions.loss) == (None, None, None)


@pytest.mark.parametrize("name", ["bert", "t5", "albert"])
def test_the_model_stays_as_it_was(name: str) -> None:
    """Also in training mode, whose dropout must not be seen, and with a forward of its own on a layer."""
    model = ZOO[name].build()
    expected = Evaluator([labelled(ZOO[name], 0)])(model, headprune.resolve(model)).loss
    model.train()
    before = state_of(model)
    evaluator = Evaluator([labelled(ZOO[name], 0)])
    for changed in (None, [0], [len(headprune.resolve(model)) - 1]):
        # From the second time on fewer rows are multiplied at once, which may round in another way.
        assert evaluator(model, headprune.resolve(model), changed).loss == pytest.approx(expected, rel=1e-6)
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
    inside = {str(number): layer.intermediate for number, layer in enumerate(model.bert.encoder.layer)}
    with counted_calls(inside) as counts:
        assert evaluator(model, sites, []).loss == first.loss
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("mode", [True, False])
def test_layers_are_computed_once_whatever_mode_they_are_in(mode: bool) -> None:
    """What stands for an emptied site, and a model that trains, have other modes before and after."""
    model, batches = ZOO["bert"].build().train(mode), [labelled(ZOO["bert"], seed) for seed in (0, 1)]
    evaluator = Evaluator(batches)
    for _ in range(2):  # the second time looks up what is read
        evaluator(model, headprune.resolve(model))
    headprune.remove(model, [member for unit in headprune.resolve(model)[1].units() for member in unit])
    with counted_calls({"first": model.bert.encoder.layer[0].intermediate}) as first:
        evaluator(model, headprune.resolve(model), [1])
    assert first == {"first": 0}
    with counted_calls({"middle": model.bert.encoder.layer[1].intermediate}) as middle:
        evaluator(model, headprune.resolve(model), [2])
    assert middle == {"middle": 0}


def test_a_layer_that_changes_itself_is_never_answered_for() -> None:
    """From its second batch on, after what it held was looked at: then everything is computed once more."""
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], seed) for seed in (0, 1)]
    layer, calls = model.bert.encoder.layer[0], [0]

    def count(*given: Any) -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            with torch.no_grad():
                layer.intermediate.dense.bias.add_(0.1)

    evaluator = Evaluator(batches)
    for _ in range(2):
        evaluator(model, headprune.resolve(model))
    handle = layer.intermediate.register_forward_pre_hook(count)
    evaluator(model, headprune.resolve(model), [0])
    assert calls[0] == 4  # both batches, and both again
    handle.remove()
