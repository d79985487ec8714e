"""A forward that is wrapped: nothing is read in its code, so a family is measured and cut as if it were not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.camembert.modeling_camembert import CamembertSelfAttention
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionSelfAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention

import headprune
from headprune.errors import UnsupportedModelError
from helpers import MATTERS, TOLERANCE, difference, gated_outputs, gates_without, outputs, some_heads
from zoo import VISION, ZOO, image_batch, spread

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


DECORATORS: dict[str, Decorator] = {"told": told, "untold": untold, "partialmethod": functools.partialmethod}


pytestmark = pytest.mark.usefixtures("nothing_proven")


def vision(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Data2VecVisionModel(transformers.Data2VecVisionConfig(**VISION, **settings)).eval()
    spread(model)
    return model


def shared_bias() -> Any:
    """All its sites are given one table with an axis of heads, as an argument."""
    return vision(use_shared_relative_position_bias=True)


SUBJECTS: dict[str, tuple[Any, Callable[[], Any], Callable[[int], Any]]] = {
    "table": (Phi3Attention, ZOO["phi3"].build, ZOO["phi3"].batch),  # it reads its head count from its config
    "measured": (CamembertSelfAttention, ZOO["camembert"].build, ZOO["camembert"].batch),
    "measured, given a head axis": (Data2VecVisionSelfAttention, shared_bias, image_batch),
}


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_decorated_forward_is_cut_exactly(subject: str, decorator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, build, batches = SUBJECTS[subject]
    monkeypatch.setattr(kind, "forward", DECORATORS[decorator](kind.forward))
    dense, model, batch = build(), build(), batches(1)
    sites = headprune.resolve(dense)
    heads = some_heads(sites)
    expected = gated_outputs(dense, batch, gates_without(sites, heads))
    assert difference(expected, outputs(dense, batch)) > MATTERS
    headprune.remove(model, heads)
    assert difference(expected, outputs(model, batch)) <= TOLERANCE


def test_an_argument_with_a_head_axis_is_found() -> None:
    sites = headprune.resolve(shared_bias())
    assert all(site.needs.inputs for site in sites)
    assert all(not site.needs.inputs for site in headprune.resolve(vision()))


def test_a_forward_that_changes_what_heads_are_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights, same names, but every head is given a part of the next one's output."""
    inner = CamembertSelfAttention.forward

    def mixing(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, *rest = inner(self, *args, **kwargs)
        return (output + output.roll(1, -1), *rest)

    monkeypatch.setattr(CamembertSelfAttention, "forward", mixing)
    with pytest.raises(UnsupportedModelError, match="couples all its heads"):
        headprune.resolve(ZOO["camembert"].build())


def test_a_forward_that_fails_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not on this machine")

    monkeypatch.setattr(CamembertSelfAttention, "forward", broken)
    with pytest.raises(UnsupportedModelError, match=r"'camembert' is not in the table.*register_family\("):
        headprune.resolve(ZOO["camembert"].build())
