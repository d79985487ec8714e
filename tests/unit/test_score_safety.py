"""`score` leaves a model as it was, whatever happens, and refuses what cannot be scored in one clear sentence."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.errors import DataError, NonFiniteError, UnsupportedModelError
from score_helpers import EVERY, labelled, model_of
from zoo import LABELS, ZOO


def bert_batches() -> list[dict[str, torch.Tensor]]:
    return [labelled(ZOO["bert"], 0), labelled(ZOO["bert"], 5)]


def without_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


# --- the model comes back as it was ---------------------------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def in_use(name: str) -> Any:
    """A model in the middle of a training: parts frozen, parts in eval mode, gradients there, a hook attached."""
    model = ZOO[name].build().train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 > 0)
        if number % 2:
            parameter.grad = torch.full_like(parameter, 0.5)
    next(iter(model.children())).eval()
    model.register_forward_hook(lambda *_: None)
    return model


def state(model: Any) -> dict[str, Any]:
    modules = list(model.modules())
    configs = [module.config for module in modules if hasattr(module, "config")]
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "asking": [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        "identities": [id(parameter) for parameter in model.parameters()],
        "training": [module.training for module in modules],
        "hooks": [[len(getattr(module, kind)) for kind in HOOKS] for module in modules],
        "classes": [type(module) for module in modules],
        "attention": [config._attn_implementation for config in configs],
        "config": model.config.to_dict(),
        "random": torch.get_rng_state(),
        "recording": torch.is_grad_enabled(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v3", "gpt2", "phi3", "t5", "whisper", "clip", "vit"])
def test_score_leaves_the_model_as_it_was(name: str) -> None:
    model, batch = in_use(name), labelled(ZOO[name], 0)
    if name == "clip":  # towers may run their attention in different ways
        model.config.text_config._attn_implementation = "eager"
    given = {key: value.clone() for key, value in batch.items()}
    before = state(model)
    criteria = (
        ["gnorm", "entropy", "magnitude", "random", "residual-gradient", "residual-error"] if name == "clip" else EVERY
    )
    headprune.score(model, [batch], criteria=criteria)
    after = state(model)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert same(given, batch)
    assert not any(value.requires_grad for value in batch.values())


@pytest.mark.parametrize("criterion", ["gnorm", "entropy", "his", "attribution", "residual-gradient", "residual-error"])
@pytest.mark.parametrize("accident", ["wrong label", "wrong token", "not finite", "interrupted"])
def test_score_leaves_the_model_as_it_was_when_it_raises(criterion: str, accident: str) -> None:
    model = in_use("bert")
    good, bad = bert_batches()
    progress: Callable[[int], None] | None = None
    if accident == "wrong label":
        bad["labels"] = torch.tensor([0, LABELS, 0])
    elif accident == "wrong token":
        bad["input_ids"] = bad["input_ids"] + 1000
    elif accident == "not finite":
        with torch.no_grad():
            model.bert.encoder.layer[2].attention.self.value.weight[0, 0] = torch.inf
    else:

        def progress(_: int) -> None:
            raise KeyboardInterrupt

    before = state(model)
    with pytest.raises((DataError, NonFiniteError, KeyboardInterrupt)):
        headprune.score(model, [good, bad], criterion=criterion, progress=progress)
    after = state(model)
    assert [key for key in before if not same(before[key], after[key])] == []
    again = headprune.score(ZOO["bert"].build(), [good], criterion="entropy").scores
    assert torch.equal(again, headprune.score(ZOO["bert"].build(), [good], criterion="entropy").scores)


def test_training_mode_and_no_grad_around_it_change_nothing() -> None:
    model, batches = ZOO["bert"].build(), bert_batches()
    expected = headprune.score(model, batches, criteria=EVERY).scores
    with torch.no_grad():
        actual = headprune.score(model.train(), batches, criteria=EVERY).scores
    assert same(actual, expected)


def test_inference_mode_around_it_changes_nothing() -> None:
    """Every gradient was 0 there, and heads were removed in the order of their numbers."""
    model, batches = ZOO["bert"].build(), bert_batches()
    expected = headprune.score(model, batches, criteria=EVERY).scores
    before = state(model)
    with torch.inference_mode():
        made_inside = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        assert all(value.is_inference() for batch in made_inside for value in batch.values())
        actual = [headprune.score(model, given, criteria=EVERY).scores for given in (batches, made_inside)]
        assert torch.is_inference_mode_enabled()
    assert same(actual[0], expected)
    assert same(actual[1], expected)
    after = state(model)
    assert [key for key in before if not same(before[key], after[key])] == []


@pytest.mark.parametrize(
    "options", [{"keep": 0.5, "criterion": "gnorm"}, {"keep_flops": 0.8, "rounds": 2}, {"keep": 6}]
)
def test_pruning_in_inference_mode_removes_the_same_and_leaves_weights_that_learn(options: dict[str, Any]) -> None:
    batches, models = bert_batches(), [ZOO["bert"].build(), ZOO["bert"].build()]
    expected = headprune.prune(models[0], batches, **options)
    with torch.inference_mode():
        made_inside = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        actual = headprune.prune(models[1], made_inside, **options)
    assert [step.removed for step in actual.trajectory] == [step.removed for step in expected.trajectory]
    assert same(dict(models[1].state_dict()), dict(models[0].state_dict()))
    models[1](**batches[0]).loss.backward()
    assert all(parameter.grad is not None for parameter in models[1].parameters())


def test_pruner_and_remove_in_inference_mode() -> None:
    batches, model, other = bert_batches(), ZOO["bert"].build(), ZOO["bert"].build()
    with torch.inference_mode():
        steps = [step.removed for step in headprune.Pruner(model, batches, headprune.PruneConfig(keep=0.5))]
        headprune.remove(other, [(0, 1)], repair="lstsq", batches=batches)
    expected = headprune.prune(ZOO["bert"].build(), batches, keep=0.5)
    assert steps == [step.removed for step in expected.trajectory]
    assert not any(parameter.is_inference() for parameter in (*model.parameters(), *other.parameters()))


def test_weights_made_in_inference_mode_are_refused() -> None:
    dense = ZOO["bert"].build()
    with torch.inference_mode():
        model = copy.deepcopy(dense)
    for call in (
        lambda: headprune.score(model, bert_batches(), criterion="gnorm"),
        lambda: headprune.prune(model, bert_batches(), keep=0.5),
        lambda: headprune.remove(model, [(0, 1)]),
    ):
        with pytest.raises(UnsupportedModelError, match=r"made under torch\.inference_mode.*load the model outside"):
            call()


# --- two threads ---------------------------------------------------------------------------------------------------


class Meeting:
    """A forward hook of a model that, when the first of two threads is in a forward pass, lets the second begin, and
    gives it time to come into one too; with one call at a time it cannot."""

    def __init__(self, second: Callable[[], None], seconds: float = 0.5) -> None:
        self.first, self.thread = threading.get_ident(), threading.Thread(target=second)
        self.met, self.seconds = threading.Event(), seconds

    def __call__(self, *_: Any) -> None:
        if threading.get_ident() != self.first:
            self.met.set()
        elif not self.thread.ident:
            self.thread.start()
            self.together = self.met.wait(self.seconds)


@pytest.mark.parametrize("share", ["the model", "its body", "its config"])
def test_two_threads_that_score_one_model_take_turns(share: str) -> None:
    """Both were wrong, and the model kept an attention implementation of this package in its config."""
    model, batches = ZOO["bert"].build(), bert_batches()
    others = {"the model": model, "its body": model.bert, "its config": type(model)(model.config).eval()}
    other, inputs = others[share], batches if share != "its body" else [*map(without_labels, batches)]
    criteria = ["entropy", "gnorm"]
    expected = [headprune.score(model, batches, criteria=criteria).scores]
    expected += [headprune.score(other, inputs, criteria=criteria).scores]
    before, actual = (state(model), state(other)), []

    def second() -> None:
        actual.append(headprune.score(other, inputs, criteria=criteria).scores)

    meeting = Meeting(second)
    handles = [each.register_forward_hook(meeting) for each in {id(each): each for each in (model, other)}.values()]
    try:
        actual.append(headprune.score(model, batches, criteria=criteria).scores)
        meeting.thread.join()
    finally:
        for handle in handles:
            handle.remove()
    assert not meeting.together
    assert same(actual[0], expected[0])
    assert same(actual[1], expected[1])
    after = state(model), state(other)
    for one, two in zip(before, after, strict=True):
        assert [key for key in one if not same(one[key], two[key])] == []


def test_two_threads_prune_one_model_one_after_the_other() -> None:
    """The second scores what the first has left."""
    batches = bert_batches()
    expected = ZOO["bert"].build()
    for keep in (9, 6):
        headprune.prune(expected, batches, keep=keep)
    model = ZOO["bert"].build()
    meeting = Meeting(lambda: headprune.prune(model, batches, keep=6))
    handle = model.register_forward_hook(meeting)
    headprune.prune(model, batches, keep=9)
    meeting.thread.join()
    handle.remove()
    assert not meeting.together
    assert same(dict(model.state_dict()), dict(expected.state_dict()))


def test_two_threads_with_models_of_their_own_do_not_wait() -> None:
    models, batches = [ZOO["bert"].build(), ZOO["bert"].build()], bert_batches()
    meeting = Meeting(lambda: headprune.score(models[1], batches, criterion="gnorm"), seconds=60)
    for model in models:
        model.register_forward_hook(meeting)
    headprune.score(models[0], batches, criterion="gnorm")
    meeting.thread.join()
    assert meeting.together


# --- NaN and Inf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "criterion", ["gnorm", "entropy", "his", "taylor", "attribution(steps=2)", "residual-gradient", "residual-error"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("projection", ["query", "value"])
def test_a_bad_weight_is_reported_with_its_site_and_head(criterion: str, value: float, projection: str) -> None:
    model = ZOO["bert"].build()
    with torch.no_grad():
        getattr(model.bert.encoder.layer[1].attention.self, projection).weight[2 * 6 + 1, 3] = value
    with pytest.raises(NonFiniteError, match=r"site 1\b.*head 2\b.*batch 0\b"):
        headprune.score(model, bert_batches(), criterion=criterion)


@pytest.mark.parametrize("criterion", ["gnorm", "entropy", "his", "residual-gradient", "residual-error"])
def test_a_bad_head_keeps_its_original_number_after_removals(criterion: str) -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, [(1, 0), (1, 1)])
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.weight[6 + 1, 3] = torch.nan  # the second of those left
    with pytest.raises(NonFiniteError, match=r"site 1\b.*head 3\b.*batch 0\b"):
        headprune.score(model, bert_batches(), criterion=criterion)


@pytest.mark.parametrize("criterion", ["gnorm", "entropy", "his", "residual-gradient", "residual-error"])
def test_a_bad_input_is_reported_with_its_batch(criterion: str) -> None:
    good, bad = labelled(ZOO["vit"], 0), labelled(ZOO["vit"], 5)
    bad["pixel_values"][1, 0, 3, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"site 0\b.*head 0\b.*batch 1\b"):
        headprune.score(model_of("vit", "dense"), [good, bad], criterion=criterion)


@pytest.mark.parametrize("criterion", ["gnorm", "gnorm(aggregation=batch)"])
def test_an_overflow_of_the_objective_is_reported_too(criterion: str) -> None:
    """The logits are finite, their norm is not, and a gradient of 0 through an infinite norm is no score."""
    model = ZOO["bert"].build()
    with torch.no_grad():
        model.classifier.weight *= 1e30
        assert model(**without_labels(bert_batches()[0])).logits.isfinite().all()
    with pytest.raises(NonFiniteError, match=r"batch 0\b"):
        headprune.score(model, bert_batches(), criterion=criterion)


# --- bad data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["his", "tis", "taylor", "hies", "attribution", "gnorm(objective=loss)"])
def test_missing_labels_are_named_with_the_way_out(criterion: str) -> None:
    with pytest.raises(DataError, match='labels="self"'):
        headprune.score(model_of("bert", "dense"), map(without_labels, bert_batches()), criterion=criterion)


@pytest.mark.parametrize("label", [LABELS, 99, -1])
def test_labels_out_of_range_are_named(label: int) -> None:
    batch = {**bert_batches()[0], "labels": torch.tensor([0, label, 1])}
    with pytest.raises(DataError, match=rf"Label {label} .*0 to {LABELS - 1}"):
        headprune.score(model_of("bert", "dense"), [batch], criterion="his")


def test_token_labels_out_of_range_are_named() -> None:
    for name in ("llama", "bart"):
        batch = labelled(ZOO[name], 0)
        labels = torch.full_like(batch.get("labels", batch["input_ids"]), 61)
        with pytest.raises(DataError, match=r"Label 61 .*0 to 60"):
            headprune.score(model_of(name, "dense"), [{**batch, "labels": labels}], criterion="his")


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.zeros(3, 4, dtype=torch.long), torch.tensor([0.5] * 3)])
def test_labels_that_do_not_fit_the_batch_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"[Ll]abel"):
        headprune.score(model_of("bert", "dense"), [{**bert_batches()[0], "labels": labels}], criterion="his")


def test_labels_of_some_batches_alone_are_refused() -> None:
    """The one label used to be compared with the predictions of all samples."""
    first, second = bert_batches()
    first = {name: value[:1] for name, value in first.items()}
    for batches in ([first, without_labels(second)], [without_labels(second), first]):
        with pytest.raises(DataError, match="Some batches have labels and others have none"):
            headprune.score(model_of("bert", "dense"), batches, criterion="gnorm")
        with pytest.raises(DataError, match="Some batches have labels and others have none"):
            headprune.prune(ZOO["bert"].build(), batches, keep=0.5, criterion="gnorm")
    labelled_part = headprune.score(model_of("bert", "dense"), [first], criterion="gnorm")
    with pytest.raises(DataError, match="Some batches have labels and others have none"):
        labelled_part + headprune.score(model_of("bert", "dense"), [without_labels(second)], criterion="gnorm")


def test_a_wrong_word_for_labels_is_refused() -> None:
    with pytest.raises(DataError, match="given"):
        headprune.score(model_of("bert", "dense"), bert_batches(), criterion="his", labels="own")  # type: ignore[arg-type]


def test_a_dual_encoder_has_no_loss() -> None:
    for labels in ("given", "self"):
        with pytest.raises(DataError, match="labels"):
            headprune.score(model_of("clip", "dense"), [labelled(ZOO["clip"], 0)], criterion="his", labels=labels)  # type: ignore[arg-type]


@pytest.mark.parametrize("criterion", ["gnorm", "entropy", "his", "residual-gradient", "residual-error"])
def test_no_data_is_refused(criterion: str) -> None:
    """No batches at all, a batch without samples, and a batch without tensors."""
    empty = {name: value[:0] for name, value in bert_batches()[0].items()}
    for batches in ([], [empty], [{}], [{"input_ids": None}]):
        with pytest.raises(DataError):
            headprune.score(model_of("bert", "dense"), batches, criterion=criterion)


@pytest.mark.parametrize("batches", [{"input_ids": torch.ones(1, 3, dtype=torch.long)}, [[1, 2, 3]], ["text"], 5])
def test_what_are_no_batches_is_refused(batches: Any) -> None:
    """A batch where batches belong is the mistake that everyone makes once."""
    with pytest.raises(DataError, match=r"[Bb]atch"):
        headprune.score(model_of("bert", "dense"), batches, criterion="gnorm")


def with_arrays(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in batch.items()}


FORMS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]]] = {
    "list of labels": lambda batch: {**batch, "labels": batch["labels"].tolist()},
    "int32 labels": lambda batch: {**batch, "labels": batch["labels"].int()},
    "int16 labels": lambda batch: {**batch, "labels": batch["labels"].short()},
    "numpy mask": lambda batch: {**batch, "attention_mask": batch["attention_mask"].numpy()},
    "lists": lambda batch: {name: value.tolist() for name, value in batch.items()},
    "arrays": with_arrays,
    "int32 arrays": lambda batch: {name: value.astype("int32") for name, value in with_arrays(batch).items()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_lists_arrays_and_other_integers_are_taken_as_tensors(name: str, form: str) -> None:
    model, batch = model_of(name, "dense"), labelled(ZOO[name], 0)
    given = FORMS[form](batch)
    expected, actual = (headprune.score(model, [one], criteria=["his", "gnorm"]) for one in (batch, given))
    assert same(actual.scores, expected.scores)
    assert (actual.loss, actual.metric_value.value) == (expected.loss, expected.metric_value.value)
    values = [headprune.evaluate(model, [one]).value for one in (batch, given)]
    assert values[0] == values[1]
    metrics = [headprune.prune(ZOO[name].build(), [one], keep=0.8).result.metric for one in (batch, given)]
    assert metrics[0] == metrics[1]
    weights = []
    for one in (batch, given):
        repaired = ZOO[name].build()
        headprune.remove(repaired, [(0, 1)], repair="lstsq", batches=[one], verify=one)
        weights.append(repaired.get_submodule(headprune.resolve(repaired)[0].o).weight)
    assert torch.equal(*weights)


def test_lists_that_are_no_tensors_are_refused() -> None:
    batch = bert_batches()[0]
    for name, value in (("input_ids", [[5, 6, 7], [5, 6], [5]]), ("labels", ["good", "bad", "good"])):
        with pytest.raises(DataError, match=rf"{name} of batch 0 cannot become a tensor .*rows of equal length"):
            headprune.score(model_of("bert", "dense"), [{**batch, name: value}], criterion="gnorm")


class NarrowBert(transformers.BertForSequenceClassification):
    """Its forward takes three arguments and no others."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_an_entry_that_the_model_does_not_take_is_named() -> None:
    model = ZOO["bert"].build()
    model.__class__ = NarrowBert
    batch = bert_batches()[0]
    wrong = {**batch, "index": torch.arange(3)}
    for call in (
        lambda: headprune.score(model, [batch, wrong], criterion="gnorm"),
        lambda: headprune.prune(model, [batch, wrong], keep=0.5),
        lambda: headprune.evaluate(model, [batch, wrong]),
    ):
        with pytest.raises(DataError, match="Batch 1 has an entry 'index', which NarrowBert does not take; leave it"):
            call()
    assert headprune.score(model, [batch], criterion="gnorm").samples == 3
