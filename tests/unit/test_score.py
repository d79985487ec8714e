"""`score`: one pass for all criteria, results that add up, and half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from headprune.errors import CriterionError
from oracles import relative_differences
from score_helpers import EVERY, FROM_TOKENS, floor_of, labelled, model_of, oracle_of, some_batches
from zoo import LABELS, ZOO, text_batch


def bert_batches() -> list[dict[str, torch.Tensor]]:
    return [labelled(ZOO["bert"], 0), labelled(ZOO["bert"], 5)]


def without_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


# --- one pass -------------------------------------------------------------------------------------------------------


class Passes:
    """Counts forwards, and gradients that arrive at the logits, and notes what was asking for gradients meanwhile."""

    def __init__(self, model: Any) -> None:
        self.forwards = self.backwards = self.asking = 0
        self.graph = False
        self.handle = model.register_forward_hook(self._seen)

    def _seen(self, model: Any, args: Any, output: Any) -> None:
        self.forwards += 1
        self.asking += sum(parameter.requires_grad for parameter in model.parameters())
        if output.logits.requires_grad:
            self.graph = True
            output.logits.register_hook(self._gradient)

    def _gradient(self, gradient: torch.Tensor) -> None:
        self.backwards += 1


@pytest.mark.parametrize(
    ("criteria", "backwards"),
    [
        (["gnorm"], 1),
        (["his", "tis", "taylor", "hies", "gnorm(objective=loss)", "entropy", "deficit"], 1),
        (["gnorm", "inverse:gnorm", "his", "taylor", "hies", "entropy", "magnitude"], 2),
        (["gnorm", "gnorm(aggregation=batch)", "gnorm(objective=loss)"], 3),
        (["entropy", "deficit", "magnitude", "random"], 0),
        (["residual-gradient", "inverse:residual-gradient", "residual-gradient(residual=False)", "residual-error"], 1),
        (["residual-gradient", "gnorm", "his"], 3),
        (["residual-error", "entropy"], 0),
    ],
)
def test_criteria_share_one_forward_and_one_backward_per_objective(criteria: list[str], backwards: int) -> None:
    """What is fitted first has a forward before that, which ends at the last site and so never gives logits. Where
    attention probabilities are read, the first batch runs once more without that."""
    model = ZOO["bert"].build()
    passes = Passes(model)
    headprune.score(model, bert_batches(), criteria=criteria)
    checks = bool({"hies", "entropy", "deficit"} & set(criteria))
    assert (passes.forwards, passes.backwards) == (2 + checks, 2 * backwards)
    assert passes.graph == (backwards > 0), "without gradients to take, no graph is recorded"
    assert passes.asking == 0, "no parameter asks for a gradient during a pass"


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v3", "llama-gqa", "bart"])
def test_several_criteria_in_one_call_equal_each_alone(name: str) -> None:
    model, batches = model_of(name, "some-heads"), [labelled(ZOO[name], 0), labelled(ZOO[name], 5)]
    together = headprune.score(model, batches, criteria=EVERY)
    assert list(together.scores) == EVERY
    for criterion in EVERY:
        alone = headprune.score(model, batches, criterion=criterion)
        assert isinstance(alone.scores, torch.Tensor)
        gap = relative_differences(together.scores[criterion], alone.scores, floor=floor_of(criterion))
        assert float(gap.max()) <= 1e-5, criterion
        assert (alone.samples, alone.tokens) == (together.samples, together.tokens) == (6, alone.tokens)


def test_what_the_pass_saw_is_what_a_plain_forward_says() -> None:
    model, batches = model_of("bert", "dense"), some_batches(ZOO["bert"])
    result = headprune.score(model, iter(batches), criterion="gnorm")
    with torch.no_grad():
        logits = torch.cat([model(**without_labels(batch)).logits for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert result.predictions is not None
    assert result.labels is not None
    assert result.predictions.tolist() == logits.argmax(-1).tolist() == oracle_of("bert", "dense").predictions()
    assert result.labels.tolist() == labels.tolist()
    assert result.accuracy == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.samples == 5
    assert result.tokens == sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert result.seconds > 0
    assert result.scores.shape == (3, 4)
    assert result.scores.dtype == torch.float64


def test_without_labels_there_are_predictions_but_no_accuracy() -> None:
    result = headprune.score(model_of("bert", "dense"), map(without_labels, bert_batches()), criterion="entropy")
    assert result.predictions is not None
    assert (result.accuracy, result.loss, result.labels) == (None, None, None)


def test_ignored_labels_do_not_count_for_the_accuracy() -> None:
    model, batch = model_of("bert", "dense"), bert_batches()[0]
    with torch.no_grad():
        predicted = model(**without_labels(batch)).logits.argmax(-1)
    wrong = (predicted + 1) % LABELS
    batch["labels"] = torch.stack([predicted[0], torch.tensor(-100), wrong[2]])
    assert headprune.score(model, [batch], criterion="gnorm").accuracy == 0.5


def test_own_predictions_as_labels() -> None:
    """`labels="self"` is the same as giving what the model predicts, whatever labels the batches have."""
    model, batches = model_of("bert", "dense"), bert_batches()
    with torch.no_grad():
        predicted = [{**b, "labels": model(**without_labels(b)).logits.argmax(-1)} for b in batches]
    assert any(not torch.equal(one["labels"], two["labels"]) for one, two in zip(batches, predicted, strict=True))
    for criterion in ("his", "taylor", "gnorm(objective=loss)", "attribution(steps=2)"):
        own = headprune.score(model, batches, criterion=criterion, labels="self")
        assert torch.equal(own.scores, headprune.score(model, predicted, criterion=criterion).scores)
        bare = headprune.score(model, map(without_labels, batches), criterion=criterion, labels="self")
        assert torch.equal(own.scores, bare.scores)
        given = headprune.score(model, batches, criterion=criterion)
        assert not torch.equal(own.scores, given.scores)
        assert own.accuracy == given.accuracy, "accuracy is against the labels of the data"


def test_progress_is_told_of_every_batch() -> None:
    told: list[int] = []
    sizes = [text_batch(0), text_batch(1, size=2), text_batch(2, size=5)]
    headprune.score(model_of("bert", "dense"), sizes, criterion="entropy", progress=told.append)
    assert told == [3, 2, 5]


def test_criteria_of_weights_need_no_data() -> None:
    result = headprune.score(model_of("bert", "dense"), criteria=["magnitude", "random"])
    assert result.samples == 0
    assert all(scores.isfinite().all() for scores in result.scores.values())


def test_a_model_without_any_head_left_has_only_nan() -> None:
    result = headprune.score(model_of("albert", "first-site-gone"), [labelled(ZOO["albert"], 0)], criteria=EVERY)
    assert all(scores.isnan().all() for scores in result.scores.values())
    assert result.predictions is not None


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v3", "llama-gqa", "bart", "clip"])
def test_scores_of_shards_add_up(name: str) -> None:
    model = model_of(name, "some-heads")
    criteria = ["gnorm", "gnorm(aggregation=batch)", "entropy", "magnitude"] if name == "clip" else EVERY
    criteria = [criterion for criterion in criteria if criterion not in FROM_TOKENS]
    batches = [labelled(ZOO[name], seed) for seed in (0, 5, 6)]
    whole = headprune.score(model, batches, criteria=criteria)
    first, rest = (headprune.score(model, part, criteria=criteria) for part in (batches[:1], batches[1:]))
    merged = first + rest
    for criterion in criteria:
        one, other = merged.scores[criterion], whole.scores[criterion]
        assert torch.equal(one.isnan(), other.isnan())
        assert ((one - other).abs() <= 1e-10 * other.abs())[~other.isnan()].all(), criterion
        assert torch.equal(one.isnan(), first.scores[criterion].isnan())
    assert (merged.samples, merged.tokens) == (whole.samples, whole.tokens) == (9, whole.tokens)
    assert merged.seconds == first.seconds + rest.seconds
    assert merged.accuracy == whole.accuracy
    assert merged.loss == (None if whole.loss is None else pytest.approx(whole.loss, rel=1e-10))
    assert merged.zero_probabilities is not None
    assert torch.allclose(merged.zero_probabilities, whole.zero_probabilities, rtol=0, atol=0, equal_nan=True)
    if whole.predictions is not None:
        assert torch.equal(merged.predictions, whole.predictions)


def test_a_single_score_merges_into_a_single_score() -> None:
    model, (one, two) = model_of("bert", "dense"), bert_batches()
    merged = sum_of = headprune.score(model, [one], criterion="his") + headprune.score(model, [two], criterion="his")
    assert torch.allclose(sum_of.scores, headprune.score(model, [one, two], criterion="his").scores, rtol=1e-10)
    again = merged + headprune.score(model, [one], criterion="his")
    assert again.samples == 9
    assert torch.allclose(
        again.scores, headprune.score(model, [one, two, one], criterion="his").scores, rtol=1e-10, atol=0
    )


def test_batches_may_come_from_anything_that_gives_them_once() -> None:
    model, batches = model_of("bert", "dense"), bert_batches()
    for criterion in FROM_TOKENS:
        told: list[int] = []
        once = headprune.score(model, (batch for batch in batches), criterion=criterion, progress=told.append)
        assert torch.equal(once.scores, headprune.score(model, batches, criterion=criterion).scores)
        assert told == [3, 3]


def test_only_like_merges_with_like() -> None:
    batches = bert_batches()
    his = headprune.score(model_of("bert", "dense"), batches, criterion="his")
    with pytest.raises(CriterionError, match="same criteria"):
        his + headprune.score(model_of("bert", "dense"), batches, criterion="tis")
    with pytest.raises(CriterionError, match="same criteria"):
        headprune.score(model_of("bert", "dense"), batches, criterion="hies(alpha=0.3)") + headprune.score(
            model_of("bert", "dense"), batches, criterion="hies"
        )
    with pytest.raises(CriterionError, match="same heads"):
        his + headprune.score(model_of("bert", "some-heads"), batches, criterion="his")


# --- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-gqa", "vit"])
def test_bfloat16_comes_near_float32(name: str) -> None:
    """Within 5 % of the largest score: bfloat16 rounds to 0.2 %, and a score is a product of up to three gradients
    behind some ten roundings. What is accumulated from them is exact; see test_signals."""
    entry = ZOO[name]
    batches = [labelled(entry, 0), labelled(entry, 5)]
    half = [
        {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
        for batch in batches
    ]
    criteria = ["gnorm", "his", "entropy", "hies", "attribution(steps=2)", "residual-error"]
    if name != "vit":  # its signs follow from the content of a sample, and rounded pixels are another content
        criteria.append("residual-gradient(residual=False)")
    full = headprune.score(model_of(name, "dense"), batches, criteria=criteria)
    actual = headprune.score(entry.build().bfloat16(), half, criteria=criteria)
    for criterion in criteria:
        gap = (actual.scores[criterion] - full.scores[criterion]).abs().max() / full.scores[criterion].abs().max()
        assert gap <= 0.05, criterion
        assert actual.scores[criterion].dtype == torch.float64
