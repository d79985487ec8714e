"""Gates and `inspect` take turns with calls of other threads on the model, and gates are made for gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_score_safety import Meeting, bert_batches, same

import headprune
from score_helpers import labelled
from zoo import ZOO


def zero_gates(model: Any) -> torch.Tensor:
    return torch.zeros(3, 4)


def gate(model: Any) -> None:
    with headprune.gated(model, zero_gates(model)), torch.no_grad():
        model(**ZOO["bert"].batch(0))


def install(model: Any) -> None:
    gates = headprune.Gates(model, zero_gates(model))
    gates.attach()
    with torch.no_grad():
        model(**ZOO["bert"].batch(0))
    gates.detach()


def learn(model: Any) -> None:
    gates = headprune.LearnedGates(model, keep=0.5)
    with torch.no_grad():
        gates.bias.fill_(-9.0)
        model(**ZOO["bert"].batch(0))
    gates.detach()


def look(model: Any) -> None:
    headprune.inspect(model)
    with torch.no_grad():
        model(**ZOO["bert"].batch(0))


@pytest.mark.parametrize("other", [gate, install, learn, look])
def test_gates_of_a_second_thread_wait_for_a_score(other: Callable[[Any], None]) -> None:
    """The score was that of a model without its heads."""
    model, batches = ZOO["bert"].build(), bert_batches()
    expected = headprune.score(model, batches, criterion="gnorm").scores
    meeting = Meeting(lambda: other(model), seconds=1.0)
    handle = model.register_forward_hook(meeting)
    actual = headprune.score(model, batches, criterion="gnorm").scores
    meeting.thread.join()
    handle.remove()
    assert not meeting.together
    assert meeting.met.is_set()  # afterwards
    assert same(actual, expected)


def test_a_score_waits_for_the_gates_of_another_thread() -> None:
    model, batches = ZOO["bert"].build(), bert_batches()
    expected, actual = headprune.score(model, batches, criterion="gnorm").scores, []
    with headprune.gated(model, zero_gates(model)):
        thread = threading.Thread(target=lambda: actual.append(headprune.score(model, batches, criterion="gnorm")))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join()
    assert same(actual[0].scores, expected)


@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_gates_made_under_inference_mode_learn(kind: str) -> None:
    """They were tensors of inference_mode, which never have gradients."""
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    with torch.inference_mode():
        gates: Any = (
            headprune.Gates(model, trainable=True).attach()
            if kind == "fixed"
            else headprune.LearnedGates(model, l0=0.1, warmup=0.0)
        )
    model.train()
    model(**batch).loss.backward()
    (parameter,) = gates.parameters()
    assert parameter.grad is not None
    assert float(parameter.grad.abs().sum()) > 0


def test_gated_leaves_inference_mode_as_it_is() -> None:
    model = ZOO["bert"].build()
    with torch.inference_mode(), headprune.gated(model, torch.ones(3, 4)):
        assert torch.is_inference_mode_enabled()
        assert model(**ZOO["bert"].batch(0)).logits.is_inference()
