"""Backward elimination at a site, against least squares done the slow way."""

from __future__ import annotations

import itertools

import pytest
import torch

import headprune
from headprune.criteria.elimination_math import HeldOutError, convex_rises, eliminate, site_scores
from headprune.errors import CriterionError
from headprune.signals import tokens
from headprune.signals.sensitivity import Sensitivity
from headprune.tasks import task_of
from headprune.units import all_sites
from score_helpers import tokens_of
from zoo import ZOO


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_of(width: int) -> torch.Tensor:
    z = drawn(200, width) @ drawn(width, width, seed=1)
    return z.t() @ z / 200


def error_of(weight: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor, left: list[int]) -> float:
    """The least tr(M D H D^T) with only these columns left, by solving for them from the beginning."""
    inner, cross = spread[left][:, left], spread[left] @ weight.t()
    solved = torch.zeros_like(weight)
    if left:
        solved[:, left] = torch.linalg.solve(inner, cross).t()
    change = weight - solved
    return float((metric @ change @ spread @ change.t()).trace())


@pytest.mark.parametrize("width", [1, 3])
def test_every_removal_is_the_best_one_and_costs_what_solving_again_says(width: int) -> None:
    units = 6
    weight, half = drawn(4, units * width, seed=2), drawn(4, 4, seed=3)
    spread, metric = spread_of(units * width), half @ half.t()
    tiny = 1e-9  # of ridge, so that the two are the same problem
    left = list(range(units))
    for gone, columns, error in eliminate(weight, spread, metric, width, tiny, stages=units):
        assert len(gone) == 1
        options = {
            unit: error_of(
                weight,
                spread,
                metric,
                [unit_ * width + c for unit_ in left if unit_ != unit for c in range(width)],
            )
            for unit in left
        }
        assert gone[0] == min(options, key=lambda unit: options[unit])
        assert error == pytest.approx(options[gone[0]], rel=1e-4)
        left.remove(gone[0])
        assert columns.tolist() == [unit * width + c for unit in left for c in range(width)]
    assert not left


def test_neurons_leave_in_parts_and_all_of_them() -> None:
    weight, spread = drawn(4, 64, seed=2), spread_of(64)
    parts = [gone for gone, _, _ in eliminate(weight, spread, torch.eye(4, dtype=torch.float64), 1, 0.1)]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(64))
    assert len(parts[0]) == 8  # one in eight
    assert len(parts) < 64


def test_rises_are_those_of_the_convex_curve_below() -> None:
    assert convex_rises([1.0, 3.0, 6.0], [1, 1, 1]) == pytest.approx([1.0, 2.0, 3.0])  # convex as it is
    assert convex_rises([4.0, 5.0, 6.0], [1, 1, 1]) == pytest.approx([2.0, 2.0, 2.0])  # what is above is cut off
    assert convex_rises([1.0, 5.0], [2, 2]) == pytest.approx([0.5, 0.5, 2.0, 2.0])
    assert convex_rises([2.0, 1.0], [1, 1]) == pytest.approx([1.0, 1.0])  # an error that falls is noise


def test_the_effect_on_a_sample_is_the_sum_over_its_tokens() -> None:
    gradients, change = drawn(6, 3).float(), drawn(6, 3, seed=1).float()
    samples = torch.tensor([0, 0, 0, 1, 1, 2])
    actual = Sensitivity(torch.zeros(6, 2), [gradients], samples, samples % 2)
    expected = sum(float((gradients[samples == s] * change[samples == s]).sum()) ** 2 for s in range(3)) / 3
    assert actual.effect(change) == pytest.approx(expected, rel=1e-5)


def test_errors_are_those_of_samples_that_were_not_fitted() -> None:
    """Many columns can express what they are fitted to; what they say of other samples is another matter."""
    inputs, weight = drawn(24, 8).float(), drawn(3, 8, seed=1).float()
    actual = Sensitivity(inputs, [drawn(24, 3, seed=2).float()], torch.arange(24), torch.arange(24) % 2)
    unseen = HeldOutError(actual, inputs, weight, torch.ones(24), 1e-6)
    left = torch.arange(6)
    wanted = inputs[:, 6:] @ weight[:, 6:].t()  # what the two that go have added
    fitted = wanted - inputs[:, left] @ torch.linalg.lstsq(inputs[:, left], wanted).solution
    assert unseen.error(left) > actual.effect(fitted)
    by_hand = wanted.clone()
    for fold in (0, 1):
        own, other = torch.arange(24) % 2 == fold, torch.arange(24) % 2 != fold
        by_hand[own] -= inputs[own][:, left] @ torch.linalg.lstsq(inputs[other][:, left], wanted[other]).solution
    assert unseen.error(left) == pytest.approx(actual.effect(by_hand), rel=1e-3)
    assert unseen.error(torch.arange(8)) == pytest.approx(0.0, abs=1e-6)
    nothing = torch.tensor([], dtype=torch.long)
    assert unseen.error(nothing) == pytest.approx(actual.effect(inputs @ weight.t()), rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "gpt2", "vit", "albert", "t5"])
def test_gradients_are_those_of_the_outputs(name: str) -> None:
    """<g, y> over tokens is what a factor on the whole output of a site would change, by autograd on that factor."""
    model = ZOO[name].build().eval()
    batch = {k: v[:1] for k, v in ZOO[name].batch(0).items()}
    task, sites = task_of(model), all_sites(model)
    actual = tokens_of(model, sites, [batch], at_outputs=True)
    from headprune.signals.objectives import sign_gradient

    for site in sites[:: max(1, len(sites) // 3)]:
        factor = torch.ones((), requires_grad=True)
        output = model.get_submodule(site.o)
        handle = output.register_forward_hook(lambda m, a, out, factor=factor: out * factor)
        prepared = task.prepare(batch, torch.device("cpu"))
        logits = task.logits(model(**task.inputs(prepared)))
        handle.remove()
        (slope,) = torch.autograd.grad(logits, factor, sign_gradient(task, logits, prepared))
        own = Sensitivity.of(actual[site.index])
        weight = output.weight if hasattr(output, "nf") else output.weight.t()
        given = own.inputs @ weight.detach() + (0 if output.bias is None else output.bias.detach())
        assert float((own.gradients[0] * given).sum()) == pytest.approx(float(slope), rel=1e-3, abs=1e-5)


def test_draws_of_signs_differ() -> None:
    """Of many logits every draw is another sum; of two there is one only."""
    model = ZOO["llama-gqa"].build().eval()
    actual = tokens_of(model, all_sites(model), [ZOO["llama-gqa"].batch(0)], at_outputs=True)
    first, second = Sensitivity.of(actual[0]).gradients
    assert not torch.allclose(first, second)
    assert first.square().sum() == pytest.approx(float(second.square().sum()), rel=1.0)


def test_scores_of_a_site_rank_units_and_add_up_to_its_error() -> None:
    model = ZOO["bert"].build().eval()
    batches = [ZOO["bert"].batch(seed) for seed in range(6)]
    result = headprune.score(model, batches, criterion="elimination", units="heads,neurons")
    sites = all_sites(model)
    assert result.scores.shape == (6, 20)
    actual = tokens_of(model, sites, batches, at_outputs=True)
    for site in sites:
        own = site_scores(model, site, Sensitivity.of(actual[site.index]), ridge=0.1)
        assert torch.equal(result.scores[site.index, list(site.kept)], own)
        assert (own >= 0).all()
        assert own.unique().numel() == site.size  # an order, without ties


def test_large_models_are_gone_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["bert"].build().eval()
    batches = [ZOO["bert"].batch(0)]
    ran: list[int] = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    at_once = headprune.score(model, batches, criterion="elimination", units="heads,neurons").scores
    assert len(ran) == 1
    monkeypatch.setattr(tokens, "TOKEN_BYTES", 1)
    apart = headprune.score(model, batches, criterion="elimination", units="heads,neurons").scores
    assert torch.equal(apart.nan_to_num(-1), at_once.nan_to_num(-1))
    assert len(ran) == 1 + 6


def test_options_and_shards_that_make_no_sense() -> None:
    with pytest.raises(CriterionError, match="metric of elimination must be one of gradient, output"):
        headprune.score(ZOO["bert"].build(), [], criterion="elimination(metric=loss)")
    with pytest.raises(CriterionError, match="ridge of elimination must be above 0"):
        headprune.score(ZOO["bert"].build(), [], criterion="elimination(ridge=0)")
    one = headprune.score(ZOO["bert"].build(), [ZOO["bert"].batch(0)], criterion="elimination")
    with pytest.raises(CriterionError, match="cannot be merged"):
        _ = one + one


def test_the_output_metric_needs_no_gradient() -> None:
    model = ZOO["bert"].build().eval()
    with torch.no_grad():
        scores = headprune.score(model, [ZOO["bert"].batch(0)], criterion="elimination(metric=output)").scores
    assert torch.isfinite(scores).all()


def test_scores_do_not_depend_on_the_order_of_the_samples() -> None:
    """Which samples are held out follows from their content, and not from their place."""
    model = ZOO["bert"].build().double().eval()
    batches = [ZOO["bert"].batch(seed) for seed in range(2)]
    samples = [{name: value[row : row + 1] for name, value in b.items()} for b in batches for row in range(3)]
    expected = headprune.score(model, samples, criterion="elimination", units="heads,neurons").scores
    for order in ([5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4], [0, 2, 4, 1, 3, 5]):
        chosen = [samples[number] for number in order]
        scores = headprune.score(model, chosen, criterion="elimination", units="heads,neurons").scores
        assert torch.allclose(scores, expected, rtol=1e-9, equal_nan=True)
