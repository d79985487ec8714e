"""Weights in half precision: scores near those of the same weights in float32, and removals that keep the precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import headprune
from headprune.signals.moments import gather
from headprune.tasks import task_of
from score_helpers import labelled
from zoo import ZOO

HALF = [torch.bfloat16, torch.float16]
CRITERIA = ["residual-gradient", "residual-error", "hies", "gnorm", "fluctuation", "magnitude"]
# A score comes from some hundreds of rounded numbers one after the other, whose errors of one unit add up like a random
# walk, and once more on the way back.
ROUNDINGS = 32


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_scores_are_those_of_the_same_weights_in_float32(name: str, dtype: torch.dtype) -> None:
    model, batch = ZOO[name].build().to(dtype), labelled(ZOO[name], 0)
    expected = headprune.score(copy.deepcopy(model).float(), [batch], criteria=CRITERIA).scores
    actual = headprune.score(model, [batch], criteria=CRITERIA).scores
    for criterion in CRITERIA:
        assert actual[criterion].dtype == torch.float64
        difference = (actual[criterion] - expected[criterion]).abs().max() / expected[criterion].abs().max()
        assert difference <= ROUNDINGS * torch.finfo(dtype).eps / 2, criterion
    assert torch.equal(actual["magnitude"], expected["magnitude"])  # from the weights alone, in float64


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{"keep": 0.75}, {"keep_parameters": 0.97, "criterion": "wanda", "rounds": 1}])
def test_pruned_and_repaired_weights_keep_their_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, batch = ZOO["llama-gqa"].build().to(dtype), labelled(ZOO["llama-gqa"], 0)
    result = headprune.prune(model, [batch], **options)
    assert len(result.trajectory) > 1
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_moments_are_in_float64_whatever_the_weights_are() -> None:
    model = ZOO["bert"].build().bfloat16()
    sites = headprune.resolve(model)
    for moments in gather(model, sites, [labelled(ZOO["bert"], 0)], task_of(model)).values():
        assert moments.products.dtype == torch.float64
