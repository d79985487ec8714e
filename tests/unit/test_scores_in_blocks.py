"""Scores and repairs with logits in blocks of tokens: what whole logits give, and nothing as large as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import headprune
from headprune.criteria import make
from headprune.criteria.scoring_pass import ScoringPass
from headprune.errors import EquivalenceError, NonFiniteError
from headprune.hooks import logit_blocks
from headprune.measure.savings import _TensorMeter
from headprune.repair.dense_targets import DenseTargets
from headprune.repair.front_to_back import calls_of_sites
from headprune.signals.objectives import TokenSigns, sign_gradient, start_backward, targets_of
from headprune.signals.sensitivity import Sensitivity
from headprune.tasks import task_of
from headprune.units import all_sites
from score_helpers import labelled, tokens_of
from zoo import ZOO

CRITERIA = [
    "gnorm",
    "gnorm(objective=loss)",
    "gnorm(aggregation=batch)",
    "gnorm(objective=loss,aggregation=batch)",
    "his",
    "tis",
    "fisher",
    "taylor",
    "hies",
    "residual-gradient",
    "residual-gradient(residual=False)",
    "attribution(steps=2)",
    "elimination",
]
# Plain, with grouped heads; capped; a tied head, in float64; a decoder that is called past the base model.
NAMES = ["llama-gqa", "gemma2", "gpt2", "opt"]
Batch = dict[str, torch.Tensor]


def built(name: str) -> Any:
    """GPT-2 computes in the precision of its weights throughout; RMS norms compute in float32 in any case."""
    model = ZOO[name].build().eval()
    return model.double() if name == "gpt2" else model


def tolerance(name: str) -> float:
    """Of scores, relative to the largest of a criterion: rounding of float64, or of float32 where terms cancel."""
    return 1e-12 if name == "gpt2" else 2e-5


def batches_of(name: str) -> list[Batch]:
    """Padded; in the second, labels of which some do not count, and all of one sample do not."""
    first, second = labelled(ZOO[name], 0), labelled(ZOO[name], 1)
    labels = second["input_ids"].masked_fill(second["attention_mask"] == 0, -100)
    labels[0, ::3] = -100
    labels[1] = -100
    assert (first["attention_mask"] == 0).any()
    return [first, {**second, "labels": labels}]


@contextmanager
def in_blocks(model: Any, rows: int = 3, tokens: int = 2) -> Iterator[None]:
    with (
        mock.patch.object(logit_blocks, "LIMIT", 0),
        mock.patch.object(logit_blocks, "BLOCK", rows * tokens * model.config.vocab_size * 4),
    ):
        yield


@contextmanager
def made_logits(model: Any) -> Iterator[list[int]]:
    """How many tokens the head is run on, call after call."""
    made: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda m, a, out: made.append(out.shape[1]))
    yield made
    handle.remove()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("labels", ["given", "self"])
def test_scores_and_quality_are_those_of_whole_logits(name: str, labels: Any) -> None:
    model, batches = built(name), batches_of(name)
    whole = headprune.score(model, batches, criteria=CRITERIA, labels=labels)
    with in_blocks(model), made_logits(model) as made:
        actual = headprune.score(model, batches, criteria=CRITERIA, labels=labels)
    assert max(made) == 2
    assert list(actual.scores) == list(whole.scores) == CRITERIA
    for criterion in CRITERIA:
        expected = whole.scores[criterion]
        # Elimination ranks units by tokens that it keeps in float32.
        allowed = max(tolerance(name), 2e-5 if criterion == "elimination" else 0.0)
        assert (actual.scores[criterion] - expected).abs().max() <= allowed * expected.abs().max(), criterion
    for one, other in ((actual.predictions, whole.predictions), (actual.labels, whole.labels)):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert torch.equal(actual.quality.sample_ids, whole.quality.sample_ids)
    assert actual.loss == pytest.approx(whole.loss, rel=tolerance(name))
    assert actual.tokens == whole.tokens


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_draws_are_those_of_whole_logits(name: str) -> None:
    model, batches = built(name), batches_of(name)
    sites = all_sites(model)
    whole = tokens_of(model, sites, batches, at_outputs=True)
    with in_blocks(model), made_logits(model) as made:
        actual = tokens_of(model, sites, batches, at_outputs=True)
    assert max(made) == 2
    assert actual.keys() == whole.keys()
    for index, gathered in actual.items():
        own, truth = Sensitivity.of(gathered), Sensitivity.of(whole[index])
        assert torch.equal(own.inputs, truth.inputs)
        assert torch.equal(own.samples, truth.samples)
        assert len(own.gradients) == len(truth.gradients) == 2
        for one, other in zip(own.gradients, truth.gradients, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_repairs_towards_the_dense_model_are_those_of_whole_logits(name: str) -> None:
    model, batches = built(name), batches_of(name)
    sites, task = all_sites(model), task_of(model)
    whole = DenseTargets(model, sites, batches, task).targets
    with in_blocks(model), made_logits(model) as made:
        actual = DenseTargets(model, sites, batches, task).targets
    assert max(made) == 2
    assert list(actual) == list(whole)
    for index, own in actual.items():
        for one, other in zip(own.outputs, whole[index].outputs, strict=True):
            assert torch.equal(one, other)
        assert own.weights is not None
        assert (own.streams is None) == (whole[index].streams is None)
        for one, other in zip(own.weights, whole[index].weights or (), strict=True):
            assert torch.allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("draw", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_signs_of_blocks_are_those_of_all_tokens(draw: int, size: int) -> None:
    model = ZOO["llama-gqa"].build()
    batch, task = labelled(ZOO["llama-gqa"], 0), task_of(model)
    batch["attention_mask"][0, 3:5] = 0  # padding may stand anywhere
    rows, tokens = batch["input_ids"].shape
    values = torch.zeros(rows, tokens, 61)
    whole = sign_gradient(task, values, batch, draw)
    signs = TokenSigns(task, values, batch, draw)
    places = [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]
    actual = torch.cat([signs.gradient(values[:, own], own) for own in places], dim=1)
    assert torch.equal(actual, whole)
    assert whole.any()


def test_logits_that_are_not_finite_are_refused_in_the_same_words() -> None:
    model = built("llama-gqa")
    batches = batches_of("llama-gqa")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.inf
    said = []
    for criterion in ("residual-gradient", "entropy"):
        with pytest.raises(NonFiniteError) as whole:
            headprune.score(model, batches, criterion=criterion)
        with in_blocks(model), made_logits(model) as made, pytest.raises(NonFiniteError) as actual:
            headprune.score(model, batches, criterion=criterion)
        assert max(made) == 2
        assert str(actual.value) == str(whole.value)
        said.append(str(actual.value))
    assert said[0].startswith("NaN or Inf appeared first in batch 0")


@pytest.mark.parametrize("objective", ["loss", "logit-norm", "logit-signs"])
def test_no_gradient_of_logits_that_are_not_finite_passes_for_one(objective: str) -> None:
    """One logit is infinite, which the signs of the others know nothing of."""
    model, (batch, _) = built("llama-gqa"), batches_of("llama-gqa")
    task, head = task_of(model), model.lm_head
    head.register_forward_hook(lambda m, a, out: out.index_fill(-1, torch.tensor([7]), torch.inf))
    with in_blocks(model):
        states = logit_blocks.forward(model, task, task.inputs(batch))
        assert isinstance(states, logit_blocks.States)
        targets = targets_of(task, batch, states, "given")
        root, gradient = start_backward(objective, "sample", task, states, targets, batch)
    assert root is states.hidden
    assert gradient.isnan().all()


def test_a_head_that_looks_at_the_place_of_tokens_scores_whole() -> None:
    """A block would have other logits, which is found when the body has run: sites must not see a second pass."""
    model = built("llama-gqa")

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            places = torch.arange(output.logits.shape[1])[None, :, None]
            output.logits = (output.logits + places * output.logits)[:, -logits_to_keep:]
            return output

    model.__class__ = Odd
    batches, sites = batches_of("llama-gqa"), headprune.resolve(built("llama-gqa"))
    results, ran = [], []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    with mock.patch("headprune.criteria.scoring.sites_of_kinds", return_value=sites):
        for limit in (1 << 28, 0):
            with mock.patch.object(logit_blocks, "LIMIT", limit):
                results.append(headprune.score(model, batches, criteria=["gnorm", "his", "entropy"], task="causal-lm"))
    whole, actual = results
    assert len(ran) == 2 * (len(batches) + 1)  # entropy compares the logits of the first batch with unread ones
    assert actual.tokens == whole.tokens
    for criterion, scores in whole.scores.items():
        assert torch.allclose(actual.scores[criterion], scores, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_removal_is_checked_without_its_logits(name: str) -> None:
    model, (batch, _) = built(name), batches_of(name)
    with in_blocks(model), made_logits(model) as made:
        headprune.remove(model, [(0, 0), (0, 1), (1, 2), (1, 3)], verify=batch)
    assert set(made) == {1}
    other = built(name)
    wrong = mock.patch("headprune.surgery.remove_units.slice_weights", return_value=None)
    with in_blocks(other), wrong, pytest.raises(EquivalenceError):
        headprune.remove(other, [(0, 0), (0, 1), (1, 2), (1, 3)], verify=batch)


# --- nothing is as large as the logits ---

VOCABULARY, ROWS, TOKENS = 4099, 4, 48


def large() -> tuple[Any, list[Batch]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    ids = torch.randint(5, VOCABULARY, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return transformers.LlamaForCausalLM(config).eval(), [{"input_ids": ids, "attention_mask": mask}]


class Largest(TorchDispatchMode):
    """The most numbers in a tensor whose last axis is the vocabulary, by its memory: an expanded one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and not one.is_meta and one.shape[-1:] == (VOCABULARY,):
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
        return result


WORK: dict[str, Callable[[Any, list[Batch]], Any]] = {
    "score": lambda model, data: headprune.score(
        model, data, criteria=[own for own in CRITERIA if not own.startswith("attribution")]
    ),
    "own labels": lambda model, data: headprune.score(model, data, criterion="his", labels="self"),
    "attribution": lambda model, data: headprune.score(model, data, criterion="attribution(steps=1)"),
    "columns": lambda model, data: headprune.score(model, data, criterion="wanda"),
    "dense": lambda model, data: DenseTargets(model, all_sites(model), data, task_of(model)),
    "rounds": lambda model, data: headprune.prune(
        model, data, keep_parameters=0.99, schedule="rounds", rounds=1, units="heads,neurons"
    ),
}


@pytest.mark.parametrize("work", WORK)
def test_no_tensor_is_as_large_as_the_logits(work: str) -> None:
    model, data = large()
    with in_blocks(model, ROWS, 3), Largest() as largest:
        WORK[work](model, data)
    assert largest.numbers <= VOCABULARY * 16  # the head's own weight; a block of three tokens is 12 rows
    assert largest.numbers < VOCABULARY * ROWS * TOKENS


def test_scores_in_blocks_need_a_fraction_of_the_logits() -> None:
    model, data = large()

    def score() -> float:
        with _TensorMeter() as meter:
            headprune.score(model, data, criteria=["gnorm", "residual-gradient", "his"])
        return meter.peak / (VOCABULARY * ROWS * TOKENS * 4)

    whole = score()
    with in_blocks(model, ROWS, 1):
        actual = score()
    assert whole > 2
    assert actual < 0.5 * whole


def unmeasured(model: Any, data: list[Batch], criterion: str) -> None:
    """Scores alone, without predictions of the model."""
    made = ScoringPass(model, all_sites(model), {criterion: make(criterion)}, task_of(model), "given")
    made.run(data, measure=False)


PASSES: dict[str, Callable[[Any, list[Batch]], Any]] = {
    "columns": lambda model, data: unmeasured(model, data, "wanda"),
    "outputs": lambda model, data: DenseTargets(model, all_sites(model), data, task_of(model), weighted=False),
    "tokens": lambda model, data: unmeasured(model, data, "elimination(metric=output)"),
    "order": lambda model, data: list(calls_of_sites(model, all_sites(model), data[0], task_of(model))),
}


@pytest.mark.parametrize("work", PASSES)
def test_passes_that_need_no_logits_make_those_of_one_token(work: str) -> None:
    model, data = large()
    with made_logits(model) as made:
        PASSES[work](model, data)
    assert made
    assert set(made) == {1}
