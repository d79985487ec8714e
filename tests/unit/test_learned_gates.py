"""Gates that learn: on the model, with a weight or a target, until what is closed leaves the weights."""

from __future__ import annotations

import copy
import dataclasses
import math

import peft
import pytest
import torch

import headprune
from headprune.errors import EquivalenceError, GateError, ScheduleError
from headprune.measure.costs import flops, total_parameters
from headprune.training.gate_config import SETTINGS
from headprune.training.learned_gates import NAME
from headprune.units import all_sites
from helpers import difference, gated_outputs, hook_count, identical, outputs
from score_helpers import labelled
from zoo import ZOO


def gates_of(name: str = "bert", **options):
    model = ZOO[name].build()
    return model, headprune.LearnedGates(model, **{"l0": 0.02, "warmup": 0.0, **options})


def set_biases(gates, mean: float = 0.0) -> None:
    """Some open, some closed, whichever family."""
    with torch.no_grad():
        gates.bias.copy_(mean + 3 * torch.randn(len(gates), generator=torch.Generator().manual_seed(0)))


# --- what is installed ---


def test_gates_are_a_part_of_the_model() -> None:
    model, gates = gates_of()
    assert f"{NAME}.bias" in dict(model.named_parameters())
    assert f"{NAME}.bias" in model.state_dict()
    assert len(gates) == sum(site.size for site in headprune.resolve(model)) == 12
    model.train()
    assert gates.training
    model.eval()
    assert not gates.training
    with pytest.raises(GateError, match="already"):
        headprune.LearnedGates(model, l0=0.1)
    gates.detach()
    assert hook_count(model) == 0
    assert NAME not in dict(model.named_modules())


def test_defaults_are_those_of_the_paper() -> None:
    config = headprune.GateConfig(l0=0.02)
    assert (config.beta, config.gamma, config.zeta, config.start) == (1 / 3, -0.1, 1.1, 2.0)
    assert config.straight_through
    assert config.rescale
    assert config.rate == 10
    for setting, values in SETTINGS.items():
        actual = headprune.GateConfig(l0=0.02, setting=setting)
        assert {name: getattr(actual, name) for name in values} == values
    # What is said counts, also where it is the other paper's.
    mixed = headprune.GateConfig(l0=0.02, setting="voita", **SETTINGS["shim"])
    assert {name: getattr(mixed, name) for name in SETTINGS["shim"]} == SETTINGS["shim"]


def test_the_group_of_gates_has_ten_times_the_learning_rate_and_no_decay() -> None:
    model, gates = gates_of()
    own, others = gates.parameter_groups(2e-4, weight_decay=0.1)[::-1]
    assert own["params"] == [gates.bias]
    assert own["lr"] == pytest.approx(2e-3)
    assert own["weight_decay"] == 0.0
    assert others["lr"] == 2e-4
    assert others["weight_decay"] == 0.1
    assert len(others["params"]) + 1 == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(gates.parameter_groups(2e-4))
    before = gates.bias.detach().clone()
    model.train()
    (model(**labelled(ZOO["bert"], 0)).loss + gates.loss()).backward()
    optimizer.step()
    moved = (gates.bias.detach() - before).abs()
    # Adam's first step is its learning rate, whatever the gradient, where it is far above eps = 1e-8.
    assert float(moved.max()) == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_drawn_gates_multiply_the_outputs_of_members(name: str) -> None:
    """The oracle: the values that the noise gives, one by one, through `gated`."""
    model, gates = gates_of(name)
    batch, sites = ZOO[name].batch(0), headprune.resolve(model)
    set_biases(gates)
    gates.train()  # and not the model, whose dropout would draw as well
    torch.manual_seed(3)
    actual = {"logits": model(**batch).logits.detach()}
    table = torch.ones(len(sites), max(site.original for site in sites))
    at = 0
    for site in sites:
        opened = []
        for unit in site.units():
            u, alpha = float(gates.noise[at]), gates.bias[at].item()
            s = 1 / (1 + math.exp(-(math.log(u / (1 - u)) + alpha) * 3))
            opened.append(s * 1.2 - 0.1 > 0.5)
            at += 1
            for member in unit:
                table[site.index, member.index] = float(opened[-1])
        if any(opened):  # heads / open heads
            table[site.index] *= len(opened) / sum(opened)
    gates.detach()
    assert 0 < table.count_nonzero() < table.numel()
    assert difference(actual, {"logits": gated_outputs(model, batch, table)["logits"]}) < 1e-5


def test_every_forward_draws_and_the_same_seed_draws_the_same() -> None:
    model, gates = gates_of()
    batch = ZOO["bert"].batch(0)
    gates.train()
    with torch.no_grad():
        gates.bias.zero_()
    torch.manual_seed(0)
    first, second = model(**batch), model(**batch)
    torch.manual_seed(0)
    assert identical(first, model(**batch))
    assert not identical(first, second)
    kept = gates.noise
    outputs(model, batch)  # without gradients: what was drawn may be needed to compute layers again
    assert gates.noise is kept


def test_a_tied_site_has_one_gate_in_all_its_applications() -> None:
    model, gates = gates_of("albert")
    site = headprune.resolve(model)[0]
    assert site.applications > 1
    assert len(gates) == site.size
    seen = []
    model.get_submodule(site.o).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        gates.bias.zero_()
    model.train()
    outputs(model, ZOO["albert"].batch(0))
    closed = [(site.split(columns).abs().amax(dim=(0, 1, 3)) == 0).tolist() for columns in seen]
    assert len(closed) == site.applications
    assert all(row == closed[0] for row in closed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_draws_what_the_forward_drew(reentrant: bool) -> None:
    actual = []
    for checkpointing in (False, True):
        model, gates = gates_of(l0=0.1)
        model.double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(5)
        batch = labelled(ZOO["bert"], 0)
        torch.manual_seed(1)
        (model(**batch).loss + gates.loss()).backward()
        actual.append(gates.bias.grad.clone())
    assert actual[0].count_nonzero() == len(actual[0])
    # Gates are float32 beside a model in float64: the same sums, perhaps in another order.
    assert torch.allclose(*actual, rtol=1e-5, atol=1e-7)


def test_bfloat16_autocast_keeps_gates_in_float32() -> None:
    model, gates = gates_of()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**labelled(ZOO["bert"], 0)).loss + gates.loss()
    loss.backward()
    assert gates.bias.dtype == gates.bias.grad.dtype == torch.float32
    assert gates.bias.grad.abs().sum() > 0


def test_two_passes_before_gradients_cannot_be_computed_again() -> None:
    """A layer that is computed again would see the gates of the second pass."""
    model, gates = gates_of()
    batch = labelled(ZOO["bert"], 0)
    model.train()
    for _ in range(2):  # one at a time, again and again, is what training is
        model(**batch).loss.backward()
    (model(**batch).loss + model(**batch).loss).backward()  # nothing is computed again here
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        model(**batch).loss.backward()
    losses = model(**batch).loss + model(**batch).loss
    with pytest.raises(GateError, match="turn gradient checkpointing off"):
        losses.backward()
    assert gates.bias.grad is not None


def test_a_recomputed_layer_sees_the_target_of_its_forward_pass() -> None:
    """`loss` counts a step before gradients come, and with it the target moves on."""
    actual = []
    for checkpointing in (False, True):
        model, gates = gates_of(l0=None, keep=0.5, warmup=1.0, steps=4, straight_through=False, rescale=False)
        model.double()
        gates.train()
        gates.taken.fill_(1)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():  # which transformers asks for, and dropout would draw
                module.training |= hasattr(module, "gradient_checkpointing")
        torch.manual_seed(1)
        loss = model(**labelled(ZOO["bert"], 0)).loss
        (loss + gates.loss()).backward()
        actual.append(gates.bias.grad.clone())
    assert torch.allclose(*actual, rtol=1e-5, atol=1e-7)


def test_a_copy_of_a_model_has_gates_of_its_own() -> None:
    model, gates = gates_of()
    batch = ZOO["bert"].batch(0)
    dense = outputs(model, batch)
    copied = copy.deepcopy(model)
    own = getattr(copied, NAME)
    with torch.no_grad():
        own.bias[:5] = -3.0
    assert identical(outputs(model, batch), dense)
    assert not identical(outputs(copied, batch), dense)
    own.remove(verify=batch)
    assert sum(site.size for site in headprune.resolve(copied)) == 7
    assert sum(site.size for site in headprune.resolve(model)) == 12
    assert gates.attached


def test_gates_stay_in_float32_wherever_the_model_goes() -> None:
    model, gates = gates_of(difference=0.1)
    with torch.no_grad():
        gates.bias += 1e-4
    before = gates.bias.detach().clone()
    model.to(torch.bfloat16)
    assert gates.bias.dtype == gates.costs.dtype == torch.float32
    assert torch.equal(gates.bias, before)
    model.train()
    (model(**labelled(ZOO["bert"], 0)).loss + gates.loss()).backward()
    assert gates.bias.grad.dtype == torch.float32


def test_frozen_gates_are_said() -> None:
    model, gates = gates_of()
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(GateError, match="frozen"):
        gates.loss()


def test_surgery_waits_for_the_gates_to_end() -> None:
    model, gates = gates_of()
    with pytest.raises(GateError, match="remove"):
        headprune.remove(model, [(0, 0)])
    gates.detach()
    with pytest.raises(GateError, match="not on their model"):
        gates.remove()
    headprune.remove(model, [(0, 0)])


# --- the loss of gates ---


def test_the_weight_of_l0_warms_up_from_nothing() -> None:
    model, gates = gates_of(l0=0.3, warmup=0.5, steps=8)
    model.train()
    actual = [float(gates.loss()) for _ in range(8)]
    whole = 0.3 * 12 / (1 + math.exp(-(2 + math.log(11) / 3)))
    assert actual == pytest.approx([whole * min(1.0, step / 4) for step in range(8)], rel=1e-6)
    gates.total = None
    with pytest.raises(GateError, match="how long"):
        gates.loss()


def test_evaluation_does_not_count_as_a_step() -> None:
    model, gates = gates_of(l0=0.3, warmup=0.5, steps=8)
    model.eval()
    gates.loss()
    assert int(gates.taken) == 0


@pytest.mark.parametrize("straight", [True, False])
def test_a_target_is_met_in_expectation_at_every_step(straight: bool) -> None:
    model, gates = gates_of(
        "bert", l0=None, keep=0.5, warmup=0.5, steps=10, straight_through=straight, start=2.0, rescale=False
    )
    model.train()
    set_biases(gates)
    for step in range(10):
        allowed = 12 * (1 - 0.5 * min(1.0, step / 5))
        unshifted = torch.sigmoid(gates.bias + (0.0 if straight else math.log(11) / 3)).sum()
        expected = min(allowed, float(unshifted))
        assert float(gates.open_probability().sum()) == pytest.approx(expected, rel=1e-5)
        gates.loss()
    assert int(gates.open().sum()) == 6
    best = gates.bias.argsort(descending=True)[:6]
    assert sorted(best.tolist()) == gates.open().nonzero().flatten().tolist()


def test_the_price_of_a_target_is_what_open_gates_do_for_the_task() -> None:
    """At the optimum a gate gains what it costs: dL/dP = -price x multiplier, so the multiplier is their ratio."""
    model, gates = gates_of("bert", l0=None, keep=4)
    gates.train()
    assert float(gates.loss()) == 0.0  # nothing is known yet
    torch.manual_seed(0)
    model(**labelled(ZOO["bert"], 0)).loss.backward()
    gradient = gates.bias.grad.clone()
    gates.bias.grad = None
    probability = gates.open_probability().detach()
    slopes = probability * (1 - probability)
    expected = -float(gradient.sum()) / (float(slopes.sum()) * (1 + 0.95))  # of two steps, one of which saw nothing
    loss = gates.loss()
    assert gates.multiplier == pytest.approx(max(expected, 0.0), rel=1e-4)
    assert loss.item() == pytest.approx(4 * gates.multiplier, rel=1e-4)
    gates.learn_price(torch.full((12,), -1.0))
    gates.loss().backward()
    # Every gate pays the same for being as open as it is, in the direction of closing.
    assert gates.bias.grad == pytest.approx(gates.multiplier * slopes, rel=1e-4)
    assert gates.multiplier > 0


@pytest.mark.parametrize("parts", [1, 4])
def test_the_price_knows_how_losses_are_scaled(parts: int) -> None:
    """Batches that are accumulated with a share of their loss each, and all of it at once, have the same price."""
    model, gates = gates_of("bert", l0=None, keep=4)
    gates.train()
    for _ in range(3):
        for _ in range(parts):
            torch.manual_seed(0)
            loss = model(**labelled(ZOO["bert"], 0)).loss
            ((loss + gates.loss()) / parts).backward()
    gates.bias.grad = None
    gates.learn_price(torch.full((12,), -1.0))
    one, other = gates_of("bert", l0=None, keep=4)
    other.train()
    torch.manual_seed(0)
    one(**labelled(ZOO["bert"], 0)).loss.backward()
    slopes = gates.target.slopes(gates.open_probability().detach()).sum()
    # The last of them, and the older ones as they fade, all see the same gradient.
    seen = -float(other.bias.grad.sum())
    done = taken = 0.0
    for step in range(3 * parts):
        done, taken = 0.95 * done + (seen if step else 0.0), 0.95 * taken + float(slopes)
    done, taken = 0.95 * done + 12.0, 0.95 * taken + float(slopes)
    assert gates.worth.tolist() == pytest.approx([done, taken], rel=1e-4)


def test_a_target_counts_though_the_training_ended_in_its_warmup() -> None:
    model, gates = gates_of("bert", l0=None, keep=0.25, warmup=0.5, steps=100)
    set_biases(gates)
    gates.train()
    for _ in range(10):
        gates.loss()
    model.eval()
    assert int(gates.open().sum()) > 3
    assert len(gates.closed()) == 9
    gates.remove(verify=ZOO["bert"].batch(0))
    assert sum(site.size for site in headprune.resolve(model)) == 3


def test_evaluation_before_the_training_has_all_gates_open() -> None:
    model, gates = gates_of("bert", l0=None, keep=0.5, warmup=0.5)
    assert gates.open().all()
    batch = ZOO["bert"].batch(0)
    assert identical(outputs(model, batch), outputs(ZOO["bert"].build(), batch))


def test_fewer_units_than_have_to_stay_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def obstructed(model, kinds):
        first, *others = headprune.resolve(model)
        return [first, *(dataclasses.replace(site, obstacle="it is made so") for site in others)]

    monkeypatch.setattr("headprune.training.learned_gates.sites_of", obstructed)
    with pytest.raises(ScheduleError, match="8 units of this model have to stay, so 6 cannot be kept"):
        gates_of("bert", l0=None, keep=0.5)
    assert len(gates_of("bert", l0=None, keep=0.75)[1]) == 4


def test_the_change_without_a_unit_counts_what_an_adapter_adds() -> None:
    model = ZOO["bert"].build()
    site = headprune.resolve(model)[0]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["dense"], lora_dropout=0.0))
    layer = model.get_submodule(site.o)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    gates = headprune.LearnedGates(wrapped, l0=0.1, warmup=0.0, difference=1.0).train()
    columns = []
    layer.register_forward_pre_hook(lambda module, args: columns.append(args[0].detach()), prepend=True)
    batch = ZOO["bert"].batch(0)
    wrapped(**batch)
    gates.loss()
    real = columns[0][batch["attention_mask"].bool()].double()
    whole = (layer.base_layer.weight + layer.get_delta_weight("default")).detach().double()
    parts = [(real[:, own] @ whole[:, own].T).square().sum() for own in (site.columns([head]) for head in range(4))]
    expected = [float(part / (real @ whole.T).square().sum()) for part in parts]
    assert gates.costs[:4].tolist() == pytest.approx(expected, rel=1e-4)


def test_a_soft_gate_that_a_target_keeps_is_not_silent() -> None:
    model, gates = gates_of("bert", l0=None, keep=2, setting="voita")
    gates.remove(verify=ZOO["bert"].batch(0))
    (site,) = (site for site in headprune.resolve(model) if site.kept)
    assert model.get_submodule(site.o).weight.abs().max() > 1e-2


def test_what_the_model_saw_last_is_compared_where_no_batch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gates = gates_of()
    set_biases(gates)
    model(**labelled(ZOO["bert"], 0))
    monkeypatch.setattr("headprune.training.gate_removal._fold", lambda *parts: None)
    with pytest.raises(EquivalenceError):
        gates.remove()


@pytest.mark.parametrize("measure", ["keep_parameters", "keep_flops"])
@pytest.mark.parametrize("units", ["heads", "heads,neurons"])
def test_a_budget_is_met_by_what_is_removed(measure: str, units: str) -> None:
    entry = ZOO["bert"]
    dense = entry.build()
    share = 0.8 if units == "heads" else 0.7

    def cost(model) -> int:
        return total_parameters(model) if measure == "keep_parameters" else flops(model, all_sites(model)).total

    model, gates = gates_of("bert", l0=None, units=units, group=4, **{measure: share})
    set_biases(gates, mean=4.0)
    expected = gates.target.rest + float((gates.target.each * gates.open_probability().detach().double()).sum())
    assert expected == pytest.approx(share * cost(dense), rel=1e-6)
    largest = float(gates.target.each.max())
    gates.remove(verify=entry.batch(0))
    assert share * cost(dense) - largest <= cost(model) <= share * cost(dense)
    if "neurons" in units:
        assert any(site.size < site.original for site in all_sites(model) if site.kind == "neurons")


def test_units_of_little_change_close_first() -> None:
    """With no loss but the squared change of outputs, gates follow what each head adds."""
    entry = ZOO["bert"]
    model, gates = gates_of("bert", l0=0.0, difference=1.0)
    site = headprune.resolve(model)[0]
    with torch.no_grad():
        weight = model.get_submodule(site.o).weight
        for head in range(4):
            weight[:, site.columns([head])] *= (1.0, 0.01, 2.0, 0.1)[head]
    columns = []
    model.get_submodule(site.o).register_forward_pre_hook(lambda m, args: columns.append(args[0]), prepend=True)
    model.train()
    batch = entry.batch(0)
    model(**batch)
    real = columns[0][batch["attention_mask"].bool()].double()
    own = [real[:, site.columns([head])] @ weight[:, site.columns([head])].double().T for head in range(4)]
    whole = (real @ weight.double().T).square().sum()
    expected = [float(part.square().sum() / whole) for part in own]
    gates.loss().backward()
    assert gates.costs[:4].tolist() == pytest.approx(expected, rel=1e-4)
    slopes = gates.bias.grad[:4]
    assert slopes.argsort(descending=True).tolist() == [1, 3, 0, 2]
    assert (slopes < 0).all()  # absence costs, so every gate is asked to open, the one that matters most


# --- the end ---


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama-gqa", "t5"])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_removing_gives_what_the_closed_gates_gave(name: str, setting: str) -> None:
    batch = ZOO[name].batch(0)
    dense = outputs(ZOO[name].build(), batch)
    model, gates = gates_of(name, setting=setting)
    set_biases(gates)
    expected, closed = outputs(model, batch), gates.closed()
    assert closed
    assert difference(dense, expected) > 1e-3
    assert gates.remove(verify=batch) is model
    assert hook_count(model) == 0
    assert difference(outputs(model, batch), expected) < 1e-5
    gone = {(site.index, head) for site in headprune.resolve(model) for head in site.removed}
    assert gone == {tuple(member) for member in closed}


def test_all_gates_may_close_where_a_site_may_be_emptied() -> None:
    model, gates = gates_of()
    with torch.no_grad():
        gates.bias.fill_(-5.0)
    gates.remove(verify=ZOO["bert"].batch(0))
    assert all(site.size == 0 for site in headprune.resolve(model))


@pytest.mark.parametrize("options", [{"l0": 0.1}, {"l0": None, "keep": 0}])
def test_a_site_that_must_not_be_emptied_keeps_its_best_unit(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(headprune.resolve(ZOO["bert"].build())[0]), "obstacle_to_emptying", "it must not")
    _, gates = gates_of("bert", **options)
    with torch.no_grad():
        gates.bias.copy_(torch.linspace(-6, -5, 12))
    assert gates.open().nonzero().flatten().tolist() == [3, 7, 11]


def test_a_removal_that_is_wrong_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gates = gates_of()
    batch = ZOO["bert"].batch(0)
    set_biases(gates)
    before, names = outputs(model, batch), set(model.state_dict())
    monkeypatch.setattr("headprune.training.gate_removal._fold", lambda *parts: None)
    with pytest.raises(EquivalenceError):
        gates.remove(verify=batch)
    assert set(model.state_dict()) == names
    assert identical(outputs(model, batch), before)
    monkeypatch.undo()
    gates.remove(verify=batch)


def test_what_is_saved_loads_without_gates(tmp_path) -> None:
    model, gates = gates_of()
    batch = ZOO["bert"].batch(0)
    set_biases(gates)
    with pytest.raises(headprune.HeadpruneError, match="gates"):
        headprune.save(model, tmp_path / "model")
    gates.remove(verify=batch)
    headprune.save(model, tmp_path / "model")
    assert identical(outputs(headprune.load(tmp_path / "model"), batch), outputs(model, batch))


def test_gates_on_a_pruned_model_keep_original_ids() -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    gates = headprune.LearnedGates(model, l0=0.1, warmup=0.0)
    assert len(gates) == 7
    with torch.no_grad():
        gates.bias[1] = -3.0  # of the heads 0, 2 and 3 that site 0 has
    assert gates.closed() == [(0, 2)]
    gates.remove(verify=ZOO["bert"].batch(0))
    assert headprune.resolve(model)[0].kept == (0, 3)


# --- learning ---


def test_training_closes_heads_that_do_not_matter() -> None:
    """Two heads of the first layer add nothing: a weight of L0 closes them, and they are not of the half that stays."""
    for options in ({"l0": 0.05}, {"l0": None, "keep": 0.5}):
        model = ZOO["bert"].build().requires_grad_(False)
        site = headprune.resolve(model)[0]
        with torch.no_grad():
            model.get_submodule(site.o).weight[:, site.columns([1, 3])] = 0.0
        batch = ZOO["bert"].batch(0)
        dense = outputs(model, batch)["logits"]
        gates = headprune.LearnedGates(model, warmup=0.0, rescale=False, **options).train()
        optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(150):
            optimizer.zero_grad()
            change = (model(**batch).logits - dense).square().sum()
            (100 * change + gates.loss()).backward()
            optimizer.step()
        assert {(0, 1), (0, 3)} <= {tuple(member) for member in gates.closed()}
        assert len(gates.closed()) <= 6


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of l0, keep"),
        ({"l0": 0.1, "keep": 0.5}, "keep and l0"),
        ({"l0": -1.0}, "negative"),
        ({"l0": 0.1, "setting": "other"}, "shim, voita"),
        ({"l0": 0.1, "warmup": 2.0}, "between 0 and 1"),
        ({"l0": 0.1, "rate": 0.0}, "above 0"),
        ({"l0": 0.1, "beta": -1.0}, "beta"),
        ({"l0": 0.1, "difference": -1.0}, "negative"),
        ({"keep": 1.5}, "between 0 and 1"),
        ({"keep": 0.5, "units": "heads,neurons"}, "one kind"),
        ({"keep_flops": 2.0}, "between 0 and 1"),
        ({"keep": 99}, "has 12 heads"),
        ({"keep_parameters": 0.01}, "budget"),
        ({"l0": float("inf")}, "finite"),
        ({"l0": 0.1, "start": float("nan")}, "finite"),
        ({"l0": 0.1, "zeta": float("inf")}, "finite"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    model = ZOO["bert"].build()
    with pytest.raises((GateError, ScheduleError), match=message):
        headprune.LearnedGates(model, **options)
    assert hook_count(model) == 0
