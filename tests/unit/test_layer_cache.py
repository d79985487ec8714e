"""Layers that remember: never a stale output, whatever runs when, against the same model without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headprune
from headprune.hooks.layer_cache import LayerCache
from headprune.hooks.module_paths import layer_path
from headprune.measure.evaluator import Evaluator
from helpers import all_units, identical, outputs
from run_helpers import counted_calls
from zoo import CLIP_TOWER, VOCAB, ZOO, image_batch, spread, text_batch

ROOM = 1 << 30


def kosmos2() -> Any:
    """Its text model is declared before its vision model, and runs after it."""
    config = transformers.Kosmos2Config(
        text_config={
            "vocab_size": VOCAB,
            "max_position_embeddings": 40,
            "embed_dim": 24,
            "layers": 2,
            "ffn_dim": 20,
            "attention_heads": 4,
        },
        vision_config={**CLIP_TOWER, "image_size": 16, "patch_size": 8},
        latent_query_num=3,
    )
    torch.manual_seed(0)
    model = transformers.Kosmos2ForConditionalGeneration(config).eval()
    spread(model)
    return model


def kosmos2_batch(seed: int) -> dict[str, Any]:
    batch = {**text_batch(seed), **image_batch(seed)}
    places = torch.zeros_like(batch["input_ids"])
    places[:, :3] = 1
    return {**batch, "image_embeds_position_mask": places, "labels": batch["input_ids"], "use_cache": False}


def removable(model: Any) -> list[Any]:
    return [site for site in headprune.resolve(model) if not site.obstacle]


def test_heads_that_run_before_what_is_declared_before_them() -> None:
    model, batches = kosmos2(), [kosmos2_batch(0), kosmos2_batch(1)]
    cached, uncached = Evaluator(batches), Evaluator(batches, cache_bytes=0)
    losses = [cached(model, headprune.resolve(model)).loss]
    places = {site.path.split(".")[0] for site in removable(model)}
    assert places == {"vision_model", "image_to_text_projection"}  # the second one lies outside of all layers
    for unit in [unit for site in removable(model)[::-1] for unit in site.units()[:2]]:
        headprune.remove(model, unit)
        losses.append(cached(model, headprune.resolve(model), [unit[0].site]).loss)
        assert losses[-1] == uncached(model, headprune.resolve(model)).loss
    assert len(set(losses)) == len(losses)  # every removal can be seen


def test_a_tower_is_not_computed_again_for_the_other_one() -> None:
    model, batches = ZOO["clip"].build(), [ZOO["clip"].batch(0)]
    evaluator = Evaluator(batches)
    evaluator(model, headprune.resolve(model))
    layers = {layer_path(site.path) for site in headprune.resolve(model)}
    for path, wanted in (
        ("vision_model.encoder.layers.1", {"vision_model.encoder.layers.1"}),
        ("text_model.encoder.layers.0", {"text_model.encoder.layers.0", "text_model.encoder.layers.1"}),
    ):
        site = next(site for site in headprune.resolve(model) if site.path.startswith(path))
        headprune.remove(model, site.units()[0])
        with counted_calls({layer: model.get_submodule(layer).layer_norm1 for layer in layers}) as counts:
            predictions = evaluator(model, headprune.resolve(model), [site.index])
        assert {layer for layer, count in counts.items() if count} == wanted
        truth = Evaluator(batches, cache_bytes=0)(model, headprune.resolve(model))
        assert torch.equal(predictions.embeddings, truth.embeddings)


@pytest.mark.parametrize("name", ["bert", "t5", "whisper", "gpt2-cross", "clip", "albert"])
def test_no_removal_is_missed_even_if_nobody_tells(name: str) -> None:
    """`changed` names nothing at all, and still no layer gives what it gave before."""
    model = ZOO[name].build()
    layers = [(p, model.get_submodule(p)) for p in {layer_path(s.path) for s in headprune.resolve(model)}]
    batch, known = ZOO[name].batch(0), {}
    units = all_units(headprune.resolve(model))
    for number in [None, *torch.randperm(len(units), generator=torch.Generator().manual_seed(3)).tolist()]:
        if number is not None:
            headprune.remove(model, units[number])
        recall = LayerCache(known, ROOM)
        with recall.of(layers):
            actual = outputs(model, batch, use_cache=False) if name != "clip" else outputs(model, batch)
        known = recall.calls
        assert identical(actual, outputs(model, batch, use_cache=False) if name != "clip" else outputs(model, batch))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0  # not read by anything here
        self.runs: list[int] = []

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        self.runs.append(1)
        return self.linear(hidden)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def twice(net: Any, first: torch.Tensor, change: Callable[[], Any] = lambda: None, second: Any = None) -> Any:
    """Run, change something, run again from memory: the output, what it should be, and the calls that computed."""
    layers = [(f"layers.{n}", layer) for n, layer in enumerate(net.layers)]
    with torch.no_grad():
        recall = LayerCache({}, ROOM)
        with recall.of(layers):
            net(first.clone())
        change()
        second = first if second is None else second
        for layer in net.layers:
            layer.runs.clear()
        with LayerCache(recall.calls, ROOM).of(layers):
            actual = net(second.clone())
        runs = [len(layer.runs) for layer in net.layers]
        return torch.equal(actual, net(second.clone())), runs


def three() -> Net:
    torch.manual_seed(0)
    return Net(Layer(), Layer(), Layer())


INPUT = torch.arange(8.0).view(2, 4)


def test_the_same_again_computes_nothing() -> None:
    assert twice(three(), INPUT) == (True, [0, 0, 0])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_weight_written_to_or_replaced_is_seen(place: int) -> None:
    wanted = (True, [int(n >= place) for n in range(3)])
    net = three()
    assert twice(net, INPUT, lambda: net.layers[place].linear.weight.mul_(2)) == wanted
    net = three()
    replaced = nn.Parameter(torch.randn(4, 4))
    assert twice(net, INPUT, lambda: setattr(net.layers[place].linear, "weight", replaced)) == wanted
    net = three()
    hook = lambda module, args, output: output * 2  # noqa: E731
    assert twice(net, INPUT, lambda: net.layers[place].linear.register_forward_hook(hook)) == wanted


def test_other_inputs_are_seen() -> None:
    assert twice(three(), INPUT, second=INPUT + 1) == (True, [1, 1, 1])
    assert twice(three(), INPUT, second=INPUT.double().float()) == (True, [0, 0, 0])
    assert twice(three(), INPUT, second=INPUT[:1]) == (True, [1, 1, 1])


def test_what_lies_between_layers_is_seen() -> None:
    """The scale belongs to no layer, and stands before the second one."""

    class Scaled(Net):
        scale = 1.0

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            one, two, three = self.layers
            return three(two(one(hidden) * self.scale))

    net = Scaled(Layer(), Layer(), Layer())
    assert twice(net, INPUT, lambda: setattr(net, "scale", 2.0)) == (True, [0, 1, 1])


def test_a_layer_that_runs_again_in_a_pass() -> None:
    """Each of its runs has an answer of its own, and one run more is computed."""

    class Again(Net):
        times = 2

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                hidden = self.layers[1](self.layers[0](hidden))
            return hidden

    net = Again(Layer(), Layer())
    assert twice(net, INPUT) == (True, [0, 0])
    assert twice(net, INPUT, lambda: setattr(net, "times", 3)) == (True, [1, 1])
    assert twice(net, INPUT, lambda: net.layers[1].linear.weight.mul_(2)) == (True, [2, 3])


def test_layers_that_are_skipped_or_run_in_another_order() -> None:
    class Ordered(Net):
        order = (0, 1, 2)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for place in self.order:
                hidden = self.layers[place](hidden)
            return hidden

    for order, runs in (((0, 2), [0, 0, 1]), ((1, 0, 2), [1, 1, 1]), ((0, 1), [0, 0, 0])):
        net = Ordered(Layer(), Layer(), Layer())
        assert twice(net, INPUT, lambda net=net, order=order: setattr(net, "order", order)) == (True, runs)


@pytest.mark.parametrize("what", ["its output", "its input"])
def test_a_tensor_written_to_after_it_was_seen(what: str) -> None:
    """As a residual stream that is added to in place: what is remembered is no longer what was given."""

    class InPlace(Net):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = self.layers[0](hidden)
            (output if what == "its output" else hidden).add_(1)
            return self.layers[1](output + hidden)

    assert twice(InPlace(Layer(), Layer()), INPUT) == (True, [1, 0])


class Side(Layer):
    """A layer that does more than give an output."""

    def __init__(self, effect: Callable[..., None]) -> None:
        super().__init__()
        self.effect = effect

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        output = super().forward(hidden, **options)
        self.effect(self, hidden, options)
        return output


class Box:
    content = 1.0


EFFECTS: dict[str, Any] = {
    "counts its calls": lambda layer, hidden, options: setattr(layer, "calls", layer.calls + 1),
    "writes to its input": lambda layer, hidden, options: hidden.add_(1),
    "fills a list": lambda layer, hidden, options: options["notes"].append(2.0),
    "fills a dictionary": lambda layer, hidden, options: options["table"].update(key=2.0),
    "keeps a cache": lambda layer, hidden, options: setattr(options["box"], "content", 2.0),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_layer_with_side_effects_always_computes(name: str) -> None:
    class Shared(Net):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            notes, table, box = [1.0], {"key": 1.0}, Box()
            options = {"notes": notes, "table": table} if name != "keeps a cache" else {"box": box}
            after = self.layers[0](hidden, **options)
            return self.layers[1](after + hidden * sum(notes) * table["key"] * box.content)

    assert twice(Shared(Side(EFFECTS[name]), Layer()), INPUT) == (True, [1, 0])


def test_memory_stays_within_its_room() -> None:
    net, size = three(), INPUT.numel() * 4
    for share, calls in ((0, 0), (1.9, 0), (2, 1), (3.5, 2), (4, 3), (9, 3)):  # the first call holds its input as well
        recall = LayerCache({}, int(share * size))
        with torch.no_grad(), recall.of([(str(n), layer) for n, layer in enumerate(net.layers)]):
            net(INPUT)
        assert len(recall.calls) == calls
        assert recall.bytes == (calls + 1) * size * (calls > 0)
        assert not any("forward" in vars(layer) for layer in net.layers)


def test_inference_mode_remembers_nothing() -> None:
    """Its tensors do not say whether they were written to."""
    net, recall = three(), LayerCache({}, ROOM)
    with torch.inference_mode(), recall.of([("0", net.layers[0])]):
        net(INPUT.clone())
    assert recall.calls == {}
