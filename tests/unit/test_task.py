"""What a model predicts, in the cases where a guess used to be silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from sklearn.metrics import f1_score
from torch.nn import functional

import headprune
from headprune.batches import real_keys
from headprune.errors import DataError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS, choose_metric
from helpers import kept_heads
from run_helpers import bert
from score_helpers import model_of
from task_models import CASES, MyGPT, TaskCase, without_padded_predictions
from zoo import LABELS, ZOO, text_batch

BY_NAME = {case.id: case for case in CASES}


def metric_value(model: Any, batch: Any, metric: str | None = None) -> tuple[str, float]:
    predictions = Evaluator([batch])(model, headprune.resolve(model))
    chosen = choose_metric(metric, predictions)
    return chosen.name, chosen.of(predictions).value


def said(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


# --- scores, prunes and measures: every task, end to end ---


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_task_is_scored_and_pruned_by_the_default(case: TaskCase) -> None:
    model, batches = case.build(), [case.batch(0), case.batch(1)]
    try:
        sites = headprune.resolve(model)
    except headprune.HeadpruneError as refused:
        pytest.skip(f"a family that is not read yet: {refused}")
    task = headprune.task_of(model)
    before = sum(site.heads for site in sites)
    result = headprune.prune(model, batches, keep=0.5, every=3)
    assert sum(len(kept) for kept in kept_heads(model)) <= before / 2 + 1
    assert result.metric.name in task.metrics
    assert all(step.metric == step.metric and step.agreement is not None for step in result.trajectory)
    assert result.trajectory[0].interval is not None
    assert result.trajectory[0].agreement == pytest.approx(1.0)
    if case.name != "bert-beyond":  # where a sample has half a loss, which alone the model does not say
        assert result.trajectory[0].loss == pytest.approx(own_losses(case.build(), batches), rel=1e-4)


def own_losses(model: Any, batches: list[Any]) -> float:
    """The mean over samples of what the model itself says of each alone; samples that do not count left out."""
    losses = []
    with torch.no_grad():
        for batch in batches:
            for row in range(3):
                sample = {name: value[row : row + 1] for name, value in batch.items()}
                if "start_positions" in sample:  # whose loss the model computes with the logits of padding
                    length = int(sample["attention_mask"].sum())
                    sample = {name: value[:, :length] if value.dim() > 1 else value for name, value in sample.items()}
                loss = float(model(**without_padded_predictions(sample)).loss)
                losses += [loss] if loss == loss else []
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", ["token-classification-bert", "causal-lm-llama", "sequence-classification-bert"])
def test_losses_over_samples_and_over_tokens(name: str) -> None:
    """Of two batches, so that neither is a mean of means by chance; samples have different numbers of labels."""
    case = BY_NAME[name]
    model, batches = case.build(), [case.batch(0), {key: value[:2] for key, value in case.batch(1).items()}]
    result = headprune.score(model, batches, criterion="gnorm")
    alone = [
        {key: value[row : row + 1] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]
    with torch.no_grad():
        losses = torch.stack([model(**sample).loss for sample in alone])
    shift = 1 if name.startswith("causal-lm") else 0  # the first token has no prediction
    labelled = [sample["labels"] if sample["labels"].dim() == 1 else sample["labels"][:, shift:] for sample in alone]
    counts = torch.tensor([int((labels != -100).sum()) for labels in labelled])
    assert result.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert result.token_loss == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-5)
    assert (result.loss == pytest.approx(result.token_loss, rel=1e-6)) == (name == "sequence-classification-bert")


LABELLED_CRITERIA = ["gnorm", "his", "taylor", "entropy", "residual-error"]


@pytest.mark.parametrize(
    "name", ["question-answering-bert", "multiple-choice-bert", "token-classification-bert", "ctc-wav2vec2"]
)
def test_scores_of_other_tasks_do_not_depend_on_the_batch(name: str) -> None:
    """Samples one by one and three at once: rows of a sample, spans and frames are told apart as they should be."""
    case = BY_NAME[name]
    model, batch = case.build().double(), case.batch(0)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    criteria = [*LABELLED_CRITERIA, "residual-gradient"]
    together = headprune.score(model, [batch], criteria=criteria).scores
    alone = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(3)]
    apart = headprune.score(model, alone, criteria=criteria).scores
    for criterion in criteria:
        scale = float(together[criterion].abs().max())
        assert torch.allclose(together[criterion], apart[criterion], rtol=1e-7, atol=1e-9 * scale), criterion


def test_his_of_question_answering_is_the_gradient_at_a_gate() -> None:
    case = BY_NAME["question-answering-bert"]
    model, batch = case.build().double(), case.batch(0)
    actual = headprune.score(model, [batch], criterion="his").scores
    gates = torch.ones(3, 3, 4, dtype=torch.float64, requires_grad=True)
    with headprune.gated(model, gates):
        output = model(**{name: value for name, value in batch.items() if not name.endswith("positions")})
    padding = batch["attention_mask"] == 0
    start, end = (
        functional.cross_entropy(logits.masked_fill(padding, -torch.inf), targets, reduction="none")
        for logits, targets in (
            (output.start_logits, batch["start_positions"]),
            (output.end_logits, batch["end_positions"]),
        )
    )
    ((start + end) / 2).sum().backward()
    assert torch.allclose(actual, gates.grad.abs().mean(0), rtol=1e-9)


@pytest.mark.parametrize("criterion", ["his", "attribution"])
def test_padding_has_no_part_in_the_softmax_over_tokens(criterion: str) -> None:
    """The model itself counts the logits of padding, so its loss of a sample depends on the batch."""
    model, ids = BY_NAME["question-answering-bert"].build().double(), torch.arange(5, 14).view(1, 9)
    lengths, starts = (4, 9, 6), torch.tensor([1, 3, 5])
    alone = [
        {"input_ids": ids[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
        | {"start_positions": starts[[row]], "end_positions": starts[[row]]}
        for row, length in enumerate(lengths)
    ]
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    padded = torch.nn.functional.pad(ids, (0, 3)).expand(3, 12) * mask
    together = {"input_ids": padded, "attention_mask": mask, "start_positions": starts, "end_positions": starts}
    expected, actual = (headprune.score(model, batches, criterion=criterion) for batches in (alone, [together]))
    torch.testing.assert_close(actual.scores, expected.scores)
    with torch.no_grad():
        own = sum(float(model(**sample).loss) for sample in alone) / 3
    beyond = {**together, "end_positions": torch.tensor([9, 3, 5])}  # in a batch of its own this end is beyond the text
    first = {**alone[0], "end_positions": torch.tensor([9])}
    losses = [headprune.score(model, batches, criterion="his").loss for batches in ([first, *alone[1:]], [beyond])]
    assert actual.loss == pytest.approx(own)
    assert losses[0] == pytest.approx(losses[1])


def test_his_of_multiple_choice_is_the_gradient_at_a_gate() -> None:
    """A gate of a sample is on all its choices."""
    case = BY_NAME["multiple-choice-bert"]
    model, batch = case.build().double(), case.batch(0)
    actual = headprune.score(model, [batch], criterion="his").scores
    gates = torch.ones(3, 3, 4, dtype=torch.float64, requires_grad=True)
    with headprune.gated(model, gates.repeat_interleave(2, dim=0)):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    functional.cross_entropy(logits, batch["labels"], reduction="sum").backward()
    assert torch.allclose(actual, gates.grad.abs().mean(0), rtol=1e-9)


# --- what used to be guessed ---


def test_regression_with_a_column_of_labels() -> None:
    case = BY_NAME["sequence-classification-regression-column-electra"]
    name, value = metric_value(case.build(), case.batch(0))
    assert name == "pearson"
    assert -1 <= value <= 1


def test_multi_label_has_one_definition() -> None:
    case = BY_NAME["sequence-classification-multi-label-roberta"]
    model, batch = case.build(), case.batch(0)
    predicted = (said(model, batch) > 0).long()
    expected = f1_score(batch["labels"], predicted, average="macro", zero_division=0)
    assert metric_value(model, batch) == ("f1", pytest.approx(expected))
    scored = headprune.score(model, [batch], criterion="his")
    assert (scored.metric.name, scored.metric_value.value) == ("f1", pytest.approx(expected))
    assert headprune.prune(case.build(), [batch], keep=11).trajectory[0].metric == pytest.approx(expected)
    subset = float((predicted == batch["labels"].long()).all(1).double().mean())
    assert metric_value(model, batch, "subset_accuracy")[1] == subset == scored.accuracy


def test_a_sample_whose_label_does_not_count() -> None:
    model, batch = bert(), {**text_batch(0), "labels": torch.tensor([0, -100, 1])}
    right = (said(model, batch).argmax(-1) == batch["labels"])[[0, 2]].double().mean()
    assert metric_value(model, batch) == ("accuracy", float(right))
    assert headprune.score(model, [batch], criterion="gnorm").accuracy == float(right)


def test_token_classes_are_judged_at_labelled_tokens() -> None:
    case = BY_NAME["token-classification-bert"]
    model, batch = case.build(), case.batch(0)
    counted = batch["labels"] != -100
    right = (said(model, batch).argmax(-1) == batch["labels"])[counted].double().mean()
    assert metric_value(model, batch) == ("accuracy", pytest.approx(float(right)))


def test_a_subclass_predicts_what_its_class_predicts() -> None:
    assert headprune.task_of(BY_NAME["causal-lm-own-gpt2"].build()).name == "causal-lm"
    assert issubclass(MyGPT, transformers.GPT2LMHeadModel)

    class Mine(transformers.BertForSequenceClassification):
        pass

    assert headprune.task_of(Mine(transformers.BertConfig(hidden_size=8, num_attention_heads=2))).name == (
        "sequence-classification"
    )


def test_a_task_by_name() -> None:
    model, batch = (
        bert(),
        {**text_batch(0), "labels": torch.tensor([[0.1, 1.0, -2.0], [1.0, 0.0, 0.3], [0.5, 2.0, 1.0]])},
    )
    as_numbers = headprune.score(model, [batch], criterion="his", task="regression")
    assert as_numbers.metric.name == "pearson"
    assert as_numbers.loss == pytest.approx(float((said(model, batch) - batch["labels"]).square().mean()), rel=1e-5)
    with pytest.raises(DataError, match="no task 'token-clasification'; did you mean 'token-classification'"):
        headprune.score(model, [batch], task="token-clasification")


def test_labels_that_do_not_fit_are_refused() -> None:
    model = bert()
    for labels in (torch.tensor([0, 1, LABELS]), torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.zeros(3, 2)):
        with pytest.raises(DataError):
            headprune.score(model, [{**text_batch(0), "labels": labels}], criterion="his")


# --- real tokens ---


def four_dimensional(mask: torch.Tensor, form: str) -> torch.Tensor:
    size, tokens = mask.shape
    allowed = mask[:, None, None, :].bool().expand(size, 1, tokens, tokens)
    if "causal" in form:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if "open" in form:  # rows without a key have all of them, as transformers makes masks for sdpa
        allowed = allowed | ~allowed.any(-1, keepdim=True)
    if "float" in form:
        return torch.zeros(allowed.shape).masked_fill(~allowed, float(form.split()[-1]))
    return allowed


LEAST = torch.finfo(torch.float32).min
ADDITIVE = [f"float {least}" for least in (LEAST, -torch.inf, -1e9, -1e4)]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("rows", ["", "causal ", "causal open "])
@pytest.mark.parametrize("form", ["bool", *ADDITIVE])
def test_real_tokens_of_a_mask_with_queries(form: str, rows: str, left: bool) -> None:
    mask, form = text_batch(0, left=left)["attention_mask"], rows + form
    assert torch.equal(real_keys(four_dimensional(mask, form)), mask.bool())
    assert torch.equal(real_keys({"full_attention": four_dimensional(mask, form)}), mask.bool())
    assert torch.equal(real_keys(mask), mask.bool())
    assert real_keys(torch.zeros(2, 1, 4, 4)).all()  # added to the scores, and nothing is masked
    assert real_keys(None) is None


CRITERIA = ["gnorm", "his", "entropy", "taylor", "residual-gradient", "residual-error", "elimination", "wanda"]


def both_masks(name: str, form: str, seed: int = 0, *, left: bool = False) -> tuple[Any, Any]:
    """A batch with a mask of two dimensions, and with one of four in this form."""
    batch = text_batch(seed, left=left)
    if name == "bert":
        batch["labels"] = torch.tensor([0, 1, 2])
    else:  # which counts positions by the mask where there is one of two dimensions
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    wide = four_dimensional(batch["attention_mask"], form if name == "bert" else f"causal {form}")
    return batch, {**batch, "attention_mask": wide.double() if wide.is_floating_point() else wide}


@pytest.mark.parametrize("form", ["bool", "float -1e9", "float -1e4"])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_masks_of_four_dimensions_score_like_those_of_two(name: str, criterion: str, form: str) -> None:
    """Padding used to count as tokens, and gnorm was off by a factor of two or three."""
    model = model_of(name, "dense")
    batch, wide = both_masks(name, form)
    one, other = (headprune.score(model, [given], criterion=criterion) for given in (batch, wide))
    assert torch.allclose(one.scores, other.scores, rtol=1e-9), criterion
    assert one.tokens == other.tokens == int(batch["attention_mask"].sum())
    assert one.loss == pytest.approx(other.loss, rel=1e-9)
    assert one.metric_value.value == pytest.approx(other.metric_value.value, rel=1e-9)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("form", ["open bool", "open float -1e9"])
def test_rows_of_padding_in_front_of_a_text_do_not_count(form: str, criterion: str) -> None:
    model = model_of("llama", "dense")
    batch, wide = both_masks("llama", form, left=True)
    one, other = (headprune.score(model, [given], criterion=criterion) for given in (batch, wide))
    assert torch.allclose(one.scores, other.scores, rtol=1e-9), criterion
    assert one.tokens == other.tokens == int(batch["attention_mask"].sum())
    assert one.loss == pytest.approx(other.loss, rel=1e-9)


@pytest.mark.parametrize("form", ["float -1e9", "float -1e4"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_masks_of_four_dimensions_repair_like_those_of_two(name: str, form: str) -> None:
    refitted = []
    for number in (0, 1):
        model = ZOO[name].build().double()
        headprune.remove(
            model, [(1, 0)], repair="lstsq", batches=[both_masks(name, form, seed)[number] for seed in (0, 1)]
        )
        refitted.append(model.get_submodule(headprune.resolve(model)[1].o).weight)
    assert torch.allclose(*refitted, rtol=1e-9, atol=1e-12)


def test_tokens_of_an_image_are_its_patches() -> None:
    result = headprune.score(ZOO["vit"].build(), [ZOO["vit"].batch(0)], criterion="gnorm")
    assert (result.samples, result.tokens) == (3, 3 * 5)  # 2 x 2 patches and a class token


# --- without labels, without a head ---


@pytest.mark.parametrize("name", ["clip-text", "clip-vision", "siglip-vision", "clip"])
def test_models_without_a_head_are_pruned_by_fidelity(name: str) -> None:
    model = ZOO[name].build()
    result = headprune.prune(model, [ZOO[name].batch(0), ZOO[name].batch(1)], keep=0.5)
    assert result.metric.name == "fidelity"
    assert result.trajectory[0].metric == pytest.approx(1.0)
    assert 0 < result.result.metric < 1
    assert result.result.heads == result.trajectory[0].heads // 2


def test_a_sentence_encoder_is_pruned_by_the_defaults() -> None:
    model = bert(transformers.BertModel)
    dense = bert(transformers.BertModel)
    held_out = [text_batch(7), text_batch(8)]
    result = headprune.prune(model, [text_batch(0), text_batch(1)], keep=6, evaluation=held_out)
    cosines = []
    with torch.no_grad():
        for batch in held_out:
            real = batch["attention_mask"].bool()
            for row in range(3):
                one, other = (m(**batch).last_hidden_state[row, real[row]].mean(0) for m in (dense, model))
                cosines.append(float(functional.cosine_similarity(one, other, dim=0)))
    assert result.metric.name == "fidelity"
    assert result.result.metric == pytest.approx(sum(cosines) / len(cosines), rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_classifiers_without_labels_are_judged_by_agreement(name: str) -> None:
    model = ZOO[name].build()
    batches = [ZOO[name].batch(0), ZOO[name].batch(1)]
    result = headprune.prune(model, batches, keep=4)
    assert result.metric.name == "fidelity"
    assert [step.metric for step in result.trajectory] == [step.agreement for step in result.trajectory]
    with pytest.raises(DataError, match="needs labels"):
        headprune.prune(ZOO[name].build(), batches, keep=4, criterion="his")


def test_every_metric_of_a_task_exists() -> None:
    for case in CASES:
        assert set(headprune.task_of(case.build()).metrics) <= set(METRICS)


def test_quality_is_taken_of_the_batch_that_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are on the model's device, so labels must be too: the prepared batch counts, not the caller's."""
    batch = {**text_batch(0), "labels": torch.tensor([0, 1, 2])}
    moved = torch.tensor([2, 2, 0])
    kind = type(headprune.task_of(bert()))
    monkeypatch.setattr(kind, "prepare", lambda self, given, device: {**given, "labels": moved})
    assert torch.equal(headprune.score(bert(), [batch], criterion="gnorm").labels, moved)
    model = bert()
    assert torch.equal(Evaluator([batch])(model, headprune.resolve(model)).labels, moved)
