"""Tokens of sites that do not fit into the memory together, in groups: the scores of one group, in more passes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import headprune
from headprune.criteria import make
from headprune.criteria.scoring_pass import ScoringPass
from headprune.signals import TokenRequest, tokens
from headprune.signals.moments import gather
from headprune.signals.tokens import groups_within
from headprune.tasks import task_of
from oracles import relative_differences
from score_helpers import FROM_TOKENS, labelled, model_of, tokens_of
from zoo import ZOO

FAMILIES = ["bert", "albert", "llama-gqa", "vit"]


def batches_of(name: str) -> list[dict[str, torch.Tensor]]:
    return [labelled(ZOO[name], seed) for seed in (0, 5, 7)]


def scored(name: str, limit: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, int]:
    """The result, and how often the first map of the first site ran: once per pass over a batch."""
    monkeypatch.setattr(tokens, "TOKEN_BYTES", limit)
    model, calls = model_of(name, "some-heads"), []
    site = next(site for site in headprune.resolve(model) if site.kept)
    handle = model.get_submodule(site.o).register_forward_hook(lambda *_: calls.append(1))
    try:
        return headprune.score(model, batches_of(name), **options), len(calls) // site.applications
    finally:
        handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("criteria", [["residual-gradient"], ["residual-gradient", "elimination", "gnorm", "entropy"]])
def test_groups_give_what_one_pass_gives(name: str, criteria: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sites = [site for site in headprune.resolve(model_of(name, "some-heads")) if site.kept]
    one, forwards = scored(name, tokens.TOKEN_BYTES, monkeypatch, criteria=criteria)
    many, more = scored(name, 0, monkeypatch, criteria=criteria)
    checks = "entropy" in criteria  # where attention is read, the first batch runs once more without that
    assert forwards == 3 + checks
    assert more == 3 * len(sites) + checks
    for criterion in criteria:
        assert torch.equal(one.scores[criterion].nan_to_num(-1), many.scores[criterion].nan_to_num(-1))
    assert (one.samples, one.tokens, one.loss) == (many.samples, many.tokens, many.loss)


@pytest.mark.parametrize("criterion", [*FROM_TOKENS, "elimination", "elimination(metric=output)", "wanda"])
def test_every_batch_runs_once_where_all_sites_fit(criterion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored("bert", tokens.TOKEN_BYTES, monkeypatch, criterion=criterion)[1] == 3


def test_means_of_columns_always_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored("bert", 0, monkeypatch, criterion="wanda")[1] == 3


def test_samples_that_are_looked_at_one_by_one_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gnorm cannot tell the gradients of a shared position apart by sample. What a sample gives alone and in a batch
    differs by the rounding of float32, and a residual is the small rest of a difference."""
    alone, _ = scored("deberta-v3", tokens.TOKEN_BYTES, monkeypatch, criteria=["residual-gradient", "gnorm"])
    whole, _ = scored("deberta-v3", tokens.TOKEN_BYTES, monkeypatch, criteria=["residual-gradient"])
    gap = relative_differences(alone.scores["residual-gradient"], whole.scores["residual-gradient"])
    assert float(gap.max()) <= 1e-4
    assert alone.samples == whole.samples == 9


def test_neurons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = scored("bert", tokens.TOKEN_BYTES, monkeypatch, units="heads,neurons")
    many, _ = scored("bert", 0, monkeypatch, units="heads,neurons")
    assert torch.equal(one.scores.nan_to_num(-1), many.scores.nan_to_num(-1))


def test_groups_stay_below_the_limit() -> None:
    model, batches = model_of("bert", "dense"), batches_of("bert")
    sites = headprune.resolve(model)
    numbers = sum(batch["input_ids"].numel() for batch in batches)
    request = TokenRequest(at_inputs=True, at_outputs=True)
    width = model.config.hidden_size
    each = numbers * 8 * (2 * width + 2 * width)  # inputs, gradients there, and those at the outputs for two draws
    for limit, sizes in ((each - 1, [1, 1, 1]), (each, [1, 1, 1]), (2 * each, [2, 1]), (3 * each, [3])):
        assert [len(group) for group in groups_within(limit, model, sites, [request], batches)] == sizes


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_of_tokens_are_those_that_are_gathered_alone(name: str) -> None:
    model, batches, task = model_of(name, "some-heads"), batches_of(name), task_of(model_of(name, "some-heads"))
    sites = headprune.resolve(model)
    expected = gather(model, sites, batches, task)
    made = ScoringPass(model, sites, {"r": make("residual-gradient")}, task, "given", keep=True)
    assert made.moments([0]) is None  # it has not run yet
    made.run(batches)
    actual = made.moments(expected)
    assert actual is not None
    assert actual.keys() == expected.keys()
    for index, moments in actual.items():
        assert torch.equal(moments.products, expected[index].products)
        assert torch.equal(moments.counts, expected[index].counts)
        assert moments.samples == expected[index].samples == made.samples
    for memory, keep in ((None, False), (0, True)) if len(expected) > 1 else ():
        other = ScoringPass(model, sites, {"r": make("residual-gradient")}, task, "given", memory=memory, keep=keep)
        other.run(batches)
        assert other.moments(expected) is None


def test_gradients_of_tokens_are_those_at_the_inputs() -> None:
    """Of a factor on everything that a site's output map is given."""
    model, batch = ZOO["bert"].build().double(), labelled(ZOO["bert"], 0)
    task, sites = task_of(model), headprune.resolve(model)
    actual = tokens_of(model, sites, [batch], at_inputs=True)
    from headprune.signals.objectives import sign_gradient

    for site in sites:
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        change = lambda module, args, factor=factor: (args[0] * factor,)  # noqa: E731
        handle = model.get_submodule(site.o).register_forward_pre_hook(change)
        prepared = task.prepare(batch, torch.device("cpu"))
        logits = task.logits(model(**task.inputs(prepared)))
        handle.remove()
        (slope,) = torch.autograd.grad(logits, factor, sign_gradient(task, logits, prepared))
        (own,) = actual[site.index].applications
        assert own.gradient is not None
        assert float((own.inputs * own.gradient).sum()) == pytest.approx(float(slope), rel=1e-9)


def test_nothing_holds_the_graph_of_a_batch_that_is_done() -> None:
    """Not even until the garbage collector comes: graphs of all batches together would be many times the tokens."""
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    outputs: list[Any] = []
    model.bert.encoder.layer[1].register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(first(out))))
    gc.disable()
    try:
        tokens_of(model, headprune.resolve(model), [batch], at_inputs=True, at_outputs=True)
        assert [output() for output in outputs] == [None]
    finally:
        gc.enable()


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
