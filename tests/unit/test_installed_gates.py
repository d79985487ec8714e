"""Gates that stay on a model: as a module whose values may train."""

from __future__ import annotations

import pytest
import torch

import headprune
from headprune.errors import GateError
from helpers import difference, gated_outputs, gates_without, hook_count, identical, outputs
from score_helpers import labelled
from zoo import ZOO

FAMILIES = ("bert", "albert", "llama-gqa", "t5", "gpt2", "vit")


@pytest.mark.parametrize("name", FAMILIES)
def test_open_gates_change_nothing_and_closed_ones_remove(name: str) -> None:
    model, batch = ZOO[name].build(), ZOO[name].batch(0)
    sites, dense = headprune.resolve(model), outputs(model, batch)
    gone = [tuple(head) for head in sites[0].units()[0]]
    gates = headprune.Gates(model).attach()
    assert identical(outputs(model, batch), dense)
    gates.values.copy_(gates_without(sites, gone))
    assert identical(outputs(model, batch), gated_outputs(model_without_gates(model, gates), batch, gates.values))
    closed = _closed(model, gates, batch)
    headprune.remove(model, gone)
    assert difference(outputs(model, batch), closed) < 1e-5


def model_without_gates(model, gates):
    gates.detach()
    return model


def _closed(model, gates, batch):
    gates.attach()
    try:
        return outputs(model, batch)
    finally:
        gates.detach()


def test_values_are_parameters_that_get_gradients() -> None:
    model, batch = ZOO["bert"].build().double(), labelled(ZOO["bert"], 0)
    gates = headprune.Gates(model, trainable=True).attach()
    assert [name for name, _ in gates.named_parameters()] == ["values"]
    assert gates.values.dtype == torch.float64
    model(**batch).loss.backward()
    step = 1e-6
    actual = gates.values.grad.clone()
    with torch.no_grad():
        for cell in ((0, 0), (1, 3), (2, 2)):
            sides = []
            for sign in (1, -1):
                gates.values[cell] += sign * step
                sides.append(float(model(**batch).loss))
                gates.values[cell] -= sign * step
            assert actual[cell] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-4, abs=1e-9)
    gates.detach()
    assert hook_count(model) == 0


def test_gates_train_beside_a_model_that_stays_its_own() -> None:
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    names = [name for name, _ in model.named_parameters()]
    gates = headprune.Gates(model, trainable=True).attach()
    assert [name for name, _ in model.named_parameters()] == names
    assert set(model.state_dict()) == set(ZOO["bert"].build().state_dict())
    optimizer = torch.optim.SGD(gates.parameters(), lr=0.5)
    before = float(model(**batch).loss)
    for _ in range(5):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert float(model(**batch).loss) < before
    restored = headprune.Gates(model, trainable=True)
    restored.load_state_dict(gates.state_dict())
    assert torch.equal(restored.values, gates.values)


def test_a_subclass_draws_its_gates() -> None:
    class Halved(headprune.Gates):
        def forward(self, site):
            return self.values[site.index] / 2

    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(0)
    expected = gated_outputs(model, batch, torch.full((3, 4), 0.5))
    Halved(model).attach()
    assert identical(outputs(model, batch), expected)


def test_gates_are_attached_once_and_must_fit() -> None:
    model = ZOO["bert"].build()
    gates = headprune.Gates(model).attach()
    assert gates.attached
    with pytest.raises(GateError, match="on the model already"):
        gates.attach()
    gates.detach()
    assert not gates.attached
    for wrong in (torch.ones(3, 5), torch.ones(2, 3, 4)):
        with pytest.raises(GateError):
            headprune.Gates(model, wrong)
