"""Going through a model layer by layer: the same as whole passes, in memory and on disk, byte for byte."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headprune
from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.repair.bysite import running_order
from headprune.repair.dense import DenseOutputs
from headprune.repair.passes import Passes
from headprune.repair.sweep import sweep as repair_sites
from headprune.search.config import PruneConfig
from headprune.search.sweep.follow import stacks_of
from headprune.search.sweep.leaving import leaving, precision_for
from headprune.search.sweep.sweep import Sweep
from headprune.store.checkpoint import save_weights_of
from headprune.store.shelf import DiskShelf, load_on_disk
from headprune.surgery.cut import cut
from headprune.task import task_of
from headprune.units import sites_of
from zoo import ZOO

FAMILIES = ("bert", "gpt2", "llama-gqa", "t5", "bart", "vit")
KINDS = ("heads", "neurons")


def batches_of(name: str) -> list[dict[str, torch.Tensor]]:
    return [ZOO[name].batch(seed) for seed in (1, 2, 3)]


def config(**settings: Any) -> PruneConfig:
    return PruneConfig(schedule="sweep", units="heads,neurons", round_to=2, keep_flops=0.6, **settings)


def by_whole_passes(
    model: Any, batches: Sequence[Mapping[str, Any]], keep: Mapping[int, int], settings: PruneConfig
) -> None:
    """The same computation with nothing but whole passes over the whole model: slow and plain."""
    task = task_of(model)
    sites = sites_of(model, KINDS)
    dense = DenseOutputs(copy.deepcopy(model), sites, batches, task, weighted=False)
    for index in running_order(model, sites, batches[0], task):
        sites = sites_of(model, KINDS)
        passes = Passes(model, [], batches, task)
        count = len(sites[index].units()) - keep[index]
        gone = leaving(settings.made_criterion, model, sites, sites[index], passes, count)
        if gone:
            cut(model, gone)
        sites = sites_of(model, KINDS)
        towards = {index: dense.targets[index]}
        repair_sites(model, sites, towards, passes, "lstsq", precision=precision_for(sites[index]))


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
    keep = Sweep(slow, batches, settings, task_of(slow)).widths()
    by_whole_passes(slow, batches, keep, settings)
    result = headprune.prune(quick, batches, config=settings)
    assert result.result.model_flops <= 0.6 * result.trajectory[0].model_flops
    assert len({site.size for site in sites_of(quick, KINDS)}) > 1  # something went, and not everywhere the same
    same_weights(quick, slow)

    model = load_on_disk(tmp_path / "dense", tmp_path / "scratch")
    task = task_of(model)
    layers = [path for stack in stacks_of(model, sites_of(model, KINDS)).values() for path in stack]
    (tmp_path / "parts").mkdir()
    shelf = DiskShelf(model, layers, tmp_path / "parts")
    sweep = Sweep(model, batches, settings, task, shelf=shelf, structure=dense, scratch=tmp_path / "parts")
    there: list[int] = []
    for _ in sweep.layers(sweep.widths(), done=lambda layer, swept: _note(model, layers, layer.path, there, shelf)):
        pass
    assert set(there) == {1}  # layers that had their weights while one was pruned
    save_weights_of(model, tmp_path / "pruned", shelf.write_weights)
    same_weights(headprune.load(tmp_path / "pruned"), slow)
    assert torch.equal(sweep.quality("pruned").predictions, result_predictions(slow, batches))


def _note(model: Any, layers: Sequence[str], path: str, there: list[int], shelf: DiskShelf) -> None:
    real = [own for own in layers if any(p.device.type != "meta" for p in model.get_submodule(own).parameters())]
    there.append(len(real))
    shelf.keep(path)


def result_predictions(model: Any, batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    from headprune.measure.evaluator import Evaluator

    return Evaluator(batches, task_of(model))(model, ()).predictions


@pytest.mark.parametrize(
    ("criterion", "compensate"),
    [("fluctuation", "mean"), ("wanda", "none"), ("magnitude", "scale"), ("elimination(metric=output)", "site")],
)
def test_every_way_reaches_the_budget(criterion: str, compensate: str) -> None:
    model, batches = ZOO["bert"].build().eval(), batches_of("bert")
    settings = config(criterion=criterion, compensate=compensate, widths="uniform")
    result = headprune.prune(model, batches, config=settings)
    heads = [site.size for site in sites_of(model, KINDS) if site.kind == "heads"]
    assert len(set(heads)) == 1  # the same share everywhere
    assert result.result.model_flops <= 0.6 * result.trajectory[0].model_flops
    errors = [(own["error"], own["error_without"]) for own in result.result.compensation]
    assert all(after <= before for after, before in errors)
    assert bool(errors) == (compensate != "none")


def test_wide_sites_are_summed_in_float32() -> None:
    """What float64 would choose and solve is what comes out, up to the rounding of float32."""
    llama = tf.LlamaConfig(
        hidden_size=32, intermediate_size=2100, num_hidden_layers=1, num_attention_heads=4, vocab_size=60
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(llama).eval()
    ids = torch.randint(0, 60, (24, 100), generator=torch.Generator().manual_seed(0))
    settings = PruneConfig(schedule="sweep", units="neurons", keep_flops=0.7)
    site = sites_of(model, KINDS)[1]
    assert precision_for(site) == torch.float32
    exact = copy.deepcopy(model).double()
    for one in (model, exact):
        headprune.prune(one, [{"input_ids": ids}], config=settings)
    with torch.no_grad():
        found, expected = (one(input_ids=ids).logits.double() for one in (model, exact))
    assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_flops": 0.5, "criterion": "gnorm", "units": "heads"}, "no backward pass"),
        ({"keep_flops": 0.5, "criterion": "elimination"}, "no backward pass"),
        ({"speedup": 2.0}, "keep_flops or keep_parameters"),
        ({"keep_flops": (0.8, 0.5)}, "one point"),
        ({"units": "heads"}, "say how much may be left"),
        ({"keep_flops": 0.5, "max_drop": 0.1}, "without max_drop"),
    ],
)
def test_what_a_sweep_cannot_do_is_said(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        headprune.prune(ZOO["bert"].build(), batches_of("bert"), schedule="sweep", **settings)


def test_layers_that_run_again_and_again_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="one by one"):
        headprune.prune(ZOO["albert"].build(), batches_of("albert"), schedule="sweep", keep_flops=0.8, units="heads")
