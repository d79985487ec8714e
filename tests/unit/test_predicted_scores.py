"""Scores of a site after further removals, from the pass before them, against scoring the model that has lost them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from headprune.criteria import make
from headprune.criteria.scoring_pass import ScoringPass
from headprune.hooks.module_paths import layer_path
from headprune.signals import predicted_scores
from headprune.tasks import task_of
from oracles import relative_differences
from score_helpers import labelled
from zoo import ZOO


def batches_of(name: str) -> list[dict[str, Any]]:
    actual = [labelled(ZOO[name], seed) for seed in (0, 5, 7)]
    return [{key: value.double() if value.is_floating_point() else value for key, value in b.items()} for b in actual]


def kept(model: Any, batches: list[Any], criterion: str = "residual-gradient", **options: Any) -> ScoringPass:
    """A pass that keeps what it gathers."""
    sites = headprune.resolve(model)
    made = ScoringPass(model, sites, {criterion: make(criterion)}, task_of(model), "given", **{"keep": True, **options})
    made.run(batches)
    return made


def straight() -> Any:
    """Nothing behind the last site is curved: what it adds to the stream reaches the logits by linear maps alone."""
    model = ZOO["vit"].build().double()
    layer = model.get_submodule(layer_path(headprune.resolve(model)[-1].path))
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features != module.out_features:
            torch.nn.init.zeros_(module.weight)  # no feed-forward layer
    model.vit.layernorm = torch.nn.Identity()
    return model


@pytest.fixture
def least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs and residuals by plain least squares."""
    monkeypatch.setattr("headprune.signals.residuals.RIDGE", 1e-12)
    monkeypatch.setattr(predicted_scores, "RIDGE", 1e-12)
    monkeypatch.setattr("headprune.repair.apply.SITE_RIDGES", (1e-12,))


@pytest.mark.usefixtures("least_squares")
@pytest.mark.parametrize("repair", ["lstsq", "mean", "none"])
@pytest.mark.parametrize("gone", [[0], [2], [1, 3]])
def test_with_nothing_curved_behind_the_site_nothing_is_left_out(gone: list[int], repair: Any) -> None:
    model, batches = straight(), batches_of("vit")
    site = headprune.resolve(model)[-1]
    told = kept(model, batches).without(site, gone, repaired=repair == "lstsq")
    headprune.remove(model, [(site.index, head) for head in gone], repair=repair, batches=batches)
    truth = headprune.score(model, batches).scores[site.index]
    assert told is not None
    assert relative_differences(told, truth[~truth.isnan()]).max() < 1e-6


@pytest.mark.usefixtures("least_squares")
@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v2", "llama-gqa"])
def test_it_is_nearer_to_the_truth_than_the_scores_before(name: str) -> None:
    """Also where the layers behind the site see something different, and where a site runs several times."""
    before, after = [], []
    for number in range(3):
        model, batches = ZOO[name].build().double(), batches_of(name)
        site = headprune.resolve(model)[-1]
        gone = [member.index for member in site.units()[number]]
        known = kept(model, batches)
        told = known.without(site, gone, repaired=True)
        headprune.remove(model, site.units()[number], repair="lstsq", batches=batches)
        truth = headprune.score(model, batches).scores[site.index]
        there = ~truth.isnan()
        assert told is not None
        before.append(relative_differences(known.scores["residual-gradient"][site.index][there], truth[there]).mean())
        after.append(relative_differences(told, truth[there]).mean())
    assert torch.stack(after).mean() < torch.stack(before).mean()


def test_nothing_is_told_where_it_cannot_be() -> None:
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], 0)]
    site = headprune.resolve(model)[0]
    for other in ("gnorm", "elimination", "residual-gradient(residual=False)", "inverse:residual-gradient"):
        assert kept(model, batches, other).without(site, [0], repaired=True) is None
    asked = kept(model, batches)
    assert asked.without(site, [0], repaired=True) is not None
    assert asked.without(site, list(site.kept), repaired=True) is None  # nobody is left
    assert kept(model, batches, keep=False).without(site, [0], repaired=True) is None
    assert kept(model, batches, memory=100).without(site, [0], repaired=True) is None  # which was too much to keep


def test_it_does_not_depend_on_the_batches() -> None:
    """A sample more in a batch is padded a little more, and rounds otherwise."""
    model, whole = ZOO["bert"].build().double(), batches_of("bert")
    site = headprune.resolve(model)[1]
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for batch in whole for row in range(3)]
    one, other = (kept(model, batches).without(site, [2], repaired=True) for batches in (whole, parts))
    assert one is not None
    assert relative_differences(one, other).max() < 1e-6
