"""Going through a model layer by layer: the same as whole passes, in memory and on disk, byte for byte."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.checkpoint.layer_files import LayerFiles, load_on_disk
from headprune.checkpoint.save_load import save_weights_of
from headprune.criteria.elimination_math import eliminate
from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.check_walkable import require_walkable
from headprune.layerwise.site_passes import SitePasses
from headprune.layerwise.walker import stacks_of
from headprune.repair.dense_targets import DenseTargets
from headprune.repair.front_to_back import calls_of_sites, repair_front_to_back
from headprune.repair.regression import DENSE_RIDGES
from headprune.search.config import PruneConfig
from headprune.search.layerwise.choose import choose_units, precision_for
from headprune.search.layerwise.prune_layer import PrunedLayer
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.schedules.schedule import Removal
from headprune.surgery.remove_units import remove_units
from headprune.tasks import task_of
from headprune.units import sites_of
from zoo import ZOO

FAMILIES = ("bert", "gpt2", "llama-gqa", "t5", "bart", "vit")
KINDS = ("heads", "neurons")


def batches_of(name: str) -> list[dict[str, torch.Tensor]]:
    return [ZOO[name].batch(seed) for seed in (1, 2, 3)]


def config(**settings: Any) -> PruneConfig:
    return PruneConfig(schedule="layerwise", units="heads,neurons", round_to=2, keep_flops=0.6, **settings)


def by_whole_passes(
    model: Any, batches: Sequence[Mapping[str, Any]], keep: Mapping[int, int], settings: PruneConfig
) -> None:
    """The same computation with nothing but whole passes over the whole model: slow and plain."""
    task = task_of(model)
    sites = sites_of(model, KINDS)
    dense = DenseTargets(copy.deepcopy(model), sites, batches, task, weighted=False)
    for index in list(calls_of_sites(model, sites, batches[0], task)):
        sites = sites_of(model, KINDS)
        passes = SitePasses(model, sites, batches, task, walkable=False)
        count = len(sites[index].units()) - keep[index]
        gone = choose_units(settings.criterion, model, sites, sites[index], passes, count)
        if gone:
            remove_units(model, gone)
        sites = sites_of(model, KINDS)
        towards = {index: dense.targets[index]}
        repair_front_to_back(model, sites, towards, passes, "dense", precision=precision_for(sites[index]))


def same_weights(one: Any, other: Any) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_one_by_one_are_the_whole_model(name: str, tmp_path: Path) -> None:
    """In memory, by whole passes, and from a checkpoint one layer at a time: the same weights."""
    dense, batches = ZOO[name].build().eval(), batches_of(name)
    dense.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    settings = config()
    slow, quick = copy.deepcopy(dense), copy.deepcopy(dense)
    keep = LayerwisePruning(slow, batches, settings, task_of(slow)).widths()
    by_whole_passes(slow, batches, keep, settings)
    result = headprune.prune(quick, batches, config=settings)
    assert result.result.model_flops <= 0.6 * result.trajectory[0].model_flops
    assert len({site.size for site in sites_of(quick, KINDS)}) > 1  # something went, and not everywhere the same
    same_weights(quick, slow)

    model = load_on_disk(tmp_path / "dense", tmp_path / "scratch")
    task = task_of(model)
    layers = [path for stack in stacks_of(model, sites_of(model, KINDS)).values() for path in stack]
    (tmp_path / "parts").mkdir()
    storage = OnDisk(model, layers, tmp_path / "parts")
    pruning = LayerwisePruning(
        model, batches, settings, task, storage=storage, structure=dense, scratch=tmp_path / "parts"
    )
    removal = pruning.prune(Removal(widths=pruning.widths()))
    assert removal.repairs
    assert all(repair.weight is None and repair.bias is None for repair in removal.repairs)  # nothing piles up
    assert set(storage.there) == {1}
    save_weights_of(model, tmp_path / "pruned", storage.write_weights)
    same_weights(headprune.load(tmp_path / "pruned"), slow)
    assert torch.equal(pruning.predictions("pruned").values, result_predictions(slow, batches))


class OnDisk(LayerFiles):
    """Layers in files, without a run; `there` are how many had their weights while one was pruned."""

    finished: Mapping[str, PrunedLayer] = {}

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.there: list[int] = []

    def restore(self, pruned: PrunedLayer) -> None:
        raise AssertionError

    def keep(self, pruned: PrunedLayer) -> None:
        modules = [self.model.get_submodule(path) for path in self.layers]
        self.there.append(sum(any(p.device.type != "meta" for p in module.parameters()) for module in modules))
        self.write(pruned.layer)


def result_predictions(model: Any, batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    from headprune.measure.evaluator import Evaluator

    return Evaluator(batches, task_of(model))(model, ()).values


@pytest.mark.parametrize(
    ("criterion", "repair"),
    [("fluctuation", "mean"), ("wanda", "none"), ("magnitude", "scale"), ("elimination(metric=output)", "lstsq")],
)
def test_every_way_reaches_the_budget(criterion: str, repair: str) -> None:
    model, batches = ZOO["bert"].build().eval(), batches_of("bert")
    settings = config(criterion=criterion, repair=repair, widths="uniform")
    result = headprune.prune(model, batches, config=settings)
    heads = [site.size for site in sites_of(model, KINDS) if site.kind == "heads"]
    assert len(set(heads)) == 1  # the same share everywhere
    assert result.result.model_flops <= 0.6 * result.trajectory[0].model_flops
    errors = [(own["error"], own["error_without"]) for own in result.result.repairs]
    assert all(after <= before for after, before in errors)
    assert bool(errors) == (repair != "none")


def test_wide_sites_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sums in float64 would choose and solve is what comes out, up to the rounding of float32."""
    actual = []
    for wide in (1000, 10):
        monkeypatch.setattr("headprune.search.layerwise.choose.WIDE", wide)
        monkeypatch.setattr("headprune.search.layerwise.prune_layer.FEW_RIDGES", DENSE_RIDGES)
        model, batches = ZOO["llama"].build().eval(), batches_of("llama")
        kinds = {precision_for(site) for site in sites_of(model, KINDS)}
        assert kinds == {torch.float64 if wide == 1000 else torch.float32}
        headprune.prune(model, batches, config=config(criterion="magnitude"))  # an order without sums
        actual.append(model)
    exact, rounded = actual
    assert [site.kept for site in sites_of(exact, KINDS)] == [site.kept for site in sites_of(rounded, KINDS)]
    with torch.no_grad():
        one, other = (model(**batches_of("llama")[0]).logits for model in actual)
    assert 0 < (one - other).norm() <= 1e-3 * one.norm()


def test_elimination_in_float32_orders_as_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(400, 24, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, 24)
    weight = torch.randn(6, 24, generator=generator, dtype=torch.float64)
    orders = []
    for kind in (torch.float64, torch.float32):
        spread = (data.t() @ data / 400).to(kind)
        steps = eliminate(weight.to(kind), spread, torch.eye(6, dtype=kind), 4, 0.01)
        orders.append([unit for units, _, _ in steps for unit in units])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(6))


def test_what_cannot_be_walked_through_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The proof on a small twin fails if layers one by one give anything else than the model."""
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path))
    model = ZOO["bert"].build()
    require_walkable(model)
    put = ActivationStore.put
    monkeypatch.setattr(ActivationStore, "put", lambda self, number, tensor: put(self, number, tensor * 1.5))
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path / "other"))
    with pytest.raises(UnsupportedModelError, match="outputs are different layer by layer"):
        require_walkable(model)


def test_sites_that_do_not_run_are_left_whole_and_the_budget_is_met() -> None:
    """Cross attention without states of an encoder: the others make up for it, or the budget is refused."""
    model = ZOO["gpt2-cross"].build().eval()
    batches = [ZOO["gpt2-cross"].batch(seed) for seed in (1, 2, 3)]
    batches = [{name: value for name, value in own.items() if "encoder" not in name} for own in batches]
    sites = sites_of(model, KINDS)
    idle = [site.index for site in sites if getattr(site, "attention", "") == "cross"]
    result = headprune.prune(model, batches, config=replace(config(), keep_flops=None, keep_parameters=(0.9,)))
    assert result.result.parameters <= 0.9 * result.trajectory[0].parameters
    after = sites_of(model, KINDS)
    assert all(after[index].kept == sites[index].kept for index in idle)
    lower, again = replace(config(), keep_flops=None, keep_parameters=(0.3,)), ZOO["gpt2-cross"].build().eval()
    with pytest.raises(ScheduleError, match="would still be"):
        headprune.prune(again, batches, config=lower)


def test_padding_changes_no_width() -> None:
    model, batches = ZOO["bert"].build().eval(), batches_of("bert")
    longer = [{name: torch.nn.functional.pad(value, (0, 12)) for name, value in own.items()} for own in batches]
    actual = [LayerwisePruning(model, data, config(), task_of(model)).widths() for data in (batches, longer)]
    assert actual[0] == actual[1]


def test_logits_of_layerwise_pruning_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for limit in (1 << 28, 0):
        monkeypatch.setattr("headprune.hooks.logit_blocks.LIMIT", limit)
        monkeypatch.setattr("headprune.hooks.logit_blocks.BLOCK", 4 * 3 * 61 * 2)  # two tokens at a time
        model, batches = ZOO["llama"].build().eval(), batches_of("llama")
        pruning = LayerwisePruning(model, batches, config(), task_of(model))
        pruning.prune(Removal(widths=pruning.widths()))
        losses.append(pruning.predictions("pruned").loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_flops": 0.5, "criterion": "gnorm", "units": "heads"}, "no backward pass"),
        ({"keep_flops": 0.5, "criterion": "elimination"}, "no backward pass"),
        ({"speedup": 2.0}, "keep_flops or keep_parameters"),
        ({"keep_flops": (0.8, 0.5)}, "one point"),
        ({"units": "heads"}, "set a budget with"),
        ({"keep_flops": 0.5, "max_drop": 0.1}, "without max_drop"),
    ],
)
def test_what_the_layerwise_schedule_cannot_do_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        headprune.prune(ZOO["bert"].build(), batches_of("bert"), schedule="layerwise", **settings)


def test_layers_that_run_again_and_again_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="one by one"):
        headprune.prune(
            ZOO["albert"].build(), batches_of("albert"), schedule="layerwise", keep_flops=0.8, units="heads"
        )
