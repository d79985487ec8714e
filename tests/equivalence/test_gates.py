"""Gates on every family: in order of execution, neutral at one, a row per sample, and gone when the block ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from helpers import (
    EAGER_ONLY,
    SAME_CODE,
    difference,
    families,
    flat,
    gated_outputs,
    gates_without,
    hook_count,
    identical,
    outputs,
    pruned,
    real_tokens,
    with_attention,
)
from zoo import ZOO, Entry

EMBEDDINGS = ("image_embeds", "text_embeds", "last_hidden_state")


def per_sample(actual: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without CLIP's similarity matrices, which mix the samples of a batch."""
    return {name: value for name, value in actual.items() if not name.startswith("logits_per_")}


def row(batch: dict[str, torch.Tensor], sample: int) -> dict[str, torch.Tensor]:
    return {name: value[sample : sample + 1] for name, value in batch.items()}


def random_gates(entry: Entry, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, entry.sites, entry.heads, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("entry", families())
def test_sites_come_in_order_of_execution(entry: Entry) -> None:
    model = entry.build()
    sites = headprune.resolve(model)
    seen: list[int] = []
    for site in sites:

        def note(module: Any, args: Any, kwargs: Any, index: int = site.index) -> None:
            seen.append(index)

        model.get_submodule(site.path).register_forward_pre_hook(note, with_kwargs=True)
    outputs(model, entry.batch(0))
    assert list(dict.fromkeys(seen)) == list(range(entry.sites))
    assert [seen.count(site.index) for site in sites] == [site.applications for site in sites]


@pytest.mark.parametrize(
    ("entry", "attention"),
    [
        pytest.param(*case.values, attention, id=f"{case.id}-{attention}", marks=case.marks)
        for attention in ("eager", "sdpa")
        for case in families(without=EAGER_ONLY if attention == "sdpa" else ())
    ],
)
def test_gates_of_one_change_no_bit(entry: Entry, attention: str) -> None:
    model, batch = with_attention(entry.build(), attention), entry.batch(2)
    plain = outputs(model, batch)
    ones = torch.ones(entry.sites, entry.heads)
    assert identical(plain, gated_outputs(model, batch, ones))
    assert identical(plain, gated_outputs(model, batch, ones.expand(3, -1, -1)))
    ones[0, 0] = 0.0
    assert not identical(plain, gated_outputs(model, batch, ones))


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_a_row_of_gates_per_sample_is_each_sample_on_its_own(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(4)
    gates = random_gates(entry, 3)
    together = per_sample(gated_outputs(model, batch, gates))
    for sample in range(3):
        own = row(batch, sample)
        part = real_tokens(row(together, sample), own)
        alone = per_sample(gated_outputs(model, own, gates[sample]))
        assert difference(part, real_tokens(alone, own)) <= 2e-5
        others = per_sample(gated_outputs(model, own, gates[(sample + 1) % 3]))
        assert difference(part, real_tokens(others, own)) > 1e-3


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_gradients_of_gates_are_those_of_each_sample(entry: Entry) -> None:
    """Scores are made of these; a sample's gradient must not see the other samples."""
    model, batch = entry.build().requires_grad_(False), entry.batch(6)

    def gradients(inputs: dict[str, torch.Tensor], gates: torch.Tensor) -> torch.Tensor:
        gates = gates.clone().requires_grad_(True)
        with headprune.gated(model, gates):
            actual = dict(model(**inputs).items())
        compared = {name: actual[name] for name in ("logits", *EMBEDDINGS) if name in actual}
        parts = real_tokens(compared, inputs).values()
        loss = sum((part * torch.linspace(-1.0, 1.0, part.shape[-1])).sum() for part in parts)
        return torch.autograd.grad(loss, gates)[0]

    ones = torch.ones(3, entry.sites, entry.heads)
    together = gradients(batch, ones)
    assert together.shape == (3, entry.sites, entry.heads)
    assert torch.isfinite(together).all()
    assert (together.abs().sum(dim=(1, 2)) > 1e-4).all()
    for sample in range(3):
        alone = gradients(row(batch, sample), ones[0])
        scale = alone.abs().max().item()
        assert (together[sample] - alone).abs().max().item() <= 1e-4 * max(1.0, scale)


@pytest.mark.parametrize("entry", families())
def test_gates_of_a_pruned_model_keep_original_ids(entry: Entry) -> None:
    """What stands at the places of removed heads is not looked at, not even NaN."""
    model, gone = pruned(entry)
    dense, batch = entry.build(), entry.batch(8)
    gates = random_gates(entry)
    expected = gated_outputs(dense, batch, gates * gates_without(headprune.resolve(dense), gone))
    for head in gone:
        gates[head] = torch.nan
    assert difference(expected, gated_outputs(model, batch, gates)) <= 1e-5


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_hooks_come_off_also_after_an_exception(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(9)
    plain, before = outputs(model, batch), hook_count(model)
    zeros = torch.zeros(entry.sites, entry.heads)
    with headprune.gated(model, zeros):
        assert hook_count(model) == before + entry.sites
    assert hook_count(model) == before
    with pytest.raises(KeyboardInterrupt), headprune.gated(model, zeros):
        raise KeyboardInterrupt
    assert hook_count(model) == before
    with (
        pytest.raises(headprune.HeadpruneError, match="gates for 2 samples"),
        headprune.gated(model, zeros.expand(2, -1, -1)),
    ):
        outputs(model, batch)  # three samples: the hook itself raises, in the middle of a forward pass
    assert hook_count(model) == before
    assert identical(plain, outputs(model, batch))


def test_a_site_without_heads_needs_no_gate() -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, flat(headprune.resolve(model)[1].units()))
    batch = ZOO["bert"].batch(0)
    gates = torch.ones(3, 4)
    gates[1] = torch.nan
    assert identical(outputs(model, batch), gated_outputs(model, batch, gates))


def test_nested_gates_multiply() -> None:
    model, batch = ZOO["gpt2"].build(), ZOO["gpt2"].batch(0)
    one, other = random_gates(ZOO["gpt2"]), random_gates(ZOO["gpt2"]).flip(0)
    with headprune.gated(model, one), headprune.gated(model, other):
        both = outputs(model, batch)
    assert difference(both, gated_outputs(model, batch, one * other)) <= 1e-5
