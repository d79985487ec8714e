"""Learned gates on every family: open they change nothing, closed they are what is removed."""

from __future__ import annotations

import pytest
import torch

import headprune
from helpers import NO_NEURONS, SAME_CODE, TOLERANCE, difference, families, hook_count, identical, outputs
from zoo import Entry


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_gates_at_the_start_leave_outputs_as_they_were(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(0)
    plain = outputs(model, batch)
    gates = headprune.LearnedGates(model, l0=0.02)
    assert identical(plain, outputs(model, batch))
    assert len(gates) == sum(len(site.units()) for site in headprune.resolve(model))
    gates.detach()
    assert hook_count(model) == 0


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_closed_gates_are_what_is_removed(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(0)
    gates = headprune.LearnedGates(model, keep=0.5, warmup=0.0)
    with torch.no_grad():
        gates.bias += torch.randn(len(gates), generator=torch.Generator().manual_seed(1))
    expected, closed = outputs(model, batch), gates.closed()
    assert closed
    gates.remove(verify=batch)
    gone = {(site.index, head) for site in headprune.resolve(model) for head in site.removed}
    assert gone == {tuple(member) for member in closed}
    scale = max(1.0, *(float(value.abs().max()) for value in expected.values()))
    assert difference(expected, outputs(model, batch)) <= TOLERANCE * scale


@pytest.mark.parametrize("entry", families(without=(*NO_NEURONS, *SAME_CODE)))
def test_closed_groups_of_neurons_are_what_is_removed(entry: Entry) -> None:
    model, batch = entry.build(), entry.batch(0)
    gates = headprune.LearnedGates(model, l0=0.02, units="neurons", group=4, warmup=0.0, rescale=False)
    with torch.no_grad():
        gates.bias[::2] = -3.0
    expected = outputs(model, batch)
    gates.remove(verify=batch)
    scale = max(1.0, *(float(value.abs().max()) for value in expected.values()))
    assert difference(expected, outputs(model, batch)) <= TOLERANCE * scale
