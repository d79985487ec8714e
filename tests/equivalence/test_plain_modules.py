"""Modules that are no transformers models are measured as they are: removed equals silenced, without registration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headprune
from headprune.errors import UnsupportedModelError
from headprune.hooks.torch_attention import HookableAttention, expose

WIDTH, HEADS, CLASSES = 24, 4, 3


class Strided(nn.Module):
    """A layout that nobody has: column c of the output belongs to head c % 4, q, k and v lie in between each other, and
    every head has a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = HEADS
        self.everything = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.linspace(0.5, 2.0, HEADS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # [batch, tokens, width of a head, 3, heads]
        q, k, v = self.everything(inputs).unflatten(-1, (-1, 3, self.count)).permute(3, 0, 4, 1, 2)
        scores = q @ k.transpose(-1, -2) * self.temperature[:, None, None]
        return self.back((scores.softmax(-1) @ v).permute(0, 2, 3, 1).flatten(-2))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mixers = nn.ModuleList(Strided() for _ in range(2))
        self.answer = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embed(tokens)
        for mixer in self.mixers:
            states = states + mixer(states)
        return self.answer(states.mean(1))


class FusedBlock(nn.Module):
    """As timm writes it: one qkv map, head after head inside each of the three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        return x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, **options), 2, enable_nested_tensor=False)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))


def vectors() -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "a layout of its own": (Classifier, tokens),
    "a fused qkv": (lambda: nn.Sequential(FusedBlock(), FusedBlock()), vectors),
    "torch's encoder, batch first": (lambda: encoder(batch_first=True), vectors),
    "torch's encoder": (lambda: encoder(norm_first=True), vectors),
}


@pytest.mark.parametrize("name", MODELS)
def test_removed_equals_silenced(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    sites = headprune.resolve(model)
    assert [(site.heads, site.head_dim, site.group) for site in sites] == [(HEADS, WIDTH // HEADS, 1)] * 2
    silent = copy.deepcopy(model)
    gone: list[tuple[int, int]] = []
    for heads in ([(0, 1), (1, 0), (1, 3)], [(0, 0), (0, 2), (0, 3)]):
        gone += heads
        headprune.remove(model, heads)
        for site in sites:
            columns = site.columns([site.position(head) for index, head in gone if index == site.index])
            with torch.no_grad():
                silent.get_submodule(site.o).weight[:, columns] = 0
        with torch.no_grad():
            expected, given = silent(inputs()), model(inputs())
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert [site.kept for site in headprune.resolve(model)] == [(), (1, 2)]
    # The weights of the site that is gone have left, and half of those of the other, apart from the output map's bias.
    left = sum(parameter.numel() for parameter in model.parameters())
    assert left < sum(parameter.numel() for parameter in silent.parameters()) - 4 * WIDTH * WIDTH


def test_what_else_has_a_head_axis_is_found() -> None:
    model = Classifier().eval()
    (site, _) = headprune.resolve(model)
    assert [axis.tensor for axis in site.axes if axis.module == site.path] == ["mixers.0.temperature"]
    assert site.columns([1]) == list(range(1, WIDTH, HEADS))
    temperatures = model.mixers[0].temperature.detach().clone()
    headprune.remove(model, [(0, 0), (0, 2)])
    assert torch.equal(model.mixers[0].temperature, temperatures[[1, 3]])


def test_gates_know_where_columns_lie() -> None:
    model = Classifier().double().eval()
    gates = torch.ones(2, HEADS, dtype=torch.float64)
    gates[0, 1] = 0
    with torch.no_grad(), headprune.gated(model, gates):
        expected = model(tokens())
    with torch.no_grad():
        assert not torch.allclose(expected, model(tokens()))
        headprune.remove(model, [(0, 1)])
        torch.testing.assert_close(model(tokens()), expected, rtol=0, atol=1e-12)


def test_what_cannot_be_run_is_refused_in_a_sentence() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = FusedBlock()

        def forward(self, graph: Any) -> Any:
            return self.block(graph.nodes)

    sites = headprune.resolve(Odd().eval())  # a part of it can be run by itself
    assert [site.path for site in sites] == ["block"]
    with pytest.raises(UnsupportedModelError, match="the model Linear itself, which has no attention"):
        headprune.resolve(nn.Linear(4, 4))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "without weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])},
    "causal": {"attn_mask": torch.ones(4, 5).triu(2).bool(), "need_weights": False},
    "added": {"attn_mask": torch.linspace(-1, 1, 20).view(4, 5)},
    "of each head": {"attn_mask": torch.linspace(-1, 1, 240).view(12, 4, 5)},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys of another width": {"kdim": 10, "vdim": 14},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", MASKS)
def test_torchs_attention_computes_what_it_did(kind: str, masks: str) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **KINDS[kind]).double().eval()
    called = copy.deepcopy(plain)
    expose(called)
    assert type(called) is HookableAttention
    assert list(called.state_dict()) == list(plain.state_dict())
    key = torch.randn(3, 5, KINDS[kind].get("kdim", WIDTH), dtype=torch.float64)
    value = torch.randn(3, 5, KINDS[kind].get("vdim", WIDTH), dtype=torch.float64)
    query = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    options = {
        name: mask.double() if masks in ("added", "of each head") else mask for name, mask in MASKS[masks].items()
    }
    expected, weights = plain(query, key, value, **options)
    given, shown = called(query, key, value, **options)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    assert (weights is None) == (shown is None)
    if weights is not None:
        torch.testing.assert_close(shown, weights, rtol=0, atol=1e-12)
