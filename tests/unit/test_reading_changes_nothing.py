"""Reading a model changes nothing of it: it is looked at, scored and gated, and is what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headprune
from headprune import cache
from headprune.units import all_sites
from score_helpers import labelled
from zoo import ZOO


class TorchEncoder(nn.Module):
    """No transformers model, with attention that does not call its output projection."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def state(model: nn.Module) -> list[tuple[Any, ...]]:
    """Of every module its class and all that it holds; tensors by identity, so that an equal one in place counts."""
    return [
        (
            path,
            type(module),
            {name: _plain(value) for name, value in module.__dict__.items()},
        )
        for path, module in model.named_modules()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None), type)) else id(value)


def read(model: Any) -> None:
    headprune.survey(model)
    all_sites(model)


def inspect(model: Any) -> None:
    headprune.inspect(model)


def score(model: Any) -> None:
    headprune.score(model, [labelled(ZOO["bert"], 0)], criteria=["residual-gradient", "gnorm", "entropy"])


def gate(model: Any) -> None:
    sites = headprune.resolve(model)
    with headprune.gated(model, torch.zeros(len(sites), max(site.original for site in sites))):
        pass


@pytest.mark.parametrize(
    ("family", "work"),
    [
        *((family, work) for family in ("bert", "camembert") for work in (read, inspect, score, gate)),
        *(("siglip-vision", work) for work in (read, inspect, gate)),  # which has torch's attention in its head
    ],
)
def test_a_transformers_model_is_what_it_was(family: str, work: Callable[[Any], None]) -> None:
    model = ZOO[family].build().train()
    before, config = state(model), model.config.to_dict()
    work(model)
    assert state(model) == before
    assert model.config.to_dict() == config


@pytest.mark.parametrize("work", [read, gate])
def test_torchs_own_attention_is_what_it_was(work: Callable[[Any], None]) -> None:
    model = TorchEncoder()
    before = state(model)
    work(model)
    assert state(model) == before
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention


def test_gates_reach_torchs_own_attention() -> None:
    model = TorchEncoder().eval()
    x = torch.randn(2, 5, 16)
    sites = headprune.resolve(model)
    with torch.no_grad():
        dense = model(x)
        with headprune.gated(model, torch.zeros(len(sites), 4)):
            closed = model(x)
        assert (closed - dense).abs().max() > 1e-3
        assert torch.equal(model(x), dense)


def test_gates_that_stay_give_the_class_back_when_they_go() -> None:
    model = TorchEncoder().eval()
    before = state(model)
    gates = headprune.Gates(model)
    gates.attach()
    gates.detach()
    assert state(model) == before


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("look", [headprune.survey, headprune.resolve, headprune.inspect, all_sites])
def test_a_class_is_discovered_without_gradients_too(
    mode: Any, look: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was found there, and that was written to the cache for all later processes."""
    expected = [(site.path, site.kept) for site in all_sites(ZOO["granite"].build())]
    assert expected
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    with mode():
        look(ZOO["granite"].build())
    assert [*tmp_path.rglob("*.json.gz")]
    for _ in range(2):
        assert [(site.path, site.kept) for site in all_sites(ZOO["granite"].build())] == expected
        cache._memory.clear()  # as in a new process
