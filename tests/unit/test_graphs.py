"""Scores of a model that loses units, with graphs of earlier layers kept, are bit by bit those of whole passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import headprune
from headprune.hooks.recall import _tensors
from headprune.hooks.watch import hooks
from headprune.search.pruner import Pruner
from headprune.signals import late, observe
from headprune.signals.gate_gradients import GateGradients, GateMeter
from headprune.signals.graphs import Graphs
from headprune.signals.late import Late
from headprune.units import all_sites
from headprune.units.paths import layer_path
from helpers import all_units
from runs import counted_calls
from scoring import labelled, labels_of
from zoo import ZOO

FAMILIES = [
    "bert",
    "roberta",
    "distilbert",
    "vit",
    "llama-gqa",
    "gpt2",
    "t5",
    "whisper",
    "clip",
    "albert",
    "deberta-v2",
]
NAMES = {"clip": ["residual-gradient", "gnorm"]}  # without labels
CRITERIA = ["residual-gradient", "gnorm", "his", "taylor"]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


def same_moments(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(
        torch.equal(one[index].products, other[index].products) and torch.equal(one[index].total, other[index].total)
        for index in one
    )


def order_of(model: Any) -> list[Any]:
    units = all_units([site for site in headprune.resolve(model) if not site.obstacle])
    drawn = torch.randperm(len(units), generator=torch.Generator().manual_seed(1)).tolist()
    return [units[number] for number in drawn[:6]]


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_whole_passes(name: str) -> None:
    model, batches = ZOO[name].build(), [labelled(ZOO[name], seed) for seed in (0, 5)]
    graphs = {criterion: Graphs() for criterion in NAMES.get(name, CRITERIA)}
    for unit in [None, *order_of(model)]:
        if unit is not None:
            headprune.remove(model, unit)
        for criterion, own in graphs.items():
            options: dict[str, Any] = {"criterion": criterion, "labels": labels_of(ZOO[name])}
            found = headprune.score(model, batches, graphs=own, **options)
            plain = headprune.score(model, batches, **options)
            assert same(found.scores, plain.scores)
            assert (found.loss, found.tokens, found.samples) == (plain.loss, plain.tokens, plain.samples)
            assert same_moments(found.moments, plain.moments)


def test_several_criteria_share_one_pass() -> None:
    model, batches, graphs = ZOO["bert"].build(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    for unit in [None, *order_of(model)]:
        if unit is not None:
            headprune.remove(model, unit)
        found = headprune.score(model, batches, criteria=CRITERIA, graphs=graphs).scores
        plain = headprune.score(model, batches, criteria=CRITERIA).scores
        assert all(same(found[criterion], plain[criterion]) for criterion in CRITERIA)


def computed(model: Any, batches: list[Any], graphs: Graphs, **options: Any) -> list[int]:
    """How often each layer with a site computes while the model is scored."""
    sites = headprune.resolve(model)
    maps = {layer_path(site.path): model.get_submodule(layer_path(site.path)).output.dense for site in sites}
    with counted_calls(maps) as counts:
        headprune.score(model, batches, graphs=graphs, **options)
    return [counts[path] for path in maps]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_layers_before_a_removal_do_not_run_again(criterion: str) -> None:
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    assert computed(model, batches, graphs, criterion=criterion) == [2, 2, 2, 2]
    for site, again in ((2, [0, 0, 2, 2]), (0, [2, 2, 2, 2]), (3, [0, 0, 0, 2]), (1, [0, 2, 2, 2])):
        headprune.remove(model, [(site, 1)])
        assert computed(model, batches, graphs, criterion=criterion) == again


def deep_bert() -> Any:
    import transformers

    from zoo import BERT, spread

    torch.manual_seed(0)
    config = transformers.BertConfig(**{**BERT, "num_hidden_layers": 4})
    model = transformers.BertForSequenceClassification(config).eval()
    spread(model)
    return model


def test_moments_of_sites_before_a_removal_are_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from headprune.signals.moments import Gathering

    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    seen: list[int] = []
    own = Gathering.see
    monkeypatch.setattr(Gathering, "see", lambda self, site, *given: seen.append(site.index) or own(self, site, *given))
    headprune.score(model, batches, graphs=graphs)
    assert seen == [0, 1, 2, 3] * 2
    headprune.remove(model, [(2, 1)])
    seen.clear()
    headprune.score(model, batches, graphs=graphs)
    assert seen == [2, 3] * 2


def test_a_pass_that_breaks_off_leaves_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are known from a pass that came to no end: the moments of the one before do not belong to them."""
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    headprune.score(model, batches, graphs=graphs)
    headprune.remove(model, [(1, 0)])

    def break_off(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Late, "fit", break_off)
        with pytest.raises(KeyboardInterrupt):
            headprune.score(model, batches, graphs=graphs)
    assert computed(model, batches, graphs) == [0, 0, 0, 0]
    assert same(headprune.score(model, batches, graphs=graphs).scores, headprune.score(model, batches).scores)


def test_graphs_stay_within_their_room() -> None:
    """Where a layer just does not fit, smaller ones after it would; but they hold its graph."""
    model, batches, whole = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    headprune.remove(model, [(2, 0), *((3, head) for head in range(3))])
    headprune.score(model, batches, graphs=whole)
    assert alive(whole) == sum(sizes(whole).values())
    plain = headprune.score(model, batches).scores
    together: dict[int, int] = {}
    for number, call in enumerate(call for calls in whole._known.values() for call in calls.values()):
        together |= call.storages
        for room, kept in ((sum(together.values()) - 1, number), (sum(together.values()), number + 1)):
            graphs = Graphs(room=room)
            for _ in range(2):
                assert same(headprune.score(model, batches, graphs=graphs).scores, plain)
                assert alive(graphs) <= room
                first, second = (len(graphs._known[batch]) for batch in (0, 1))
                assert first == min(kept, 4)
                assert second >= kept - first


def alive(graphs: Graphs) -> int:
    """Bytes that kept calls hold beside weights, by walking the whole graph that can be reached from them."""
    calls = [call for own in graphs._known.values() for call in own.values()]
    found = [seen.tensor for call in calls for seen in (*_tensors(call.given), *_tensors(call.gave))]
    found += [part for call in calls for what in call.heard for part in what if isinstance(part, torch.Tensor)]
    weights = {id(part) for call in calls for part, _ in call.state if isinstance(part, nn.Parameter)}
    own = {part.untyped_storage().data_ptr() for call in calls for part, _ in call.state if id(part) in weights}
    front, seen_nodes = [tensor.grad_fn for tensor in found], set()
    while front:
        node = front.pop()
        if node is not None and node not in seen_nodes:
            seen_nodes.add(node)
            front += [following for following, _ in node.next_functions]
            values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            found += [value for value in values if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}.values())


def sizes(graphs: Graphs) -> dict[int, int]:
    return {
        place: size
        for calls in graphs._known.values()
        for call in calls.values()
        for place, size in call.storages.items()
    }


def test_what_a_graph_has_saved_is_counted() -> None:
    """By autograd's own word: every activation that it packs for a backward pass, each storage once."""
    model, batch, graphs = deep_bert(), labelled(ZOO["bert"], 0), Graphs()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    packed: dict[int, int] = {}
    inside: list[int] = []  # a layer, while it runs

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside and tensor.untyped_storage().data_ptr() not in weights:
            packed[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    for layer in model.bert.encoder.layer:
        layer.attention.register_forward_pre_hook(lambda *given: inside.append(1))
        layer.output.register_forward_hook(lambda *given: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        headprune.score(model, [batch], criterion="his", graphs=graphs)
    assert packed
    assert packed.items() <= sizes(graphs).items()


def test_nothing_of_a_pass_stays_on_the_graphs() -> None:
    model, batch, graphs = deep_bert(), labelled(ZOO["bert"], 0), Graphs()
    headprune.score(model, [batch], criteria=CRITERIA, graphs=graphs)
    shown = [
        part
        for calls in graphs._known.values()
        for call in calls.values()
        for _, _, *what in call.heard
        for part in what
        if isinstance(part, torch.Tensor)
    ]
    assert any(tensor.is_leaf and tensor.requires_grad for tensor in shown)
    assert all(tensor.grad is None for tensor in shown if tensor.is_leaf)
    assert not any(tensor._backward_hooks for tensor in shown)
    assert not any("forward" in vars(module) for module in model.modules())


def test_who_looks_at_attention_has_every_layer_computed() -> None:
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    for unit in [None, *order_of(model)[:2]]:
        if unit is not None:
            headprune.remove(model, unit)
        assert computed(model, batches, graphs, criterion="hies") == [2, 2, 2, 2]
        assert not any(graphs._known.values())
        found = headprune.score(model, batches, criterion="hies", graphs=graphs)
        assert same(found.scores, headprune.score(model, batches, criterion="hies").scores)


class Counting(nn.Module):
    """A feed-forward layer that is another one every time it has run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.dense, self.runs = inner.dense, 0
        self.intermediate_act_fn = inner.intermediate_act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.intermediate_act_fn(self.dense(hidden)) * (1 + self.runs % 2)


def test_a_layer_that_changes_itself_is_found_out() -> None:
    """Its first batch is doubled and its second is not, whatever was remembered of them. It is tried once."""
    plain, kept = deep_bert(), deep_bert()
    batches, graphs = [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    for model in (plain, kept):
        layer = model.bert.encoder.layer[1]
        layer.intermediate = Counting(layer.intermediate)
    runs = []
    for _ in range(3):
        found = headprune.score(kept, batches, criterion="his", graphs=graphs).scores
        assert same(found, headprune.score(plain, batches, criterion="his").scores)
        assert not graphs._known
        runs.append(kept.bert.encoder.layer[1].intermediate.runs)
    assert runs == [4, 6, 8]


def test_samples_that_are_looked_at_one_by_one() -> None:
    """Gnorm cannot tell the gradients of a shared position apart by sample."""
    model, batches, graphs = ZOO["deberta-v3"].build(), [labelled(ZOO["deberta-v3"], 0)], Graphs()
    for unit in [None, *order_of(model)[:3]]:
        if unit is not None:
            headprune.remove(model, unit)
        found = headprune.score(model, batches, criteria=["residual-gradient", "gnorm"], graphs=graphs)
        plain = headprune.score(model, batches, criteria=["residual-gradient", "gnorm"])
        assert all(same(found.scores[name], plain.scores[name]) for name in plain.scores)


def test_a_run_takes_the_same_way_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [labelled(ZOO["bert"], seed) for seed in (0, 5)]

    def steps() -> list[Any]:
        return headprune.prune(deep_bert(), batches, keep=2, evaluation=batches[:1]).trajectory

    kept = steps()
    monkeypatch.setattr(Graphs, "start", lambda *given: None)
    plain = steps()
    assert [step.removed for step in kept] == [step.removed for step in plain]
    assert [step.loss for step in kept] == [step.loss for step in plain]
    assert all(same(one.scores, other.scores) for one, other in zip(kept[1:], plain[1:], strict=True))


def test_a_run_that_has_ended_keeps_nothing() -> None:
    batches = [labelled(ZOO["bert"], seed) for seed in (0, 5)]
    pruner = Pruner(deep_bert(), batches, headprune.PruneConfig(keep=12), evaluation=batches[:1])
    kept = [len(pruner._graphs._known) for _ in pruner]
    assert kept == [0, 2, 2, 2, 2]
    assert not pruner._graphs._known


def test_one_shot_runs_score_once_and_keep_nothing() -> None:
    batches = [labelled(ZOO["bert"], seed) for seed in (0, 5)]
    config = headprune.PruneConfig(keep=12, schedule="one-shot")
    pruner = Pruner(deep_bert(), batches, config, evaluation=batches[:1])
    assert not any(pruner._graphs._known for _ in pruner)


def test_a_run_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, made = [labelled(ZOO["bert"], seed) for seed in (0, 5)], []

    def noted() -> Graphs:
        made.append(Graphs())
        return made[0]

    def fail(step: Any) -> None:
        if step.step == 2:
            assert made[0]._known
            raise KeyboardInterrupt

    monkeypatch.setattr("headprune.search.pruner.Graphs", noted)
    with pytest.raises(KeyboardInterrupt):
        headprune.prune(deep_bert(), batches, evaluation=batches, on_step=fail)
    assert not made[0]._known


def test_what_was_kept_for_something_else_does_not_serve() -> None:
    """Another criterion was shown other things, and other batches have other moments."""
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5, 7)], Graphs()
    for criterion, own in (
        ("residual-gradient", batches),
        ("gnorm", batches),
        ("residual-gradient", batches),
        ("residual-gradient", batches[:1]),
        ("residual-gradient", batches[1:]),
        ("residual-gradient", [batches[1], batches[0]]),
        ("magnitude", batches),
        ("his", batches),
    ):
        found = headprune.score(model, own, criterion=criterion, graphs=graphs)
        plain = headprune.score(model, own, criterion=criterion)
        assert same(found.scores, plain.scores)
        assert same_moments(found.moments, plain.moments)


def test_neurons_whose_moments_first_need_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as enough have left, one pass has gradients where there was one without."""
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    neurons = [site for site in all_sites(model) if site.kind == "neurons"]
    monkeypatch.setattr(
        "headprune.criteria.fitting.LIMIT", sum(16 * (site.size * site.width) ** 2 for site in neurons) - 1
    )
    options: dict[str, Any] = {"criterion": "residual-gradient", "units": "neurons"}
    for unit in [None, *(neurons[3].units()[number] for number in range(3))]:
        if unit is not None:
            headprune.remove(model, neurons=unit)
        found = headprune.score(model, batches, graphs=graphs, **options)
        assert same(found.scores, headprune.score(model, batches, **options).scores)


def test_a_site_without_units_has_no_moments_left() -> None:
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    headprune.score(model, batches, graphs=graphs)
    headprune.remove(model, [(2, head) for head in range(4)])
    found, plain = headprune.score(model, batches, graphs=graphs), headprune.score(model, batches)
    assert 2 not in plain.moments
    assert same_moments(found.moments, plain.moments)


def test_what_cannot_wait_for_its_fit_keeps_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5, 7)], Graphs()
    monkeypatch.setattr(late, "LIMIT", 0)
    headprune.score(model, batches, graphs=graphs)
    headprune.remove(model, [(3, 1)])
    # Moments take a pass of their own, up to the last site; to score, each batch goes through the last layer once.
    assert computed(model, batches, graphs) == [3, 3, 3, 3]
    assert same(headprune.score(model, batches, graphs=graphs).scores, headprune.score(model, batches).scores)


def test_an_offloaded_model_is_gone_over_once(tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model, batches, graphs = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    plain = headprune.score(model, batches)
    cpu_offload(model)
    for _ in range(2):
        assert computed(model, batches, graphs) == [2, 2, 2, 2]
        assert not graphs._known
    assert same(headprune.score(model, batches, graphs=graphs).scores, plain.scores)


@dataclass(frozen=True)
class Watching(GateGradients):
    """A signal of one's own that has hooks of its own."""

    def meter(self, view: Any) -> Any:
        return _WatchingMeter(self, view)


class _WatchingMeter(GateMeter):
    seen: ClassVar[list[int]] = []

    def watching(self) -> Any:
        return hooks([(self.view.model.bert.encoder.layer[0], lambda *given: self.seen.append(1))])


def test_signals_with_hooks_of_their_own_see_every_layer() -> None:
    model, graphs, task = deep_bert(), Graphs(), headprune.task_of(deep_bert())
    sites, batch = headprune.resolve(model), labelled(ZOO["bert"], 0)
    for _ in range(2):
        memory = graphs.start(model, sites, "the same")
        observe(model, sites, batch, [Watching()], task=task, memory=(memory, 0))
        assert memory.finish(None)
    assert _WatchingMeter.seen == [1, 1]


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_decoder_takes_no_room_that_it_could_not_use(name: str) -> None:
    """What it is told by the encoder has gone through a norm that runs again."""
    model, batches, graphs = ZOO[name].build(), [labelled(ZOO[name], 0)], Graphs()
    headprune.score(model, batches, graphs=graphs)
    assert {path.split(".layers.")[0].split(".block.")[0] for path, _ in graphs._known[0]} == {
        "encoder" if name == "t5" else "model.encoder"
    }
