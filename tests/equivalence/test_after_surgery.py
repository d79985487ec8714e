"""A pruned model is still a model: it trains, changes precision, is copied, compiled, exported and adapted."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import headprune
from helpers import (
    EAGER_ONLY,
    SAME_CODE,
    TOLERANCE,
    VARIANTS,
    difference,
    families,
    flat,
    gated_outputs,
    gates_without,
    identical,
    kept_heads,
    outputs,
    pruned,
    real_tokens,
    telling_variant,
    with_attention,
)
from zoo import Entry

both_variants = pytest.mark.parametrize("variant", VARIANTS)


def dense_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that every output has a part in, where models without a head have no loss of their own."""
    actual = [v for v in model(**batch).values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return sum((value * torch.linspace(-1.0, 1.0, value.shape[-1])).sum() for value in actual)


@both_variants
@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_further_training(entry: Entry, variant: str) -> None:
    model, _ = pruned(entry, variant)
    model.train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for seed in range(2):
        optimizer.zero_grad()
        dense_loss(model, entry.batch(seed)).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.isfinite(parameter).all() for parameter in after.values())
    for site in headprune.resolve(model):
        for path in (*site.maps, site.o) if site.kept else ():
            assert not torch.equal(before[f"{path}.weight"], after[f"{path}.weight"]), path


@both_variants
@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_half_precision_and_double(entry: Entry, variant: str) -> None:
    """After a change of precision the pruned model still is the gated dense model in that precision."""
    model, gone = pruned(entry, variant)
    dense = entry.build()
    gates = gates_without(headprune.resolve(dense), gone)
    for dtype, tolerance in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float64, 1e-9)):
        batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in entry.batch(2).items()}
        if dtype is torch.float64:  # transformers' own eager attention gives NaN for padding on the left in double
            batch.pop("attention_mask", None)
        model, dense = model.to(dtype), dense.to(dtype)
        got, expected = outputs(model, batch), gated_outputs(dense, batch, gates)
        assert {value.dtype for value in got.values()} == {value.dtype for value in expected.values()}
        scale = max(value.abs().max().item() for value in expected.values())
        assert difference(real_tokens(got, batch), real_tokens(expected, batch)) <= tolerance * max(1.0, scale)


@both_variants
@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_copies_are_equal_and_independent(entry: Entry, variant: str) -> None:
    model, gone = pruned(entry, variant)
    batch = entry.batch(2)
    expected, kept = outputs(model, batch), kept_heads(model)
    further = next(flat(site.units()[:1]) for site in reversed(headprune.resolve(entry.build())) if site.kept)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert identical(expected, outputs(other, batch))
        assert kept_heads(other) == kept
        left = [head for head in further if head not in gone]
        headprune.remove(other, left)
        assert identical(expected, outputs(model, batch))
        assert kept_heads(model) == kept


@both_variants
@pytest.mark.parametrize("entry", families(without=(*SAME_CODE, *EAGER_ONLY)))
def test_eager_and_sdpa_agree_on_real_tokens(entry: Entry, variant: str) -> None:
    model, _ = pruned(entry, variant)
    batch = entry.batch(2)
    fused = real_tokens(outputs(with_attention(model, "sdpa"), batch), batch)
    plain = real_tokens(outputs(with_attention(model, "eager"), batch), batch)
    assert difference(fused, plain) <= 2e-5


ATTENTIONS = {
    "attentions": ("encoder self", "decoder self", "vision self", "text self"),
    "encoder_attentions": ("encoder self",),
    "decoder_attentions": ("decoder self",),
    "cross_attentions": ("decoder cross",),
}


@both_variants
@pytest.mark.parametrize(
    "entry", families(without=(*SAME_CODE, "clip"))
)  # CLIP returns the attentions of its towers nested
def test_attention_probabilities_are_those_of_the_heads_that_are_left(entry: Entry, variant: str) -> None:
    """Sites without heads have none: transformers leaves them out of the tuple, or puts None in their place."""
    model, gone = pruned(entry, variant)
    model, dense = with_attention(model, "eager"), with_attention(entry.build(), "eager")
    batch, sites = entry.batch(2), headprune.resolve(model)
    with torch.no_grad(), headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        expected = dense(**batch, output_attentions=True)
    with torch.no_grad():
        got = model(**batch, output_attentions=True)
    compared = 0
    for name, kinds in ATTENTIONS.items():
        if not expected.get(name):
            continue
        uses = [site for site in sites if site.place in kinds for _ in range(site.applications)]
        wanted = [whole[:, site.kept] for whole, site in zip(expected[name], uses, strict=True) if site.kept]
        present = [part for part in got[name] if part is not None]
        assert [part.shape for part in present] == [part.shape for part in wanted]
        assert all((one - other).abs().max() <= TOLERANCE for one, other in zip(wanted, present, strict=True))
        compared += len(wanted)
    assert compared == sum(site.applications for site in sites if site.kept)


# One family of every behaviour in quirks.py and of every way to store projections: compiling is slow.
COMPILED = ("bert", "albert", "gpt2", "bloom", "mpnet", "modernbert", "t5", "llama-gqa", "phi3", "whisper")


@pytest.mark.parametrize("entry", [entry for entry in families() if entry.values[0].name in COMPILED])
def test_torch_compile(entry: Entry) -> None:
    model, _ = pruned(entry, telling_variant(entry))
    batch = entry.batch(2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert difference(outputs(model, batch), outputs(compiled, batch)) <= TOLERANCE


@pytest.mark.parametrize("entry", [entry for entry in families() if entry.values[0].name in COMPILED])
def test_torch_export(entry: Entry) -> None:
    model, _ = pruned(entry, telling_variant(entry))
    caches = {"use_cache": False} if entry.tags & {"decoder", "seq2seq", "cross"} else {}
    program = torch.export.export(model, (), {**entry.batch(2), **caches}, strict=False)
    batch = entry.batch(3)  # other numbers than those it was traced with
    assert difference(outputs(model, batch, **caches), outputs(program.module(), batch, **caches)) <= TOLERANCE


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_lora_on_the_projections_trains(entry: Entry) -> None:
    peft = pytest.importorskip("peft")
    model, _ = pruned(entry, telling_variant(entry))
    batch, sites = entry.batch(2), headprune.resolve(model)
    expected, kept = outputs(model, batch), kept_heads(model)
    targets = sorted(
        {path for site in sites if site.kept for path in (site.roles["q"].module, site.roles["v"].module, site.o)}
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft notices Conv1D by itself, and says so
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    assert identical(expected, outputs(adapted.eval(), batch))
    trained = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        dense_loss(adapted, batch).backward()
        optimizer.step()
    now = dict(adapted.named_parameters())
    assert len(trained) == 2 * len(targets)
    for name, before in trained.items():
        assert torch.isfinite(now[name]).all()
        assert not torch.equal(before, now[name]), name
    merged = adapted.merge_and_unload()
    assert difference(expected, outputs(merged, batch)) > 1e-6
    assert kept_heads(merged) == kept
    assert all(type(merged.get_submodule(path)) in (nn.Linear, Conv1D) for path in targets)
