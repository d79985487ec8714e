"""Runs that reach a budget in rounds: what they cost, where they end, and that they go on after a kill."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import ReplayError, ScheduleError
from headprune.measure.costs import flops, total_parameters
from headprune.measure.trajectory import Step
from headprune.search.config import PruneConfig
from headprune.search.observers import Journal
from headprune.search.pruner import Pruner
from headprune.search.stop import Stop
from headprune.units import all_sites
from zoo import ZOO


def data(name: str, labelled: bool = True) -> list[dict[str, torch.Tensor]]:
    batches = [ZOO[name].batch(seed) for seed in range(4)]
    if labelled:
        for number, batch in enumerate(batches):
            rows = len(next(iter(batch.values())))
            batch["labels"] = torch.arange(rows) % 3 if name in ("bert", "vit", "albert") else batch["input_ids"]
            batch["labels"] = (batch["labels"] + number) % 3 if name in ("bert", "vit", "albert") else batch["labels"]
    return batches


def whole(share: float, model: Any) -> float:
    """The share of the whole model that leaves this share of what may go."""
    sites = all_sites(model)
    counted = flops(model, sites)
    return (counted.total - (1 - share) * counted.units_total) / counted.total


@pytest.mark.parametrize("name", ["bert", "albert", "vit", "llama-gqa", "gpt2"])
def test_a_budget_of_flops_is_met_and_used(name: str) -> None:
    model = ZOO[name].build()
    dense = flops(model, all_sites(model)).total
    share = whole(0.6, model)
    result = headprune.prune(model, data(name), keep_flops=share, rounds=2, round_to=4)
    sites = all_sites(model)
    left = flops(model, sites).total
    assert left <= share * dense
    dearest = max(flops(ZOO[name].build(), all_sites(ZOO[name].build())).kinds["heads"] / 6, 1)
    assert left >= share * dense - dearest
    assert result.rule.startswith("keep_flops")
    assert all(site.size % 4 == 0 or site.size == site.original for site in sites if site.kind == "neurons")
    assert result.result.units == {kind: sum(s.size for s in sites if s.kind == kind) for kind in ("heads", "neurons")}


def test_budgets_of_parameters_memory_and_units() -> None:
    for options in ({"keep_parameters": 0.9}, {"keep_memory": 0.9}):
        model = ZOO["bert"].build()
        before = total_parameters(model)
        headprune.prune(model, data("bert"), rounds=2, round_to=2, **options)
        assert 0.85 * before <= total_parameters(model) <= 0.9 * before
    model = ZOO["bert"].build()
    result = headprune.prune(model, data("bert"), units="neurons", keep=0.5, rounds=2, round_to=2)
    assert result.result.units == {"neurons": 30}  # of three times twenty
    assert result.rule == "keep 0.5"


def test_a_whole_run_takes_few_passes() -> None:
    """Counted where the work is done: calls of every output map in forward passes, and gradients that reach it."""
    model = ZOO["bert"].build()
    batches = data("bert")
    sites = all_sites(model)
    calls = {"forward": 0, "backward": 0}

    def seen(module: Any, args: Any, output: Any) -> None:
        calls["forward"] += 1
        if output.requires_grad:
            output.register_hook(lambda g: calls.__setitem__("backward", calls["backward"] + 1))

    for site in sites:
        model.get_submodule(site.o).register_forward_hook(seen)
    config = PruneConfig(keep_flops=whole(0.5, model), rounds=6, round_to=4)
    pruner = Pruner(model, batches, config, evaluation=[])
    pruner._evaluator = _Nothing()  # type: ignore[assignment]
    for _ in pruner:
        pass
    each = len(sites) * len(batches)
    assert len(pruner.steps) == 7
    assert (calls["forward"] + 2 * calls["backward"]) / each <= 60


class _Nothing:
    """An evaluator that looks at nothing, so that only the passes of the calibration data are counted."""

    def __call__(self, model: Any, sites: Any, changed: Any) -> Any:
        from headprune.measure.predictions import Predictions
        from headprune.tasks import task_of

        predictions = Predictions(task_of(model))
        batch = data("bert")[0]
        with torch.no_grad():
            logits = torch.zeros(len(batch["labels"]), 3)
        predictions.add(batch, {"logits": logits}, logits)
        return predictions

    def forget(self) -> None:
        pass


class Kept(Journal):
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lines: list[dict[str, Any]] = []

    def step(self, step: Step, seconds: Any) -> None:
        self.lines.append(step.to_json())
        self.steps.append(Step.from_json(step.to_json()))


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_a_killed_run_goes_on_to_the_same_model(name: str) -> None:
    options = {"keep_flops": whole(0.5, ZOO[name].build()), "rounds": 3, "round_to": 4}
    model, journal = ZOO[name].build(), Kept()
    headprune.prune(model, data(name), run=journal, **options)
    for after in (1, 2):
        again, resumed = ZOO[name].build(), Kept()

        def stop(step: Step, after: int = after) -> None:
            if step.step == after:
                raise _KilledError

        with pytest.raises(_KilledError):
            headprune.prune(again, data(name), run=resumed, on_step=stop, **options)
        again = ZOO[name].build()
        headprune.prune(again, data(name), run=resumed, **options)
        assert resumed.lines == journal.lines
        for (key, one), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(one, other), key


def test_a_journal_of_other_data_is_refused() -> None:
    model, journal = ZOO["bert"].build(), Kept()
    headprune.prune(model, data("bert"), run=journal, keep_flops=whole(0.6, model), rounds=2)
    others = [{**ZOO["bert"].batch(seed + 50), "labels": torch.tensor([0, 1, 2])} for seed in range(4)]
    journal.steps = journal.steps[:2]
    with pytest.raises(ReplayError):
        headprune.prune(ZOO["bert"].build(), others, run=journal, keep_flops=whole(0.6, ZOO["bert"].build()), rounds=2)


def test_points_of_a_budget_are_told_when_the_model_is_there() -> None:
    model = ZOO["bert"].build()
    first, last = whole(0.8, model), whole(0.5, model)
    seen: dict[str, int] = {}
    result = headprune.prune(
        model,
        data("bert"),
        keep_flops=(first, last),
        rounds=3,
        round_to=2,
        at_point=lambda label: seen.update({label: flops(model, all_sites(model)).total}),
    )
    dense = flops(ZOO["bert"].build(), all_sites(ZOO["bert"].build())).total
    assert list(seen) == [f"flops-{first:.4g}", f"flops-{last:.4g}"]
    assert [total <= share * dense for total, share in zip(seen.values(), (first, last), strict=True)] == [True, True]
    assert list(result.points.values()) == list(seen)


def test_rounds_repair_towards_the_dense_model() -> None:
    """With repair the pruned model is nearer to the dense one than without, on the data it was made with."""
    dense = ZOO["bert"].build().eval()
    batches = data("bert")
    errors = {}
    for repair in ("none", "mean", "lstsq", "dense"):
        model = copy.deepcopy(dense)
        headprune.prune(
            model,
            batches,
            keep_flops=whole(0.5, model),
            rounds=2,
            round_to=4,
            repair=repair,  # type: ignore[arg-type]
        )
        errors[repair] = 0.0
        with torch.no_grad():
            for batch in batches:
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                errors[repair] += float((model(**inputs).logits - dense(**inputs).logits).square().sum())
    assert errors["dense"] < errors["lstsq"] < errors["none"]
    assert errors["mean"] < errors["none"]


def test_a_budget_that_cannot_be_met_is_refused_before_anything_goes() -> None:
    model = ZOO["bert"].build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ScheduleError, match="with nothing but the vocabulary left it would still be"):
        headprune.prune(model, data("bert"), keep_parameters=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_drop_of_the_metric_ends_rounds_too() -> None:
    """The model that comes back is that of the last round within the limit, not of the last round."""
    model = ZOO["llama-gqa"].build()
    options = {"keep_flops": whole(0.2, model), "rounds": 4, "round_to": 2}
    result = headprune.prune(model, data("llama-gqa"), metric="fidelity", max_drop=0.0, explore=True, **options)
    steps = result.trajectory
    curve = [step.metric for step in steps], [step.flops for step in steps], [step.per_sample for step in steps]
    assert len(steps) == 5
    assert result.stopped_at == Stop(None, 0.0, False).decide(result.metric, *curve).step
    assert result.stopped_at < 4, "the metric never fell, so that this shows nothing"
    sites = all_sites(model)
    left = {kind: sum(site.size for site in sites if site.kind == kind) for kind in ("heads", "neurons")}
    assert left == steps[result.stopped_at].units


def test_without_a_budget_a_run_goes_as_far_as_it_can() -> None:
    """Most of this model is its vocabulary head, so a tenth of its FLOPs cannot be reached; it ends where it must."""
    model = ZOO["llama-gqa"].build()
    result = headprune.prune(model, data("llama-gqa"), units="heads,neurons", rounds=2, round_to=2)
    sites = all_sites(model)
    assert len(result.trajectory) == 3
    assert sum(site.size for site in sites) < 0.2 * sum(site.original for site in sites)


def test_experts_are_pruned_and_left_without_repair() -> None:
    """Tokens of an expert are others in every model, so its outputs cannot be compared with those of the dense one."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=61,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=2,
        decoder_start_token_id=0,
    )
    model = SwitchTransformersForConditionalGeneration(config).eval()
    batches = [{**ZOO["t5"].batch(seed), "labels": ZOO["t5"].batch(seed)["decoder_input_ids"]} for seed in range(2)]
    before = sum(site.size for site in all_sites(model))
    result = headprune.prune(model, batches, keep_flops=0.9, rounds=1, round_to=2)
    assert sum(site.size for site in all_sites(model)) < before
    kinds = {repair["site"]: repair["kind"] for repair in result.trajectory[1].repairs}
    experts = [site.index for site in all_sites(model) if "expert_" in site.path]
    assert experts
    assert all(kinds.get(index, "none") == "none" for index in experts)
    assert "dense" in kinds.values()
