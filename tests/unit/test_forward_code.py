"""What headprune reads in the code of a forward, also where that code is wrapped or cannot be seen."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.camembert.modeling_camembert import CamembertSelfAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention

import headprune
from headprune.errors import UnsupportedModelError
from headprune.units.code import forward_code
from helpers import TOLERANCE, difference, gated_outputs, gates_without, outputs, some_heads
from zoo import GQA, VISION, ZOO

Decorator = Callable[[Any], Any]


def told(function: Any) -> Any:
    """A decorator as most are written."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def untold(function: Any) -> Any:
    """A decorator that does not say what it wraps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Opaque:
    """A callable without any code of Python's."""

    def __init__(self, function: Any) -> None:
        self.call = operator.methodcaller("forward")

    def __get__(self, module: Any, kind: Any) -> Any:
        return self.call


HIDING: dict[str, Decorator] = {"untold": untold, "partialmethod": functools.partialmethod, "no code": Opaque}


class Plain(nn.Module):
    def forward(self, one: torch.Tensor, *, other: Any = None) -> torch.Tensor:
        return sum((self.inside(part) for part in one.chunk(2)), start=self.scale)

    def inside(self, part: torch.Tensor) -> torch.Tensor:
        return self.further * part.embed_dim

    @property
    def further(self) -> int:
        return self.weight  # type: ignore[return-value]


def test_names_and_what_they_reach() -> None:
    code = forward_code(Plain())
    assert code is not None
    assert code.arguments == {"self", "one", "other"}
    assert {"chunk", "scale", "inside", "sum"} <= code.names  # `inside` stands in a generator
    assert "embed_dim" not in code.names
    assert {"embed_dim", "further", "weight"} <= code.reach


def test_a_wrapped_instance_is_seen_through() -> None:
    """As accelerate wraps it: a partial that says what it stands for."""
    module = Plain()
    expected = forward_code(module)
    module.forward = functools.update_wrapper(functools.partial(lambda *_: None, module), module.forward)  # type: ignore[method-assign]
    assert forward_code(module) == expected
    module.forward = functools.partial(Plain.forward, module)  # type: ignore[method-assign]
    assert forward_code(module) is None


def vision() -> Any:
    torch.manual_seed(0)
    return transformers.Data2VecVisionModel(transformers.Data2VecVisionConfig(**VISION)).eval()


@pytest.mark.parametrize("decorator", [told, *HIDING.values()], ids=["told", *HIDING])
def test_a_decorator_does_not_hide_an_argument_with_a_head_axis(
    decorator: Decorator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vision()
    assert "relative_position_bias, which has a head axis" in headprune.resolve(model)[0].obstacle
    kind = type(model.encoder.layer[0].attention.attention)
    monkeypatch.setattr(kind, "forward", decorator(kind.forward))
    site = headprune.resolve(model)[0]
    wanted = "relative_position_bias, which has a head axis" if decorator is told else "cannot be seen"
    assert wanted in site.obstacle
    with pytest.raises(UnsupportedModelError, match="cannot be removed exactly"):
        headprune.remove(model, site.units()[0])


@pytest.mark.parametrize("name", HIDING)
def test_hidden_code_of_a_family_that_nobody_described_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["camembert"].build()
    monkeypatch.setattr(CamembertSelfAttention, "forward", HIDING[name](CamembertSelfAttention.forward))
    assert {site.obstacle for site in headprune.resolve(model)} == {
        "the code of its forward cannot be seen (a wrapper hides it?), and headprune does not know this family"
    }


@pytest.mark.parametrize("decorator", [told, untold])
def test_a_decorated_family_of_the_table_is_cut_exactly(decorator: Decorator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 reads its head count from the config at every call, which only its code says."""
    dense, model, batch = ZOO["phi3"].build(), ZOO["phi3"].build(), ZOO["phi3"].batch(1)
    monkeypatch.setattr(Phi3Attention, "forward", decorator(Phi3Attention.forward))
    heads = some_heads(headprune.resolve(dense))
    expected = gated_outputs(dense, batch, gates_without(headprune.resolve(dense), heads))
    headprune.remove(model, heads)
    assert difference(expected, outputs(model, batch)) <= TOLERANCE


def diffllama() -> Any:
    config = transformers.DiffLlamaConfig(**{**GQA, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6})
    torch.manual_seed(0)
    return transformers.DiffLlamaForCausalLM(config).eval()


def test_heads_that_work_in_pairs_are_refused() -> None:
    """DiffLlama subtracts the maps of two heads from one another: without one of them the other means nothing."""
    model = diffllama()
    site = headprune.resolve(model)[0]
    assert site.obstacle == "its groupnorm normalises 12 numbers at once, which is more than one head of 6"
    with pytest.raises(UnsupportedModelError, match="cannot be removed exactly: its groupnorm normalises"):
        headprune.remove(model, site.units()[0])


def test_a_forward_that_splits_tensors_is_refused() -> None:
    """The same model where nothing but its code shows the pairs."""
    model = diffllama()
    for layer in model.model.layers:
        layer.self_attn.groupnorm = nn.Identity()
    assert "splits tensors with chunk, which may pair heads" in headprune.resolve(model)[0].obstacle
