"""Statistics of shards of the data add up to those of one pass, whatever the split."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import headprune
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import choose_metric
from headprune.signals.moments import Moments, gather
from score_helpers import EVERY, FROM_TOKENS, applicable, labelled, labels_of, model_of, precise
from zoo import ZOO

FAMILIES = ("bert", "albert", "llama-gqa", "bart")
# Sums of float64 in another order; the answers themselves come from the very same forward passes.
TOLERANCE = 1e-10
SPLITS = ([1, 3], [2, 2], [1, 1, 1, 1])  # batches of each shard


def data(name: str) -> list[Any]:
    """Four batches of three, two, one and three samples, so that folds shift within and between shards."""
    entry, sizes = ZOO[name], (3, 2, 1, 3)
    return [
        {key: value[:size] for key, value in precise(model_of(name, "dense"), labelled(entry, seed)).items()}
        for seed, size in enumerate(sizes)
    ]


def shards(name: str, split: list[int]) -> list[list[Any]]:
    left = iter(data(name))
    return [[next(left) for _ in range(count)] for count in split]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = float(other.nan_to_num(0).abs().max())
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def options_of(name: str) -> dict[str, Any]:
    streaming = [criterion for criterion in EVERY if criterion not in FROM_TOKENS]
    return {"criteria": applicable(ZOO[name], streaming), "labels": labels_of(ZOO[name])}


@functools.cache
def whole_score(name: str) -> Any:
    return headprune.score(model_of(name, "dense"), data(name), **options_of(name))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_shards_add_up_for_every_criterion(name: str, split: list[int]) -> None:
    whole, model, options = whole_score(name), model_of(name, "dense"), options_of(name)
    parts = [headprune.score(model, shard, **options) for shard in shards(name, split)]
    joined = functools.reduce(lambda one, other: one + other, parts)
    assert {key: close(joined.scores[key], whole.scores[key]) for key in whole.scores} == dict.fromkeys(
        options["criteria"], True
    )
    assert (joined.samples, joined.tokens) == (whole.samples, whole.tokens)
    assert torch.equal(joined.predictions, whole.predictions)
    assert torch.equal(joined.labels, whole.labels)
    assert joined.loss == pytest.approx(whole.loss, rel=TOLERANCE)
    assert joined.accuracy == whole.accuracy
    assert close(joined.zero_probabilities, whole.zero_probabilities)


@pytest.mark.parametrize("criterion", [*FROM_TOKENS, "elimination", "fluctuation", "wanda"])
def test_scores_from_all_the_data_at_a_site_do_not_add_up_and_say_so(criterion: str) -> None:
    """What is made of them is fitted to all tokens, and nothing runs the model again."""
    model = model_of("bert", "dense")
    first, second = (headprune.score(model, shard, criterion=criterion) for shard in shards("bert", [1, 3]))
    with pytest.raises(headprune.HeadpruneError, match=f"{criterion} cannot be merged; score all the data at once"):
        first + second


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_moments_of_shards_add_up(name: str, split: list[int]) -> None:
    """Folds follow the number of a sample in all the data, however many samples came before in its own shard."""
    model = model_of(name, "dense")
    sites = headprune.resolve(model)
    whole = gather(model, sites, data(name))
    parts = [gather(model, sites, shard) for shard in shards(name, split)]
    for index, expected in whole.items():
        joined: Moments = functools.reduce(lambda one, other: one + other, [part[index] for part in parts])
        assert torch.equal(joined.counts, expected.counts)
        assert joined.samples == expected.samples == 9
        assert torch.equal(joined.shift, expected.shift)
        for field in ("total", "products"):
            assert close(getattr(joined, field), getattr(expected, field)), (index, field)


@pytest.mark.parametrize("name", FAMILIES)
def test_quality_of_shards_adds_up(name: str) -> None:
    model = model_of(name, "dense")
    sites = headprune.resolve(model)
    whole = Evaluator(data(name))(model, sites)
    first, second = (Evaluator(shard)(model, sites) for shard in shards(name, [1, 3]))
    joined = first + second
    assert joined.samples == whole.samples == 9
    for field in ("values", "labels", "sample_ids"):
        assert torch.equal(getattr(joined, field), getattr(whole, field))
    assert (joined.loss, joined.token_loss) == (whole.loss, whole.token_loss)
    metric = choose_metric(None, whole)
    assert metric.of(joined).value == metric.of(whole).value
    assert metric.of(joined).interval == metric.of(whole).interval
