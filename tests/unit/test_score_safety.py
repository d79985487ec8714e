"""`score` leaves a model as it was, whatever happens, and refuses what cannot be scored in one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import DataError, NonFiniteError
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
    with pytest.raises((DataError, IndexError, NonFiniteError, KeyboardInterrupt)):
        headprune.score(model, [good, bad], criterion=criterion, progress=progress)
    after = state(model)
    assert [key for key in before if not same(before[key], after[key])] == []
    again = headprune.score(ZOO["bert"].build(), [good], criterion="entropy").scores
    assert torch.equal(again, headprune.score(ZOO["bert"].build(), [good], criterion="entropy").scores)


def test_training_mode_and_no_grad_around_it_change_nothing() -> None:
    model, batches = ZOO["bert"].build(), bert_batches()
    expected = headprune.score(model, batches, criteria=EVERY).scores
    with torch.no_grad():
        found = headprune.score(model.train(), batches, criteria=EVERY).scores
    assert same(found, expected)


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
