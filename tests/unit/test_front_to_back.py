"""Repairs towards the dense model: least squares, passes that compute nothing twice, and streams that are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headprune.errors import EquivalenceError
from headprune.hooks.residual_stream import streams
from headprune.layerwise.site_inputs import SiteTokens
from headprune.layerwise.site_passes import SitePasses
from headprune.repair.dense_targets import DenseTargets, TargetRecorder
from headprune.repair.front_to_back import calls_of_sites, remove_front_to_back, repair_front_to_back
from headprune.repair.regression import DENSE_RIDGES, Repair, Sums, fit
from headprune.signals.sensitivity import FLOOR, token_weights
from headprune.surgery.remove_units import remove_units
from headprune.tasks import task_of
from headprune.units import Member, Site, all_sites
from headprune.units.slicing.removal import slice_weights
from zoo import ZOO


def sums_of(
    z: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> Sums:
    sums = Sums.blank(z.shape[1], y.shape[1])
    sums.add(z, y, weight, bias, torch.arange(len(z)) // 4 % 2, weights)
    return sums


def fitted_to(
    z: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ridges: tuple[float, ...] = DENSE_RIDGES,
) -> Repair:
    return fit(weight, bias, sums_of(z, y, weight, bias), "lstsq", ridges=ridges)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_error_is_the_mean_over_tokens(weighted: bool, biased: bool) -> None:
    z, y, weight = drawn(40, 5), drawn(40, 3, seed=1), drawn(3, 5, seed=2)
    share = torch.rand(40, dtype=torch.float64) + 0.1 if weighted else torch.ones(40, dtype=torch.float64)
    bias = drawn(3, seed=3) if biased else None
    off = y - z @ weight.t() - (0 if bias is None else bias)
    expected = float((off.square().sum(1) * share).sum() / share.sum())
    sums = sums_of(z, y, weight, bias, share if weighted else None)
    assert sums.error() == pytest.approx(expected, rel=1e-10)
    change, moved = drawn(3, 5, seed=4), drawn(3, seed=5)
    off = off - z @ change.t() - moved
    expected = float((off.square().sum(1) * share).sum() / share.sum())
    assert sums.error(change, moved) == pytest.approx(expected, rel=1e-10)


def test_what_can_be_expressed_is_found() -> None:
    """y is a linear function of z: the old map is far off, and the new one has nothing left to miss but the ridge."""
    z, right, shift = drawn(400, 6), drawn(4, 6, seed=1), drawn(4, seed=2)
    y = z @ right.t() + shift
    repair = fitted_to(z, y, torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4))
    assert repair.error < 1e-4 * repair.error_without  # the smallest ridge is 1e-3, so 1e-6 of the error stays
    assert torch.allclose(repair.weight, right, atol=0.02)
    assert torch.allclose(repair.bias.double(), shift, atol=0.05)


def test_a_map_that_nothing_improves_stays_as_it_is() -> None:
    z, weight = drawn(64, 5), drawn(3, 5, seed=1)
    bias = torch.zeros(3, dtype=torch.float64)
    repair = fitted_to(z, z @ weight.t(), weight, bias)
    assert repair.error == repair.error_without == 0.0
    assert torch.equal(repair.weight, weight)


def test_noise_is_not_fitted() -> None:
    """What has nothing to do with the inputs is left to the bias: the ridge that serves others is large."""
    z, y = drawn(60, 30), drawn(60, 8, seed=1) * 3
    old = torch.zeros(8, 30, dtype=torch.float64)
    bias = torch.zeros(8, dtype=torch.float64)
    chosen, plain = fitted_to(z, y, old, bias), fitted_to(z, y, old, bias, ridges=(1e-3,))
    assert chosen.weight.norm() < 0.5 * plain.weight.norm()


def test_tokens_count_by_the_root_of_what_depends_on_them() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0, 11.0])  # of mean 4
    assert token_weights(squares) == pytest.approx(torch.tensor([0.0, 0.5, 1.0, (11 / 4) ** 0.5]) + FLOOR)
    assert token_weights(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


NO_STREAM = {"gemma2", "dinov2", "granite"}  # a norm, a scale or a factor stands between output and stream


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama-gqa", "t5", "whisper", "vit", "gemma2", "dinov2"])
def test_a_stream_is_what_the_output_is_added_to(name: str) -> None:
    """Moving an output is moving the stream after it, so gradients at both are the same."""
    model, batch = ZOO[name].build().eval(), ZOO[name].batch(0)
    sites = all_sites(model)
    seen: dict[int, int] = {}
    with torch.no_grad(), streams(model, sites, lambda site, stream: seen.update({site.index: stream.shape[-1]})):
        model(**batch)
    assert not seen if name in NO_STREAM else set(seen) == {site.index for site in sites}


def test_adding_to_the_stream_is_adding_to_the_output() -> None:
    model, batch = ZOO["llama-gqa"].build().eval(), ZOO["llama-gqa"].batch(0)
    site = all_sites(model)[-1]
    outputs: list[torch.Tensor] = []
    actual: list[torch.Tensor] = []
    handle = model.get_submodule(site.o).register_forward_hook(lambda m, a, out: outputs.append(out))
    layer: list[torch.Tensor] = []
    other = model.model.layers[-1].register_forward_hook(lambda m, a, out: layer.append(out))
    with torch.no_grad(), streams(model, [site], lambda _, stream: actual.append(stream)):
        model(**batch)
    handle.remove()
    other.remove()
    assert torch.equal(actual[0] + outputs[0], layer[0])


def pruned(name: str) -> tuple:
    model = ZOO[name].build().eval()
    batches = [ZOO[name].batch(seed) for seed in range(4)]
    task = task_of(model)
    sites = all_sites(model)
    dense = DenseTargets(model, sites, batches, task)
    gone = [m for site in sites for unit in site.units()[::2] for m in unit if site.size > site.group]
    remove_units(model, gone)
    return model, batches, task, dense


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama-gqa", "t5", "vit", "phi3", "gemma2"])
def test_no_site_is_worse_after_its_repair(name: str) -> None:
    model, _, _, dense = pruned(name)
    repairs = dense.repair(model, all_sites(model), "dense")
    assert len(repairs) == len(all_sites(model))
    for repair in repairs:
        assert repair.error is not None
        assert repair.error <= repair.error_without


@pytest.mark.parametrize("forwards", [True, False])
@pytest.mark.parametrize("name", ["bert", "albert", "llama-gqa", "t5"])
def test_passes_see_what_fresh_passes_see(name: str, forwards: bool) -> None:
    """After every change at a site, what reaches the next is what a fresh forward pass brings there, whether sites come
    in the order in which they run or not."""
    model, batches, task, _ = pruned(name)
    sites = all_sites(model)
    passes = SitePasses(model, sites, batches, task, walkable=name != "albert")
    order = [sites[index] for index in list(calls_of_sites(model, sites, batches[0], task))]
    for site in order if forwards else order[::-1]:
        expected: list[torch.Tensor] = []
        handle = model.get_submodule(site.o).register_forward_pre_hook(
            lambda m, args, into=expected: into.append(args[0].detach())
        )
        with torch.no_grad():
            for batch in batches:
                model(**task.inputs(task.prepare(batch, torch.device("cpu"))))
        handle.remove()
        seen = [part.columns for part in passes.at(site)]
        assert sum(len(part) for part in seen) <= sum(one.shape[:-1].numel() for one in expected)
        whole = torch.cat([one.flatten(0, -2) for one in expected])
        for row in torch.cat(seen)[::7]:
            assert (whole == row).all(1).any()
        with torch.no_grad():
            model.get_submodule(site.o).weight.mul_(0.5)


def test_a_repair_runs_every_layer_three_times_whatever_the_depth() -> None:
    """For either of its sites, and once it is repaired; not the last one then, and the first once more, which tells how
    layers are called."""
    model, batches, _, dense = pruned("bert")
    layers = [layer.attention for layer in model.bert.encoder.layer]  # a layer that stands in for itself runs none
    runs: list[torch.nn.Module] = []
    handles = [layer.register_forward_pre_hook(lambda module, args: runs.append(module)) for layer in layers]
    dense.repair(model, all_sites(model), "dense")
    for handle in handles:
        handle.remove()
    assert dense.walkable
    assert [runs.count(layer) / len(batches) for layer in layers] == [4.0, 3.0, 2.0]


def test_a_model_that_cannot_be_walked_through_is_repaired_by_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights come out, from more passes."""
    actual = []
    for walkable in (True, False):
        monkeypatch.setattr("headprune.repair.dense_targets.is_walkable", lambda *args, walkable=walkable: walkable)
        model, _, _, dense = pruned("bert")
        assert dense.walkable == walkable
        dense.repair(model, all_sites(model), "dense")
        actual.append(model.state_dict())
    for name, value in actual[0].items():
        assert torch.equal(value, actual[1][name]), name


def test_whether_a_model_can_be_walked_through_is_tried_on_itself() -> None:
    assert pruned("t5")[-1].walkable
    assert not pruned("albert")[-1].walkable  # whose layers run again and again


def test_means_go_into_biases() -> None:
    bare, batches, task, _dense = pruned("bert")
    model = ZOO["bert"].build()
    sites = all_sites(model)
    gone = [Member(site.index, member) for site in all_sites(bare) for member in site.removed]
    repairs = remove_front_to_back(model, sites, gone, batches, task, "mean")
    assert {repair.kind for repair in repairs} == {"mean"}
    old = bare.state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, old[name])}
    assert changed
    assert all(name.endswith("bias") for name in changed)


class Widened:
    """The tokens of sites with this many more columns: nn.MultiheadAttention without heads passes on its queries."""

    def __init__(self, passes: SitePasses, more: int) -> None:
        self.passes, self.more = passes, more

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        for tokens in self.passes.at(site, streams=streams):
            columns = tokens.columns
            yield replace(tokens, columns=torch.cat([columns, columns.new_ones(len(columns), self.more)], dim=1))


@pytest.mark.parametrize("columns", [0, 32])
def test_a_site_without_units_gives_what_the_dense_one_gave_on_average(columns: int) -> None:
    model = ZOO["bert"].build().eval()
    batches = [ZOO["bert"].batch(seed) for seed in range(4)]
    task, sites = task_of(model), all_sites(model)
    dense = DenseTargets(model, sites, batches, task, weighted=False)
    empty = sites[-1]
    wanted = torch.cat(list(dense.targets[empty.index].outputs))
    remove_units(model, [Member(empty.index, member) for member in empty.kept])
    sites = all_sites(model)
    passes = Widened(SitePasses(model, sites, batches, task), columns)
    repair_front_to_back(model, sites, {empty.index: dense.targets[empty.index]}, passes)  # all before it as it was
    assert torch.allclose(model.get_submodule(empty.o).bias, wanted.mean(0), atol=1e-5)


def test_every_site_is_verified_where_a_check_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that is wrong at the last site alone is noticed: each removal is compared with gates on its own."""
    entry = ZOO["bert"]
    model, batch = entry.build().eval(), entry.batch(0)
    sites = all_sites(model)
    order = list(calls_of_sites(model, sites, batch, task_of(model)))
    chosen = [sites[index].units()[0][0] for index in order]

    def slice_wrongly(model: Any, sites: Sequence[Site], members: Sequence[Member]) -> None:
        slice_weights(model, sites, members)
        if members[0].site == order[-1]:
            with torch.no_grad():
                model.get_submodule(sites[order[-1]].o).weight.mul_(1.5)

    monkeypatch.setattr("headprune.surgery.remove_units.slice_weights", slice_wrongly)
    with pytest.raises(EquivalenceError):
        remove_front_to_back(model, sites, chosen, [batch], task_of(model), "lstsq", batch)


class TwoBranches(torch.nn.Module):
    """An output map that runs twice, whose second output nothing reads, as in the last layer of LXMERT."""

    def __init__(self) -> None:
        super().__init__()
        self.o = torch.nn.Linear(4, 4)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        read = text + self.o(text)
        image + self.o(image)
        return read


def test_tokens_of_an_application_that_nothing_reads_have_no_weight() -> None:
    """The gradients that came belong to their own application, not to the last ones in order."""
    model = TwoBranches()
    site = dataclasses.replace(all_sites(ZOO["bert"].build())[0], path="", o="o")
    task = SimpleNamespace(site_tokens=lambda site, batch, tokens: None, rows=lambda batch: 1)
    recorder = TargetRecorder(task)  # type: ignore[arg-type]
    text, image = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)
    recorder.begin({"input_ids": torch.zeros(2, 3)})
    with recorder.watching(model, [site]):  # type: ignore[arg-type]
        model(text, image).sum().backward()
    recorder.end(0)
    (target,) = recorder.targets.values()
    assert target.applications == 2
    assert [len(part) for part in target.outputs] == [2 * 3 + 2 * 5]
    (squares,) = target.weights or ()
    assert squares.tolist() == [4.0] * 6 + [0.0] * 10  # four outputs with a gradient of 1 each
