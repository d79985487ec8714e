"""The least-squares problem of one site, against a direct solver and against the tokens themselves."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headprune
from headprune.errors import DataError
from headprune.repair import regression as regression_module
from headprune.repair.regression import SITE_RIDGES, Repair, RepairKind, Sums, best_ridge, fit, least_squares
from headprune.signals.moments import Moments, gather
from helpers import outputs
from run_helpers import counted_calls
from score_helpers import labelled
from zoo import ZOO


def moments_of(tokens: torch.Tensor, parts: int = 3) -> Moments:
    """Every token is a sample of its own, so that the folds take turns."""
    chunks = [chunk for chunk in tokens.chunk(parts) if len(chunk)]
    moments = Moments.about(chunks[0].double().mean(0))
    for chunk, numbers in zip(chunks, torch.arange(len(tokens)).chunk(parts), strict=False):
        moments.add(chunk, numbers % 2)
    return moments


def solve(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    moments: Moments,
    removed: torch.Tensor,
    word: RepairKind,
    site: int = 0,
) -> Repair:
    """The repair of a site that loses these columns of its weight."""
    return fit(weight[:, ~removed], bias, Sums.of_removal(weight, removed, moments), word, site=site)


def problem(
    seed: int, *, tokens: int = 60, width: int = 9, gone: int = 3, rank: int | None = None, out: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head outputs [tokens x width] with a mean, a weight [out x width], and which columns go."""
    generator = torch.Generator().manual_seed(seed)
    rank = width if rank is None else rank
    mixed = torch.randn(tokens, rank, generator=generator, dtype=torch.float64)
    mixed = mixed @ torch.randn(rank, width, generator=generator, dtype=torch.float64)
    mixed += torch.randn(width, generator=generator, dtype=torch.float64)
    weight = torch.randn(out, width, generator=generator, dtype=torch.float64)
    removed = torch.zeros(width, dtype=torch.bool)
    removed[torch.randperm(width, generator=generator)[:gone]] = True
    return mixed, weight, removed


def regression(tokens: torch.Tensor, lost: torch.Tensor, removed: torch.Tensor, ridge: float) -> torch.Tensor:
    """Ridge regression by an augmented system on the tokens."""
    inputs, targets = tokens[:, ~removed], tokens[:, removed] @ lost.t()
    count, width = inputs.shape
    penalty = math.sqrt(ridge * inputs.square().mean() * count) * torch.eye(width, dtype=tokens.dtype)
    nothing = targets.new_zeros(width, targets.shape[1])
    solved = torch.linalg.lstsq(torch.cat([inputs, penalty]), torch.cat([targets, nothing]), driver="gelsd")
    return solved.solution.t()


def direct(tokens: torch.Tensor, lost: torch.Tensor, removed: torch.Tensor, *, centred: bool) -> torch.Tensor:
    """The ridge that does best on the tokens it was not fitted to, every other one, and then the fit to all of them."""

    def about(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return some - others.mean(0) if centred else some

    def unseen_error(ridge: float) -> float:
        total = 0.0
        for seen, unseen in ((tokens[::2], tokens[1::2]), (tokens[1::2], tokens[::2])):
            change = regression(about(seen, seen), lost, removed, ridge)
            rest = about(unseen, seen)
            total += float((rest[:, removed] @ lost.t() - rest[:, ~removed] @ change.t()).square().sum())
        return total

    best = min(sorted(SITE_RIDGES, reverse=True), key=unseen_error)
    return regression(about(tokens, tokens), lost, removed, best)


def error_on(tokens: torch.Tensor, weight: torch.Tensor, removed: torch.Tensor, new: Any, shift: Any) -> float:
    """The mean squared change of the site's output, token by token."""
    before = tokens @ weight.double().t()
    after = tokens[:, ~removed] @ new.double().t() + (0 if shift is None else shift.double())
    return float((before - after).square().sum(1).mean())


@pytest.mark.parametrize("centred", [True, False], ids=["with-bias", "without-bias"])
@pytest.mark.parametrize("seed", range(6))
def test_least_squares_is_what_a_direct_solver_finds(seed: int, centred: bool) -> None:
    tokens, weight, removed = problem(seed, tokens=20 + 10 * seed)
    lost = weight[:, removed]
    sums = Sums.of_removal(weight, removed, moments_of(tokens))
    solved = least_squares(sums, SITE_RIDGES, centred=centred)
    assert solved is not None
    actual, _ = solved
    torch.testing.assert_close(actual, direct(tokens, lost, removed, centred=centred), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_a_linear_function_of_the_rest_is_made_up_for_entirely(bias: bool) -> None:
    tokens, weight, removed = problem(0, tokens=200, width=12, gone=4)
    generator = torch.Generator().manual_seed(1)
    tokens[:, removed] = tokens[:, ~removed] @ torch.randn(8, 4, generator=generator, dtype=torch.float64)
    tokens[:, removed] += 3.0 if bias else 0.0  # a constant needs a bias to go into
    repair = solve(weight, torch.zeros(5, dtype=torch.float64) if bias else None, moments_of(tokens), removed, "lstsq")
    assert repair.kind == "lstsq"
    assert repair.error_without > 1
    assert repair.error < 1e-12 * repair.error_without


def test_a_constant_needs_only_the_mean() -> None:
    tokens, weight, removed = problem(2)
    tokens[:, removed] = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments_of(tokens), removed, "mean")
    assert repair.kind == "mean"
    assert repair.error == pytest.approx(0, abs=1e-12)
    assert torch.equal(repair.weight, weight[:, ~removed])
    torch.testing.assert_close(repair.bias, weight[:, removed] @ tokens[0, removed])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 40),
    width=st.integers(2, 10),
    rank=st.integers(1, 10),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    word=st.sampled_from(["lstsq", "mean"]),
)
def test_no_repair_makes_the_output_worse_on_its_tokens(
    seed: int, tokens: int, width: int, rank: int, scale: float, dtype: torch.dtype, bias: bool, word: Any
) -> None:
    gone = 1 + seed % width
    data, weight, removed = problem(seed, tokens=tokens, width=width, rank=min(rank, width), gone=gone)
    data = data * scale
    weight = weight.to(dtype)
    old = torch.zeros(5, dtype=dtype) if bias else None
    repair = solve(weight, old, moments_of(data), removed, word)
    kept = weight[:, ~removed] if repair.weight is None else repair.weight
    plain = error_on(data, weight, removed, weight[:, ~removed], None)
    after = error_on(data, weight, removed, kept, repair.bias)
    assert math.isfinite(after)
    assert torch.isfinite(kept).all()
    slack = 1e-9 * max(plain, 1e-300) + 1e-12 * float((data @ weight.double().t()).square().sum(1).mean())
    assert after <= plain + slack
    assert repair.error_without == pytest.approx(plain, rel=1e-6, abs=slack)
    assert repair.error == pytest.approx(after, rel=1e-6, abs=slack)
    assert (repair.bias is not None) <= bias


def test_too_few_tokens_do_not_pass_for_a_perfect_fit() -> None:
    """Five tokens fit eight columns exactly, and nothing that they say holds for other tokens."""
    tokens, weight, removed = problem(3, tokens=2005, width=12, gone=4)
    few, many = tokens[:5], tokens[5:]
    repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments_of(few), removed, "lstsq")
    exact = torch.linalg.lstsq(few[:, ~removed], few[:, removed]).solution.t()
    interpolated = weight[:, ~removed] + weight[:, removed] @ exact
    ours = error_on(many, weight, removed, repair.weight, repair.bias)
    assert ours < error_on(many, weight, removed, interpolated, None)


def test_many_tokens_of_few_samples_do_not_pass_for_many_samples() -> None:
    """Sixteen samples of fifty tokens that hardly differ, and heads that have nothing to do with each other. Tried on
    other tokens of the same samples a fit looks perfect; tried on other samples it does not, and does less harm."""
    _, weight, removed = problem(6, width=12, gone=4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1016, 12, generator=generator, dtype=torch.float64)
    few, many = tokens[:16], tokens[16:]
    noise = torch.randn(800, 12, generator=generator, dtype=torch.float64)
    alike = few.repeat_interleave(50, dim=0) + 1e-3 * noise
    ridges, errors = [], []
    for numbers in (torch.arange(16).repeat_interleave(50), torch.arange(800)):
        moments = Moments.about(alike.mean(0))
        moments.add(alike, numbers % 2)
        ridges.append(best_ridge(Sums.of_removal(weight, removed, moments), SITE_RIDGES, centred=True))
        repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments, removed, "lstsq")
        errors.append(error_on(many, weight, removed, repair.weight, repair.bias))
    assert ridges[0] > ridges[1]
    assert errors[0] < errors[1]


def test_a_single_sample_is_trusted_least() -> None:
    tokens, weight, removed = problem(7)
    moments = Moments.about(tokens.mean(0))
    moments.add(tokens, torch.zeros(len(tokens), dtype=torch.long))
    assert best_ridge(Sums.of_removal(weight, removed, moments), SITE_RIDGES, centred=True) == max(SITE_RIDGES)


def test_what_a_precision_cannot_hold_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The removed head is a million times the kept one, and half precision ends at 65504."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(50, 1, generator=generator, dtype=torch.float64) * 1e-6
    tokens = torch.cat([small, small * 1e6 + 1], dim=1)
    removed = torch.tensor([False, True])
    weight = torch.ones(2, 2, dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        repair = solve(weight, torch.zeros(2, dtype=torch.float16), moments_of(tokens), removed, "lstsq", site=7)
    assert repair.kind == "mean"
    assert repair.error < repair.error_without
    assert torch.isfinite(repair.weight).all()
    assert "site 7" in caplog.text
    with caplog.at_level(logging.WARNING):
        assert solve(weight, None, moments_of(tokens), removed, "lstsq").kind == "none"


@pytest.mark.parametrize("scale", [0.0, 1e-162, 1e-155, 1e150])
def test_outputs_of_any_size_give_finite_weights(scale: float) -> None:
    """Squares of the smallest are no longer exact in float64, or nothing at all."""
    tokens, weight, removed = problem(8)
    repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments_of(tokens * scale), removed, "lstsq")
    assert repair.error <= repair.error_without
    assert repair.weight is None or torch.isfinite(repair.weight).all()
    assert repair.bias is None or torch.isfinite(repair.bias).all()


def test_a_problem_without_solution_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regression_module, "_factorised", lambda matrix: (matrix, True))
    tokens, weight, removed = problem(9)
    with caplog.at_level(logging.WARNING):
        repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments_of(tokens), removed, "lstsq", site=3)
    assert repair.kind == "mean"
    assert "no solution at site 3" in caplog.text


def test_a_site_that_loses_all_heads_keeps_its_mean() -> None:
    tokens, weight, _ = problem(4)
    everything = torch.ones(9, dtype=torch.bool)
    repair = solve(weight, torch.zeros(5, dtype=torch.float64), moments_of(tokens), everything, "lstsq")
    assert repair.kind == "mean"
    torch.testing.assert_close(repair.bias, weight @ tokens.mean(0))
    assert solve(weight, None, moments_of(tokens), everything, "lstsq").kind == "none"


# --- moments ---


def test_moments_are_those_of_all_tokens() -> None:
    """Outputs around a million with a spread of 1 would lose most digits, if they were not centred first."""
    tokens = (problem(5)[0] + 1e6).float()
    moments = moments_of(tokens)
    truth = tokens.double()
    torch.testing.assert_close(moments.mean, truth.mean(0))
    centred = truth - truth.mean(0)
    torch.testing.assert_close(moments.covariance(), centred.t() @ centred / len(truth), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moments.second(), truth.t() @ truth / len(truth), rtol=1e-12, atol=1e-9)


def test_padding_has_no_part_in_moments() -> None:
    model = ZOO["bert"].build()
    batch = labelled(ZOO["bert"], 0)
    sites = headprune.resolve(model)
    padded = gather(model, sites, [batch])
    alone = gather(
        model,
        sites,
        [
            {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ],
    )
    for site in sites:
        assert padded[site.index].tokens == alone[site.index].tokens == int(batch["attention_mask"].sum())
        torch.testing.assert_close(
            padded[site.index].covariance(), alone[site.index].covariance(), rtol=1e-4, atol=1e-7
        )


def test_whole_samples_take_turns_between_the_folds() -> None:
    """Three samples per batch: 0 and 2 of the first, 1 of the second, 0 and 2 of the third are in the first fold."""
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], seed) for seed in range(3)]
    lengths = [int(row.sum()) for batch in batches for row in batch["attention_mask"]]
    moments = gather(model, headprune.resolve(model)[:1], batches)[0]
    assert moments.counts.tolist() == [sum(lengths[::2]), sum(lengths[1::2])]
    assert lengths[::2] != lengths[1::2]


def test_the_forward_pass_ends_where_nothing_more_is_asked_for() -> None:
    model = ZOO["bert"].build()
    sites = headprune.resolve(model)
    with counted_calls(dict(model.named_modules())) as counts:
        gather(model, [sites[1]], [labelled(ZOO["bert"], 0)])
    assert counts["bert.encoder.layer.1.attention.self"] == 1
    assert counts["bert.encoder.layer.1.intermediate"] == 0
    assert counts["bert.encoder.layer.2"] == 0
    assert counts["classifier"] == 0


def test_a_tied_site_pools_all_its_applications() -> None:
    entry = ZOO["albert"]
    model, batch = entry.build(), labelled(entry, 0)
    [site] = headprune.resolve(model)
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(site.o).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    outputs(model, batch)
    handle.remove()
    assert len(seen) == site.applications > 1
    tokens = torch.cat([part[batch["attention_mask"].bool()] for part in seen]).double()
    moments = gather(model, [site], [batch])[0]
    assert moments.tokens == len(tokens)
    torch.testing.assert_close(moments.second(), tokens.t() @ tokens / len(tokens), rtol=1e-6, atol=1e-12)


# --- bad input ---


def test_compensation_without_data_or_by_an_unknown_word_is_refused() -> None:
    model = ZOO["bert"].build()
    with pytest.raises(DataError, match=r"repair='lstsq' needs calibration data; give it as batches"):
        headprune.remove(model, [(0, 0)], repair="lstsq")
    with pytest.raises(DataError, match=r"There is no repair 'least'; choose one of lstsq, mean, none"):
        headprune.remove(model, [(0, 0)], repair="least", batches=[labelled(ZOO["bert"], 0)])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"There is no repair 'least'"):
        headprune.prune(model, [labelled(ZOO["bert"], 0)], repair="least")  # type: ignore[arg-type]
    assert [site.heads for site in headprune.resolve(model)] == [4, 4, 4]


def test_means_need_a_bias_to_go_into() -> None:
    entry = ZOO["llama-gqa"]
    with pytest.raises(DataError, match=r"this model has none; use 'lstsq' or 'none'"):
        headprune.prune(entry.build(), [labelled(entry, 0)], repair="mean")


def test_tokens_that_are_all_padding_leave_a_site_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = ZOO["bert"].build()
    batch = labelled(ZOO["bert"], 0)
    empty = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    plain = headprune.remove(ZOO["bert"].build(), [(1, 2)])
    with caplog.at_level(logging.WARNING):
        headprune.remove(model, [(1, 2)], repair="lstsq", batches=[empty])
    assert "no calibration token but padding reaches it" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_outputs_that_are_not_finite_leave_a_site_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = ZOO["bert"].build()
    with torch.no_grad():
        model.get_submodule(headprune.resolve(model)[1].roles["v"].module).bias[0] = math.nan
    with caplog.at_level(logging.WARNING):
        headprune.remove(model, [(1, 2)], repair="lstsq", batches=[labelled(ZOO["bert"], 0)])
    assert "not finite" in caplog.text
    output: Any = model.get_submodule(headprune.resolve(model)[1].o)
    assert torch.isfinite(output.weight).all()


def test_a_weight_that_others_use_as_well_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Both sites lose the same heads, so the weight that they share stays one; a repair of either would be wrong for
    the other."""
    model = ZOO["bert"].build()
    sites = headprune.resolve(model)
    one: Any = model.get_submodule(sites[0].o)
    other: Any = model.get_submodule(sites[1].o)
    other.weight = one.weight
    with caplog.at_level(logging.WARNING):
        headprune.remove(model, [(0, 1), (1, 1)], repair="lstsq", batches=[labelled(ZOO["bert"], 0)])
    assert "belongs to other modules" in caplog.text
    assert one.weight is other.weight
