"""Scores of a model that loses units, with graphs of earlier layers kept, are bit by bit those of whole passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headprune
from headprune.signals.graphs import Graphs
from headprune.signals.late import Late
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
            for index, moments in (plain.moments or {}).items():
                assert torch.equal(found.moments[index].products, moments.products)
                assert torch.equal(found.moments[index].total, moments.total)


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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_graphs_stay_within_their_room(share: float) -> None:
    model, batches, whole = deep_bert(), [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    headprune.score(model, batches, graphs=whole)
    size = sum(sizes(whole).values())
    graphs = Graphs(room=int(share * size))
    headprune.score(model, batches, graphs=graphs)
    assert sum(sizes(graphs).values()) <= share * size
    kept = sum(len(calls) for calls in graphs._known.values())
    assert (kept == 0) == (share == 0)
    assert (kept == 8) == (share == 1)
    headprune.remove(model, [(3, 0)])
    found = headprune.score(model, batches, graphs=graphs)
    assert same(found.scores, headprune.score(model, batches).scores)


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
    """Its first batch is doubled and its second is not, whatever was remembered of them."""
    plain, kept = deep_bert(), deep_bert()
    batches, graphs = [labelled(ZOO["bert"], seed) for seed in (0, 5)], Graphs()
    for model in (plain, kept):
        layer = model.bert.encoder.layer[1]
        layer.intermediate = Counting(layer.intermediate)
    for _ in range(2):
        found = headprune.score(kept, batches, criterion="his", graphs=graphs).scores
        assert same(found, headprune.score(plain, batches, criterion="his").scores)
        assert not graphs._known


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
    monkeypatch.setattr("headprune.signals.graphs.Graphs.start", lambda *given: None)
    plain = steps()
    assert [step.removed for step in kept] == [step.removed for step in plain]
    assert [step.loss for step in kept] == [step.loss for step in plain]
    assert all(same(one.scores, other.scores) for one, other in zip(kept[1:], plain[1:], strict=True))
