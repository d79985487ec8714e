"""Criteria by name: one decorator, options in brackets, `inverse:`, and refusals that name the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import headprune
from headprune.criteria import REGISTRY, make
from headprune.errors import CriterionError, RegistrationError
from headprune.signals import GateGradients, Request
from score_helpers import labelled, model_of, oracle_of, some_batches
from zoo import ZOO

NAMES = {"gnorm", "his", "tis", "attribution", "entropy", "deficit", "hies", "magnitude", "taylor", "random"}
NAMES |= {"residual-gradient", "residual-error", "elimination", "fisher", "fluctuation", "wanda"}


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def score(spec: Any, **options: Any) -> torch.Tensor:
    return headprune.score(model_of("bert", "dense"), [labelled(ZOO["bert"], 0)], criterion=spec, **options).scores


# --- what there is --------------------------------------------------------------------------------------------------


def test_all_criteria_are_there_with_a_reference_and_a_word_on_their_use() -> None:
    assert set(REGISTRY) == NAMES
    for name, kind in REGISTRY.items():
        assert kind.name == name
        assert kind.use
        assert kind.reference or name == "random"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_inverse_of_any_criterion_turns_its_order(name: str) -> None:
    options = {"steps": 2} if name == "attribution" else {}
    assert torch.equal(score(f"inverse:{name}", **options), -score(name, **options))


def test_inverse_keeps_options_labels_and_removed_heads() -> None:
    inverse = make("inverse:hies(alpha=0.9)")
    assert str(inverse) == "inverse:hies(alpha=0.9)"
    assert inverse.needs_labels
    model = model_of("bert", "some-heads")
    result = headprune.score(model, [labelled(ZOO["bert"], 0)], criterion=inverse).scores
    plain = headprune.score(model, [labelled(ZOO["bert"], 0)], criterion="hies(alpha=0.9)").scores
    assert torch.equal(result.isnan(), plain.isnan())
    assert plain.isnan().any()
    assert torch.equal(result[~result.isnan()], -plain[~plain.isnan()])


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        ("gnorm", False),
        ("gnorm(objective=loss)", True),
        ("entropy", False),
        ("deficit", False),
        ("magnitude", False),
        ("random", False),
        ("his", True),
        ("tis", True),
        ("taylor", True),
        ("hies", True),
        ("attribution", True),
        ("residual-gradient", False),
        ("residual-gradient(residual=False)", False),
        ("residual-error", False),
        ("fisher", True),
        ("fisher(rearrange=True)", True),
        ("fluctuation", False),
        ("wanda", False),
    ],
)
def test_each_criterion_says_whether_it_needs_labels(spec: str, needs: bool) -> None:
    batch = {name: value for name, value in labelled(ZOO["bert"], 0).items() if name != "labels"}
    assert make(spec).needs_labels is needs
    if needs:
        with pytest.raises(headprune.HeadpruneError, match="labels"):
            headprune.score(model_of("bert", "dense"), [batch], criterion=spec)
    else:
        assert headprune.score(model_of("bert", "dense"), [batch], criterion=spec).scores.isfinite().all()


# --- options --------------------------------------------------------------------------------------------------------


def test_options_go_into_brackets_or_beside_the_name() -> None:
    assert torch.equal(score("hies(alpha=0.9)"), score("hies", alpha=0.9))
    assert torch.equal(score(" hies ( alpha = 0.9 , variant = A ) "), score("hies", alpha=0.9, variant="A"))
    assert torch.equal(score("his(normalize=true)"), score("his", normalize=True))
    assert not torch.equal(score("his(normalize=true)"), score("his"))
    assert torch.equal(score(make("entropy(variant=A)")), score("entropy", variant="A"))
    assert make("attribution(steps=7)") == make("attribution", steps=7)


def test_alpha_of_hies_weighs_its_two_parts() -> None:
    """alpha = 0 is entropy alone: the order of `entropy`; the nearer to 1, the nearer to the order of `his`."""
    entropies, importance = score("entropy").flatten(), score("his").flatten()
    raw = "entropy=raw,tokens=sum"
    assert score(f"hies(alpha=0,{raw})").flatten().argsort().tolist() == entropies.argsort().tolist()
    assert score(f"hies(alpha=0.999999,{raw})").flatten().argsort().tolist() == importance.argsort().tolist()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gnrm", "did you mean 'gnorm'"),
        ("entropi", "did you mean 'entropy'"),
        ("inverse:gnrm", "did you mean 'gnorm'"),
        ("xyzzy", "attribution, deficit, elimination"),
        ("", "attribution, deficit, elimination"),
        ("gnorm(", "gnorm"),
        ("gnorm(objective=sum)", "objective of gnorm must be one of logit-norm, loss"),
        ("gnorm(aggregation=mean)", "aggregation of gnorm must be one of sample, batch"),
        ("gnorm(alpha=1)", "no option 'alpha'; it takes objective, aggregation"),
        ("magnitude(norm=1)", "takes no options"),
        ("entropy(variant=D)", "one of A, B, C"),
        ("entropy(epsilon=-1)", "must not be negative"),
        ("entropy(epsilon=nan)", "must not be negative"),
        ("deficit(variant=a)", "one of A, B, C"),
        ("hies(alpha=1)", r"\[0, 1\)"),
        ("hies(alpha=-0.1)", r"\[0, 1\)"),
        ("hies(alpha=nan)", r"\[0, 1\)"),
        ("hies(alpha=high)", "'high' is not a"),
        ("his(normalize=2)", "'2' is not a"),
        ("attribution(steps=0)", "at least 1"),
        ("attribution(steps=2.5)", "'2.5' is not a"),
        ("residual-gradient(residual=2)", "'2' is not a"),
        ("residual-gradient(ridge=1)", "no option 'ridge'; it takes residual"),
        ("residual-error(residual=True)", "takes no options"),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_sentence(spec: str, said: str) -> None:
    with pytest.raises(CriterionError, match=said) as caught:
        score(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"alpha": "high"}, {"alpha": None}, {"epsilon": "small"}])
def test_a_wrong_option_beside_the_name_is_refused_too(options: dict[str, Any]) -> None:
    with pytest.raises(CriterionError, match=next(iter(options))):
        score("hies", **options)


@pytest.mark.parametrize("spec", [5, False, ["gnorm"], headprune.Criterion])
def test_what_is_no_criterion_at_all_is_refused(spec: Any) -> None:
    with pytest.raises(CriterionError):
        score(spec)


def test_options_beside_a_ready_criterion_are_refused_rather_than_dropped() -> None:
    with pytest.raises(CriterionError, match="alpha"):
        score(make("hies"), alpha=0.9)


def test_one_criterion_or_several_but_not_both() -> None:
    model, batch = model_of("bert", "dense"), labelled(ZOO["bert"], 0)
    for wrong in ({"criterion": "gnorm", "criteria": ["his"]}, {"criteria": []}):
        with pytest.raises(CriterionError):
            headprune.score(model, [batch], **wrong)
    with pytest.raises(CriterionError, match="alpha"):
        headprune.score(model, [batch], criteria=["hies"], alpha=0.9)


# --- a user's own ---------------------------------------------------------------------------------------------------


def test_a_users_criterion_of_weights_takes_one_decorator() -> None:
    @headprune.criterion("widest", use="for this test")
    class Widest(headprune.Criterion):
        factor: float = 1.0

        def from_weights(self, model: Any, sites: Sequence[Any]) -> torch.Tensor:
            return self.factor * torch.arange(12.0).view(3, 4)

    assert score("widest").tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert score("widest(factor=2)")[2, 3] == 22
    assert score("inverse:widest")[2, 3] == -11
    pruned = headprune.score(model_of("bert", "first-site-gone"), criterion="widest").scores
    assert pruned[0].isnan().all()
    with pytest.raises(CriterionError, match="did you mean 'widest'"):
        score("wides")


def test_a_users_criterion_of_signals_shares_the_pass() -> None:
    @headprune.criterion("signed", reference="this test", use="for this test")
    class Signed(headprune.Criterion):
        def requests(self) -> tuple[Request, ...]:
            return (GateGradients("loss"),)

        def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"signed": answers[GateGradients("loss")].sum(0)}

        def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
            return sums["signed"] / samples

    batches = some_batches(ZOO["bert"])
    actual = headprune.score(model_of("bert", "dense"), batches, criteria=["his", "signed"]).scores
    gradients = oracle_of("bert", "dense").gate_gradients()
    assert torch.allclose(actual["signed"], sum(gradients) / len(gradients), rtol=1e-4, atol=1e-7)
    assert (actual["signed"].abs() <= actual["his"] + 1e-12).all()
    assert make("signed").needs_labels


@pytest.mark.parametrize("name", ["gnorm", "", "Loud", "1st", "a b", "inverse:his", "x(y)"])
def test_registration_refuses_bad_and_taken_names(name: str) -> None:
    with pytest.raises(RegistrationError, match=r"exists already|not a name"):

        @headprune.criterion(name)
        class Mine(headprune.Criterion):
            pass

    assert set(REGISTRY) == NAMES


def test_registration_refuses_what_is_no_criterion() -> None:
    with pytest.raises(RegistrationError, match=r"headprune\.Criterion"):
        headprune.criterion("mine")(int)  # type: ignore[type-var]
    assert set(REGISTRY) == NAMES


# --- random ---------------------------------------------------------------------------------------------------------


def test_random_is_seeded_and_keeps_its_numbers_after_removals() -> None:
    state = torch.get_rng_state()
    first, again, other = score("random"), score("random(seed=0)"), score("random(seed=1)")
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(set(first.flatten().tolist())) == 12
    assert torch.equal(torch.get_rng_state(), state)
    left = headprune.score(model_of("bert", "some-heads"), criterion="random").scores
    assert left.isnan().any()
    assert torch.equal(left[~left.isnan()], first[~left.isnan()])
