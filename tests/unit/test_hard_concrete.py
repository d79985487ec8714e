"""The maths of gates, against closed forms: probabilities, gradients, what is drawn and what is decided."""

from __future__ import annotations

import math

import pytest
import torch

from headprune.errors import GateError
from headprune.training.hard_concrete import HardConcrete

ALPHAS = torch.linspace(-4, 4, 17, dtype=torch.float64)
# Every noise of a fine grid stands for the same share of draws, so that a mean over it is an integral.
GRID = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000


@pytest.mark.parametrize("constants", [{}, {"beta": 2 / 3}, {"gamma": -0.3, "zeta": 1.05}])
def test_the_expected_l0_is_the_share_of_draws_that_are_not_zero(constants: dict[str, float]) -> None:
    gate = HardConcrete(**constants)
    for alpha in ALPHAS:
        drawn = gate.draw(alpha, GRID, straight_through=False)
        share = float((drawn > 0).double().mean())
        # A share of a grid is off by one of its points at most.
        assert float(gate.open_probability(alpha)) == pytest.approx(share, abs=2 / len(GRID))
        closed = 1 - float(gate.open_probability(alpha))
        assert closed == pytest.approx(
            1 / (1 + math.exp(float(alpha) - gate.beta * math.log(-gate.gamma / gate.zeta))), rel=1e-12
        )


def test_a_straight_through_gate_is_open_with_sigmoid_of_log_alpha() -> None:
    gate = HardConcrete()
    for alpha in ALPHAS:
        drawn = gate.draw(alpha, GRID, straight_through=True)
        assert set(drawn.unique().tolist()) <= {0.0, 1.0}
        assert float(drawn.mean()) == pytest.approx(1 / (1 + math.exp(-float(alpha))), abs=2 / len(GRID))


def test_the_formula_of_the_paper_by_hand() -> None:
    gate, u, alpha = HardConcrete(), 0.3, 0.4
    s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + alpha) * 3))
    expected = min(1.0, max(0.0, s * 1.2 - 0.1))
    actual = gate.draw(torch.tensor(alpha, dtype=torch.float64), torch.tensor(u).double(), straight_through=False)
    # u came through float32, which has 24 bits; the slope of the gate is below 4.
    assert float(actual) == pytest.approx(expected, abs=1e-6)
    assert 0 < expected < 1
    evaluated = gate.evaluated(torch.tensor(alpha, dtype=torch.float64))
    assert float(evaluated) == pytest.approx(1.2 / (1 + math.exp(-alpha)) - 0.1, rel=1e-12)
    assert gate.evaluated(torch.tensor([-9.0, 9.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("noise", [0.2, 0.5, 0.8])
def test_gradients_are_those_of_finite_differences(noise: float) -> None:
    gate, fixed = HardConcrete(), torch.full_like(ALPHAS, noise)
    assert torch.autograd.gradcheck(
        lambda alpha: gate.draw(alpha, fixed, straight_through=False), ALPHAS.clone().requires_grad_(True)
    )
    assert torch.autograd.gradcheck(gate.open_probability, ALPHAS.clone().requires_grad_(True))


def test_straight_through_has_the_gradient_of_the_gate_that_it_rounds() -> None:
    gate, noise = HardConcrete(), torch.full_like(ALPHAS, 0.45)
    slopes = []
    for straight in (False, True):
        alpha = ALPHAS.clone().requires_grad_(True)
        gate.draw(alpha, noise, straight_through=straight).sum().backward()
        slopes.append(alpha.grad)
    assert torch.equal(*slopes)
    assert slopes[0].count_nonzero() > 2


def test_noise_at_its_ends_is_finite() -> None:
    alpha = torch.zeros(2, requires_grad=True)
    drawn = HardConcrete().draw(alpha, torch.tensor([0.0, 1.0]), straight_through=False)
    drawn.sum().backward()
    assert drawn.tolist() == [0.0, 1.0]
    assert torch.isfinite(alpha.grad).all()


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"gamma": 0.1}, {"zeta": 1.0}])
def test_constants_that_are_no_gate(wrong: dict[str, float]) -> None:
    with pytest.raises(GateError):
        HardConcrete(**wrong)
