"""Rows of the last layer that nobody reads: left out only where that is proven, and then nothing changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headprune
from headprune.hooks.unread import Unread
from headprune.measure.evaluator import Evaluator
from headprune.search.pruner import Pruner
from headprune.signals import ResidualErrors, observe
from oracles import relative_differences
from scoring import labelled
from zoo import ZOO

FIRST_TOKEN = ["bert", "roberta", "electra", "distilbert", "vit", "deberta-v2"]


def read_of(model: Any, batch: dict[str, Any], *, prove: bool = False) -> Any:
    task = headprune.task_of(model)
    return Unread(prove=prove).of(0, model, headprune.resolve(model), task, task.prepare(batch, model.device))


def in_double(name: str) -> Any:
    return ZOO[name].build().double()


def double_batch(name: str, seed: int) -> dict[str, Any]:
    batch = labelled(ZOO[name], seed)
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_a_classifier_reads_the_first_token_alone(name: str) -> None:
    model, batch = ZOO[name].build(), labelled(ZOO[name], 0)
    read = read_of(model, batch, prove=True)
    assert read is not None
    tokens = read.shape[1]
    assert read.rows.tolist() == [row * tokens for row in range(read.shape[0])]
    last = headprune.resolve(model)[-1]
    assert read.maps[0] == last.o  # and the maps of the feed-forward layer, or the output map would be all
    assert len(read.maps) >= 3
    assert not {projection.module for projection in last.projections} & set(read.maps)
    asking = [projection.module for projection in last.roles if projection.role == "q"]
    assert list(read.queries) == asking


def test_the_last_token_of_a_decoder_is_found_in_every_sample() -> None:
    import transformers

    from zoo import BERT, text_batch

    torch.manual_seed(0)
    kept = ("vocab_size", "num_labels", "pad_token_id")
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, **{name: BERT[name] for name in kept})
    model = transformers.GPT2ForSequenceClassification(config).eval()
    batch = text_batch(0)
    read = read_of(model, batch, prove=True)
    last = batch["attention_mask"].sum(1) - 1
    assert read.rows.tolist() == [row * 9 + int(place) for row, place in enumerate(last)]
    assert read.queries == ()  # one map makes queries, keys and values


def test_evaluation_makes_queries_of_the_first_token_alone_and_scores_look_at_all() -> None:
    batch = labelled(ZOO["bert"], 0)
    tokens = batch["input_ids"].numel()
    model, rows = in_double("bert"), []
    self_attention = model.bert.encoder.layer[-1].attention.self

    def note(weights: torch.Tensor) -> None:
        own = functional.linear

        def linear(given: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            rows.extend([given.shape[:-1].numel()] if weight is weights else [])
            return own(given, weight, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "linear", linear)
            evaluator(model, headprune.resolve(model))
            headprune.score(model, [batch], unread=Unread(prove=True))

    evaluator = Evaluator([batch])
    evaluator(model, headprune.resolve(model))
    note(self_attention.query.weight)
    looking = [tokens] * 2  # which layer is last, and what is read of it
    assert rows == [*looking, 3, *looking, tokens, tokens]  # a proof, and the pass that scores
    rows.clear()
    note(self_attention.key.weight)
    assert set(rows) == {tokens}


@pytest.mark.parametrize("name", ["llama-gqa", "albert", "clip", "t5"])
def test_what_is_read_as_a_whole_or_not_known_stays_whole(name: str) -> None:
    model = ZOO[name].build()
    assert read_of(model, labelled(ZOO[name], 0)) is None


class Pooler(nn.Module):
    """Reads all tokens, by their mean or their maximum."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1) if self.how == "mean" else hidden.amax(1)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_model_that_reads_all_tokens_is_left_whole(how: str) -> None:
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    model.bert.pooler = Pooler(how)
    assert read_of(model, batch, prove=True) is None


def test_a_row_that_is_read_after_all_is_found_out_and_computed() -> None:
    """Of a maximum the gradient shows those rows alone that are the largest now: others may be next time."""
    model, batch = in_double("bert"), double_batch("bert", 0)
    model.bert.pooler = Pooler("max")
    with torch.no_grad():
        model.bert.encoder.layer[-1].output.LayerNorm.weight.zero_()  # all rows are alike, and the first wins
    evaluator = Evaluator([batch])
    evaluator(model, headprune.resolve(model))
    with torch.no_grad():
        model.bert.encoder.layer[-1].output.LayerNorm.weight.fill_(1.0)
    found = evaluator(model, headprune.resolve(model)).loss
    assert found is not None
    assert found == pytest.approx(plain_loss(model, batch), rel=1e-12)


def test_queries_that_are_read_after_all_are_computed_and_the_rest_is_still_left_out() -> None:
    model, batch = in_double("bert"), double_batch("bert", 0)
    query = model.bert.encoder.layer[-1].attention.self.query
    query.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    evaluator = Evaluator([batch])
    left_out = []
    for _ in range(3):
        assert evaluator(model, headprune.resolve(model)).loss == pytest.approx(plain_loss(model, batch), rel=1e-12)
        left_out.append(evaluator._unread._found.get(0))
    assert left_out[0] is None
    assert [bool(read.queries) for read in left_out[1:]] == [False, False]
    assert left_out[2].maps


def test_a_head_may_write_to_what_it_reads() -> None:
    class InPlace(Pooler):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden *= 2
            return hidden[:, 0]

    model, batch = in_double("bert"), double_batch("bert", 0)
    model.bert.pooler = InPlace("first")
    evaluator = Evaluator([batch])
    for _ in range(2):
        assert evaluator(model, headprune.resolve(model)).loss == pytest.approx(plain_loss(model, batch), rel=1e-12)


def plain_loss(model: Any, batch: dict[str, Any]) -> float:
    with torch.no_grad():  # of the logits, as DeBERTa's own loss is one in float32
        return float(functional.cross_entropy(model(**batch).logits, batch["labels"]))


@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_evaluation_is_that_of_plain_forwards(name: str) -> None:
    model, batches = in_double(name), [double_batch(name, seed) for seed in (0, 1)]
    evaluator = Evaluator(batches)
    evaluator(model, headprune.resolve(model))
    for unit in [site.units()[0] for site in headprune.resolve(model)] + [headprune.resolve(model)[-1].units()[1]]:
        headprune.remove(model, unit)
        found = evaluator(model, headprune.resolve(model), [unit[0].site]).loss
        plain = sum(plain_loss(model, batch) for batch in batches) / len(batches)  # of as many samples each
        assert found is not None
        assert math.isclose(found, plain, rel_tol=1e-12)


def test_an_emptied_last_site_needs_nothing_else() -> None:
    model, batch = in_double("bert"), double_batch("bert", 0)
    evaluator = Evaluator([batch])
    evaluator(model, headprune.resolve(model))
    last = headprune.resolve(model)[-1]
    for unit in last.units():
        headprune.remove(model, unit)
        found = evaluator(model, headprune.resolve(model), [last.index]).loss
        assert found == pytest.approx(plain_loss(model, batch), rel=1e-12)


@pytest.mark.parametrize("name", ["bert", "vit", "deberta-v2"])
@pytest.mark.parametrize("criterion", ["residual-gradient", "his", "gnorm", "hies", "entropy"])
def test_scores_are_those_of_whole_passes(name: str, criterion: str) -> None:
    model, batches = in_double(name), [double_batch(name, seed) for seed in (0, 5)]
    unread = Unread(prove=True)
    found = headprune.score(model, batches, criterion=criterion, unread=unread)
    whole = headprune.score(model, batches, criterion=criterion)
    assert [unread._found[number] is not None for number in (0, 1)] == [True, True]
    assert relative_differences(found.scores, whole.scores).nan_to_num().max() < 1e-9
    assert math.isclose(found.loss, whole.loss, rel_tol=1e-12)


def test_who_looks_behind_the_output_maps_sees_everything() -> None:
    """Residual errors are relative to what layers give, at all tokens."""
    model, batch = in_double("bert"), double_batch("bert", 0)
    unread = Unread(prove=True)
    found = headprune.score(model, [batch], criterion="residual-error", unread=unread)
    whole = headprune.score(model, [batch], criterion="residual-error")
    assert torch.equal(found.scores, whole.scores)
    assert not unread._found  # nobody asked
    assert not ResidualErrors.up_to_outputs


def test_neurons_of_the_last_layer_are_seen_at_all_tokens() -> None:
    model, batch = in_double("bert"), double_batch("bert", 0)
    options: dict[str, Any] = {"criterion": "residual-gradient", "units": "heads,neurons"}
    found = headprune.score(model, [batch], unread=Unread(prove=True), **options)
    assert torch.equal(found.scores.nan_to_num(-1), headprune.score(model, [batch], **options).scores.nan_to_num(-1))


def test_a_run_leaves_out_rows_and_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [double_batch("bert", seed) for seed in (0, 5)]
    options = headprune.PruneConfig(keep=2)

    def steps() -> list[Any]:
        return list(Pruner(in_double("bert"), batches, options, evaluation=batches[:1]))

    rows: list[int] = []
    own = torch.Tensor.index_copy
    monkeypatch.setattr(torch.Tensor, "index_copy", lambda *given: rows.append(len(given[2])) or own(*given))
    short = steps()
    assert set(rows) == {3}
    monkeypatch.setattr(Unread, "of", lambda *given: None)
    whole = steps()
    assert [step.removed for step in short] == [step.removed for step in whole]
    for one, other in zip(short, whole, strict=True):
        assert math.isclose(one.loss, other.loss, rel_tol=1e-9)


def test_a_model_comes_back_as_it_was() -> None:
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    evaluator = Evaluator([batch])
    for _ in range(2):
        evaluator(model, headprune.resolve(model))
    assert not any("forward" in vars(module) for module in model.modules())
    task = headprune.task_of(model)
    observe(model, headprune.resolve(model), batch, [], task=task, reading=lambda batch: read_of(model, batch))
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_read_is_looked_up_once() -> None:
    """A pass tells which layer is last; a batch takes one to see what is read and, where no NaN would tell later, one
    to prove it."""
    batches = [labelled(ZOO["bert"], seed) for seed in (0, 5)]

    def passes(**patches: Any) -> int:
        model, ran = ZOO["bert"].build(), []
        model.register_forward_pre_hook(lambda *given: ran.append(1))
        with pytest.MonkeyPatch.context() as patch:
            for name, function in patches.items():
                patch.setattr(Unread, name, function)
            list(Pruner(model, batches, headprune.PruneConfig(keep=2), evaluation=batches))
        return len(ran)

    looked_up = passes() - passes(of=lambda *given: None)
    assert looked_up == (1 + 2 * len(batches)) + (1 + len(batches))
