"""Compensation in whole models of every family: what the new weights do to the tokens, and loops that use it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.repair.regression import Repair
from headprune.repair.remove import remove_from_sites
from headprune.run_folder import Run
from headprune.units import Head, Site
from headprune.units.linear import is_transposed
from helpers import SAME_CODE, difference, families, identical, kept_heads, outputs
from score_helpers import labelled
from zoo import ZOO, Entry

Batch = dict[str, torch.Tensor]


def batches_of(entry: Entry, count: int = 2) -> list[Batch]:
    return [labelled(entry, seed) for seed in range(count)]


def tokens_at(model: Any, sites: list[Site], batches: list[Batch]) -> list[torch.Tensor]:
    """What the heads of each site give at every real token, application after application, in float64."""
    actual: list[list[torch.Tensor]] = [[] for _ in sites]
    for batch in batches:
        seen: list[list[torch.Tensor]] = [[] for _ in sites]
        handles = [
            model.get_submodule(site.o).register_forward_pre_hook(lambda _, args, own=own: own.append(args[0]))
            for site, own in zip(sites, seen, strict=True)
        ]
        with torch.no_grad():
            model(**{name: value for name, value in batch.items() if name != "labels"})
        for handle in handles:
            handle.remove()
        for site, own, kept in zip(sites, seen, actual, strict=True):
            for outputs_ in own:
                flat = outputs_.flatten(0, -2).double()
                name = "decoder_attention_mask" if site.stack == "decoder" and "decoder_input_ids" in batch else ""
                mask = batch.get(name or "attention_mask")
                if site.stack != "vision" and mask is not None and mask.numel() == len(flat):
                    flat = flat[mask.flatten().bool()]
                kept.append(flat)
    return [torch.cat(parts) for parts in actual]


def output_of(model: Any, site: Site, tokens: torch.Tensor) -> torch.Tensor:
    """The output projection as it is in the model now, on these head outputs, by its numbers alone."""
    module = model.get_submodule(site.o)
    weight = module.weight.detach().double()
    answer = tokens @ (weight if is_transposed(module) else weight.t())
    return answer if module.bias is None else answer + module.bias.detach().double()


def some_unit(site: Site) -> list[Head]:
    return list(site.units()[-1])


def repairable(model: Any) -> list[Site]:
    """The sites that keep something when a unit goes."""
    return [site for site in headprune.resolve(model) if not site.obstacle and len(site.units()) > 1]


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_every_site_of_every_family_comes_nearer_to_what_it_was(entry: Entry) -> None:
    """The errors that a repair claims are those that its weights make on the tokens, and smaller than without it."""
    dense, batches = entry.build(), batches_of(entry)
    sites = repairable(dense)
    for site, tokens in zip(sites, tokens_at(dense, sites, batches), strict=True):
        before = output_of(dense, site, tokens)
        gone = some_unit(site)
        columns = [
            position * site.head_dim + column
            for position, head in enumerate(site.kept)
            if (site.index, head) not in gone
            for column in range(site.head_dim)
        ]
        removed = headprune.remove(copy.deepcopy(dense), gone)
        without = (before - output_of(removed, site, tokens[:, columns])).square().sum(1).mean().item()
        plain = dict(removed.named_parameters())
        has_bias = dense.get_submodule(site.o).bias is not None
        kinds: dict[Any, str] = {"lstsq": "lstsq", "mean": "mean" if has_bias else "none"}
        for word, kind in kinds.items():
            model = copy.deepcopy(dense)
            [repair] = remove_from_sites(model, headprune.resolve(model), gone, repair=word, batches=batches)
            after = (before - output_of(model, site, tokens[:, columns])).square().sum(1).mean().item()
            assert repair.kind == kind
            assert repair.error_without == pytest.approx(without, rel=1e-4)
            assert repair.error == pytest.approx(after, rel=1e-4, abs=1e-5 * without)
            assert after <= without * (1 + 1e-6)
            if word == "lstsq":
                assert after < 0.999 * without
            others = {name: value for name, value in model.named_parameters() if not name.startswith(site.o)}
            assert all(torch.equal(value, plain[name]) for name, value in others.items())


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_masked_is_removed_before_anything_is_compensated(entry: Entry) -> None:
    """The surgery is verified on its own, at all sites at once, and whole sites that go keep at most a bias."""
    model, batches = entry.build(), batches_of(entry)
    sites = [site for site in headprune.resolve(model) if not site.obstacle]
    gone = [head for site in sites for head in some_unit(site)]
    batch = {name: value for name, value in batches[0].items() if name != "labels"}
    plain = headprune.remove(copy.deepcopy(model), gone, verify=batch)
    repairs = remove_from_sites(model, headprune.resolve(model), gone, verify=batch, repair="lstsq", batches=batches)
    assert [repair.site for repair in repairs] == [site.index for site in sites]
    assert all(isinstance(repair, Repair) and repair.error <= repair.error_without for repair in repairs)
    assert kept_heads(model) == kept_heads(plain)
    assert all(torch.isfinite(value).all() for value in outputs(model, batch).values())


def duplicated(model: Any, site: Site) -> list[tuple[int, int]]:
    """Give the last unit of a site the weights of its first, so that their outputs are the same; the last unit."""
    units = site.units()
    first, last = 0, len(units) - 1
    with torch.no_grad():
        for axis in site.axes:
            if axis.module != site.o:
                entries = model.get_parameter(axis.tensor).movedim(axis.dim, 0)
                entries[axis.indices([last])] = entries[axis.indices([first])]
    return [tuple(head) for head in units[-1]]


@pytest.mark.parametrize(
    "entry", families(without=(*SAME_CODE, "t5", "mpnet", "bloom"))
)  # position biases of each head
def test_a_head_that_others_can_express_leaves_no_trace(entry: Entry) -> None:
    model = entry.build()
    batches = batches_of(entry, 12)
    site = repairable(model)[-1] if repairable(model) else None
    if site is None:
        pytest.skip("one unit per site: there are no others")
    gone = duplicated(model, site)
    dense = copy.deepcopy(model)
    headprune.remove(model, gone, repair="lstsq", batches=batches)
    plain = headprune.remove(copy.deepcopy(dense), gone)
    for batch in (batches[0], labelled(entry, 99)):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        before = outputs(dense, inputs)
        assert difference(before, outputs(model, inputs)) <= 1e-4
        assert difference(before, outputs(plain, inputs)) > 1e-3


# --- loops ---

LOOPS = ("bert", "albert", "llama-gqa", "gpt2", "bart")


def by_hand(name: str, batches: list[Batch], steps: int, word: Any) -> tuple[Any, list[list[tuple[int, int]]]]:
    """Score, take the lowest unit, remove it with compensation, again."""
    model = ZOO[name].build()
    order = []
    for _ in range(steps):
        scores = headprune.score(model, batches, criterion="residual-gradient").scores
        units = [unit for site in headprune.resolve(model) for unit in site.units()]
        lowest = min(units, key=lambda unit: sum(float(scores[head]) for head in unit) / len(unit))
        order.append([tuple(head) for head in lowest])
        headprune.remove(model, lowest, repair=word, batches=batches)
    return model, order


@pytest.mark.parametrize("word", ["lstsq", "mean"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_greedy_run_compensates_after_every_removal(name: str, word: Any) -> None:
    if (name, word) == ("llama-gqa", "mean"):
        pytest.skip("no bias that a mean could go into: refused")
    batches = batches_of(ZOO[name])
    model, order = by_hand(name, batches, 4, word)
    result = headprune.prune(
        ZOO[name].build(),
        batches,
        repair=word,
        rescore="every",
        keep=sum(len(kept) for kept in kept_heads(model)),
        evaluation=batches_of(ZOO[name], 3)[2:],
    )
    assert [[tuple(head) for head in step.removed] for step in result.trajectory[1:]] == order
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), model.parameters(), strict=True))
    assert [len(step.repairs) for step in result.trajectory] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "rule",
    [{"max_drop": 0.3}, {"knee": True, "criterion": "inverse:residual-gradient"}, {"keep": 7, "explore": True}],
    ids=str,
)
def test_the_model_of_an_earlier_step_has_the_repairs_of_that_step(rule: dict[str, Any]) -> None:
    entry = ZOO["bert"]
    batches, held_out = batches_of(entry), batches_of(entry, 9)[2:]
    dense = entry.build()
    logits = torch.cat([outputs(dense, batch)["logits"] for batch in held_out])
    with torch.no_grad():
        dense.classifier.bias -= logits.mean(0)  # it does not always say the same
    for batch in held_out:  # and is always right
        batch["labels"] = outputs(dense, batch)["logits"].argmax(-1)
    far = headprune.prune(copy.deepcopy(dense), batches, evaluation=held_out, **rule)
    assert 0 < far.stopped_at < len(far.trajectory) - 1
    criterion = rule.get("criterion", "residual-gradient")
    near = headprune.prune(
        copy.deepcopy(dense), batches, keep=far.result.heads, evaluation=held_out, criterion=criterion
    )
    assert near.trajectory[-1].metric == far.result.metric
    assert identical(outputs(near.model, held_out[0]), outputs(far.model, held_out[0]))


@pytest.mark.parametrize("held_out", [True, False])
def test_a_resumed_run_is_the_same_byte_for_byte(tmp_path: Path, held_out: bool) -> None:
    entry = ZOO["bert"]
    evaluation = batches_of(entry, 4)[2:] if held_out else None

    class StoppedError(BaseException):
        pass

    def go(folder: Path, stop: int | None = None) -> Any:
        def stop_there(step: Any) -> None:
            if step.step == stop:
                raise StoppedError

        with Run(folder, {"repair": "lstsq"}) as run:
            return headprune.prune(
                entry.build(), batches_of(entry), evaluation=evaluation, run=run, on_step=stop_there, rescore="every"
            ).model

    whole = go(tmp_path / "whole")
    for stop in (1, 4, 11):
        cut = tmp_path / f"cut-{stop}"
        with pytest.raises(StoppedError):
            go(cut, stop)
        resumed = go(cut)
        assert (cut / "steps.jsonl").read_bytes() == (tmp_path / "whole" / "steps.jsonl").read_bytes()
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("entry", families(having=("conv1d", "gqa", "cross", "tied")))
def test_a_repaired_model_is_the_same_after_loading(entry: Entry, tmp_path: Path) -> None:
    model, batches = entry.build(), batches_of(entry)
    gone = [head for site in repairable(model)[:1] for head in some_unit(site)]
    headprune.remove(model, gone, repair="lstsq", batches=batches)
    headprune.save(model, tmp_path / "model")
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    assert identical(outputs(headprune.load(tmp_path / "model"), inputs), outputs(model, inputs))


def test_a_removal_that_fails_takes_no_repair_with_it() -> None:
    """Undone means undone: the bias that a repair would change is the one that was there."""
    entry = ZOO["bert"]
    model, batches = entry.build(), batches_of(entry)
    before = copy.deepcopy(model.state_dict())
    broken = {**batches[0], "input_ids": batches[0]["input_ids"] * 0}

    def fail(module: Any, args: Any, inputs: Any) -> None:
        if not inputs["input_ids"].any():
            raise MemoryError

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(MemoryError):
        headprune.remove(model, [(0, 0)], repair="lstsq", batches=[*batches, broken])
    handle.remove()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
