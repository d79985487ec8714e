"""What is fitted to all the data from the very pass that it serves is what two passes over the data give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from headprune.signals import late
from oracles import relative_differences
from scoring import labelled, model_of
from zoo import ZOO

FAMILIES = ["bert", "albert", "llama-gqa", "vit"]


def batches_of(name: str) -> list[dict[str, torch.Tensor]]:
    return [labelled(ZOO[name], seed) for seed in (0, 5, 7)]


def scored(name: str, limit: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, int]:
    """The result, and how often the first map of the first site ran: once per pass over a batch, as a pass that only
    gathers never reaches the logits."""
    monkeypatch.setattr(late, "LIMIT", limit)
    model, calls = model_of(name, "some-heads"), []
    site = next(site for site in headprune.resolve(model) if site.kept)
    handle = model.get_submodule(site.o).register_forward_hook(lambda *_: calls.append(1))
    try:
        return headprune.score(model, batches_of(name), **options), len(calls) // site.applications
    finally:
        handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("criteria", [["residual-gradient"], ["residual-gradient", "gnorm", "entropy"]])
def test_one_pass_gives_what_two_give(name: str, criteria: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one, forwards = scored(name, late.LIMIT, monkeypatch, criteria=criteria)
    two, more = scored(name, 0, monkeypatch, criteria=criteria)
    assert more > forwards
    for criterion in criteria:
        assert torch.equal(one.scores[criterion].nan_to_num(-1), two.scores[criterion].nan_to_num(-1))
    assert (one.samples, one.tokens, one.loss) == (two.samples, two.tokens, two.loss)
    assert one.moments is not None
    assert one.moments.keys() == two.moments.keys()
    for index, moments in one.moments.items():
        assert torch.equal(moments.products, two.moments[index].products)
        assert torch.equal(moments.counts, two.moments[index].counts)
        assert moments.samples == two.moments[index].samples == one.samples


def test_samples_that_are_looked_at_one_by_one_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gnorm cannot tell the gradients of a shared position apart by sample. What a sample gives alone and in a batch
    differs by the rounding of float32, and a residual is the small rest of a difference."""
    one, _ = scored("deberta-v3", late.LIMIT, monkeypatch, criteria=["residual-gradient", "gnorm"])
    two, _ = scored("deberta-v3", 0, monkeypatch, criteria=["residual-gradient", "gnorm"])
    for index, moments in one.moments.items():
        assert torch.equal(moments.counts, two.moments[index].counts)
    gap = relative_differences(one.scores["residual-gradient"], two.scores["residual-gradient"])
    assert float(gap.max()) <= 1e-4


def test_neurons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = scored("bert", late.LIMIT, monkeypatch, units="heads,neurons")
    two, _ = scored("bert", 0, monkeypatch, units="heads,neurons")
    assert torch.equal(one.scores.nan_to_num(-1), two.scores.nan_to_num(-1))


def test_one_forward_per_batch_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, the first batch has told so: it has run three times, the others twice."""
    assert scored("bert", late.LIMIT, monkeypatch)[1] == 3
    assert scored("bert", 0, monkeypatch)[1] == 3 + 3 + 1
    assert scored("bert", late.LIMIT, monkeypatch, criterion="residual-error")[1] == 6, "which cannot wait"


def test_the_estimate_follows_from_what_the_first_batch_took() -> None:
    small, large = {"input_ids": torch.zeros(2, 3)}, {"input_ids": torch.zeros(2, 30), "note": "no tensor"}
    kept = late.Late()
    kept.keep(torch.zeros(late.LIMIT // 4 // 4, dtype=torch.float32))  # a quarter of it
    assert kept.fits(small, [small])
    assert kept.fits(small, [small] * 4)
    assert not kept.fits(small, [small] * 5)
    assert not kept.fits(small, [small, large])
