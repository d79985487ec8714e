"""Metrics against closed forms, perplexity against a plain loop, and a metric of one's own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch.nn import functional

import headprune
from headprune.errors import DataError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS, agreement, choose_metric
from headprune.measure.predictions import Predictions
from headprune.tasks import task_of
from oracles import IGNORED
from run_helpers import bert
from score_helpers import labelled
from task_models import CASES
from zoo import VOCAB, ZOO, text_batch

LABELS = [0, 0, 1, 1, 1, 2, 2, 0]
PREDICTIONS = [0, 1, 1, 1, 0, 2, 1, 0]


TASK = headprune.task_of(bert())


class FixedPredictions(Predictions):
    """Predictions that are given instead of computed."""

    def __init__(self, labels: list[Any], predictions: list[Any]) -> None:
        super().__init__(TASK)
        self._labels, self._values = [torch.tensor(labels)], [torch.tensor(predictions)]
        self.samples = len(labels)
        self._sample_ids = [torch.arange(self.samples)]


def value(name: str, labels: Any = None, predictions: Any = None) -> float:
    return METRICS[name].of(FixedPredictions(labels or LABELS, predictions or PREDICTIONS)).value


def test_accuracy() -> None:
    assert value("accuracy") == 5 / 8


def test_f1_is_the_mean_over_classes() -> None:
    """Per class 2 tp / (2 tp + fp + fn): 4/6, 4/7, 2/3."""
    assert value("f1") == pytest.approx((4 / 6 + 4 / 7 + 2 / 3) / 3)


def test_matthews() -> None:
    """For two classes (tp tn - fp fn) / sqrt((tp+fp)(tp+fn)(tn+fp)(tn+fn))."""
    labels, predictions = [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0]
    assert value("matthews", labels, predictions) == pytest.approx((3 * 2 - 1 * 1) / math.sqrt(4 * 4 * 3 * 3))
    assert value("matthews", [0, 1, 0, 1], [1, 1, 1, 1]) == 0.0


def test_pearson() -> None:
    labels, predictions = [1.0, 2.0, 4.0, 3.5], [0.9, 2.5, 3.0, 3.1]
    assert value("pearson", labels, predictions) == pytest.approx(numpy.corrcoef(labels, predictions)[0, 1], rel=1e-6)
    assert value("pearson", [1.0, 2.0, 3.0], [-2.0, -4.0, -6.0]) == pytest.approx(-1.0)
    assert value("pearson", [1.0, 2.0, 3.0], [0.5, 0.5, 0.5]) == 0.0  # a constant goes with nothing


def test_what_is_worse() -> None:
    assert METRICS["accuracy"].drop(0.9, 0.85) == pytest.approx(0.05)
    assert METRICS["pearson"].drop(0.5, 0.6) == pytest.approx(-0.1)
    assert METRICS["perplexity"].drop(20.0, 25.0) == pytest.approx(0.25)
    assert [name for name, metric in METRICS.items() if not metric.higher_is_better] == [
        "mse",
        "perplexity",
        "error_rate",
    ]


# --- which metric ---

TASKS = {"bert": "accuracy", "vit": "accuracy", "gpt2": "perplexity", "llama-gqa": "perplexity", "t5": "perplexity"}


@pytest.mark.parametrize("name", TASKS)
def test_the_usual_metric_of_a_task(name: str) -> None:
    model = ZOO[name].build()
    predictions = Evaluator([labelled(ZOO[name], 0)])(model, headprune.resolve(model))
    assert choose_metric(None, predictions).name == TASKS[name]


def masked_lm() -> Any:
    return bert(transformers.BertForMaskedLM)


def masked_batch(hidden: int) -> dict[str, torch.Tensor]:
    batch = text_batch(0)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[:, 1 : 1 + hidden] = batch["input_ids"][:, 1 : 1 + hidden]
    return {**batch, "labels": labels}


@pytest.mark.parametrize("hidden", [1, 2])
def test_a_masked_language_model_is_judged_by_perplexity(hidden: int) -> None:
    """With one hidden token per text there are as many predictions as samples, as a classifier has."""
    model = masked_lm()
    predictions = Evaluator([masked_batch(hidden)])(model, headprune.resolve(model))
    assert choose_metric(None, predictions).name == "perplexity"


def test_a_causal_language_model_on_pairs_of_tokens_is_judged_by_perplexity() -> None:
    model = ZOO["gpt2"].build()
    ids = torch.tensor([[7, 8], [9, 10]])
    predictions = Evaluator([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])(
        model, headprune.resolve(model)
    )
    assert choose_metric(None, predictions).name == "perplexity"


def test_unknown_metrics_are_refused_with_the_nearest_name() -> None:
    predictions = FixedPredictions(LABELS, PREDICTIONS)
    with pytest.raises(DataError, match="no metric 'matthew'; did you mean 'matthews'"):
        choose_metric("matthew", predictions)
    with pytest.raises(DataError, match="no metric 'xyz'; there are: accuracy, subset_accuracy, f1, matthews"):
        choose_metric("xyz", predictions)


def test_without_labels_only_fidelity_can_be_measured() -> None:
    model = ZOO["bert"].build()
    predictions = Evaluator([ZOO["bert"].batch(0)])(model, headprune.resolve(model))
    assert predictions.labels is None
    assert choose_metric(None, predictions).name == "fidelity"
    with pytest.raises(DataError, match="no labels, so accuracy cannot be measured"):
        choose_metric("accuracy", predictions)
    own = choose_metric(lambda labels, predictions: 1.0, predictions)
    with pytest.raises(DataError, match="needs labels"):
        own.of(predictions)


# --- perplexity ---


def by_hand(model: Any, batches: list[Any]) -> float:
    """exp of the mean negative log-likelihood of every token that is asked for, one token at a time."""
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.double()
        for row in range(len(logits)):
            for place in range(logits.shape[1]):
                if "labels" in batch:
                    target, source = int(batch["labels"][row, place]), place
                else:
                    there = place > 0 and bool(batch["attention_mask"][row, place - 1 : place + 1].all())
                    target, source = (int(batch["input_ids"][row, place]), place - 1) if there else (IGNORED, 0)
                if target != IGNORED:
                    total -= float(functional.log_softmax(logits[row, source], dim=-1)[target])
                    count += 1
    return math.exp(total / count)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "t5", "bart"])
def test_perplexity_is_that_of_a_plain_loop(name: str) -> None:
    """Texts of different lengths: a mean of means would be another number."""
    model, batches = ZOO[name].build(), [labelled(ZOO[name], 0), labelled(ZOO[name], 1)]
    predictions = Evaluator(batches)(model, headprune.resolve(model))
    assert METRICS["perplexity"].of(predictions).value == pytest.approx(by_hand(model, batches), rel=1e-5)
    assert predictions.loss != pytest.approx(predictions.token_loss, rel=1e-4)


def test_perplexity_of_a_masked_language_model() -> None:
    model, batches = masked_lm(), [masked_batch(3), masked_batch(1)]
    predictions = Evaluator(batches)(model, headprune.resolve(model))
    assert METRICS["perplexity"].of(predictions).value == pytest.approx(by_hand(model, batches), rel=1e-5)


def test_perplexity_of_knowing_nothing_is_the_vocabulary() -> None:
    model = ZOO["gpt2"].build()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    predictions = Evaluator([labelled(ZOO["gpt2"], 0)])(model, headprune.resolve(model))
    assert METRICS["perplexity"].of(predictions).value == pytest.approx(VOCAB, rel=1e-5)


# --- agreement ---


def test_agreement_is_the_share_of_equal_predictions() -> None:
    labels = [0] * 4
    assert agreement(FixedPredictions(labels, [0, 1, 2, 1]), FixedPredictions(labels, [0, 1, 1, 1])) == 0.75
    assert agreement(FixedPredictions(labels, [0, 1, 2, 1]), Predictions(headprune.task_of(bert()))) is None


def test_agreement_of_regressors_is_their_correlation() -> None:
    one, other = [1.0, 2.0, 4.0], [1.1, 1.9, 3.0]
    assert agreement(FixedPredictions(one, one), FixedPredictions(one, other)) == pytest.approx(
        numpy.corrcoef(one, other)[0, 1]
    )
    assert agreement(FixedPredictions(one, one), FixedPredictions(one, one)) == pytest.approx(1.0)


# --- intervals ---


def bootstrap(name: str, told: FixedPredictions, draws: int = 1000) -> tuple[float, float]:
    """The slow, obvious way: draw as many samples with replacement, again and again."""
    generator = torch.Generator().manual_seed(0)
    labels, predictions = told.labels, told.predictions
    values = []
    for _ in range(draws):
        rows = torch.randint(0, len(labels), (len(labels),), generator=generator)
        values.append(METRICS[name].of(FixedPredictions(labels[rows].tolist(), predictions[rows].tolist())).value)
    actual = torch.tensor(values).quantile(torch.tensor([0.025, 0.975]))
    return float(actual[0]), float(actual[1])


@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews", "pearson", "mse"])
def test_intervals_are_those_of_the_bootstrap(name: str) -> None:
    """To a sixth of their width: both are estimates from 120 samples, and the bootstrap is one from 1000 draws."""
    generator = torch.Generator().manual_seed(1)
    if name in ("pearson", "mse"):
        labels = torch.randn(120, generator=generator)
        predictions = labels + 0.7 * torch.randn(120, generator=generator)
    else:
        labels = torch.randint(0, 3, (120,), generator=generator)
        wrong = torch.rand(120, generator=generator) < 0.3
        predictions = torch.where(wrong, torch.randint(0, 3, (120,), generator=generator), labels)
    told = FixedPredictions(labels.tolist(), predictions.tolist())
    measured = METRICS[name].of(told)
    low, high = bootstrap(name, told)
    assert measured.interval.low == pytest.approx(low, abs=(high - low) / 6)
    assert measured.interval.high == pytest.approx(high, abs=(high - low) / 6)
    assert float(measured.per_sample.mean()) == pytest.approx(measured.value)
    assert len(measured.per_sample) == 120


def test_the_interval_of_accuracy_is_wilsons() -> None:
    """Of 10 in 10: the lower end is n / (n + z^2)."""
    measured = METRICS["accuracy"].of(FixedPredictions([1] * 10, [1] * 10))
    assert (measured.value, measured.interval.high) == (1.0, 1.0)
    assert measured.interval.low == pytest.approx(10 / (10 + 1.959964**2), rel=1e-6)


def test_tokens_of_one_sample_are_not_independent() -> None:
    """Two samples of many tokens, one right and one wrong throughout, know little, however many tokens there are."""
    told = FixedPredictions([1] * 200, [1] * 100 + [0] * 100)
    told._sample_ids, told.samples = [torch.arange(200) // 100], 2
    apart = METRICS["accuracy"].of(FixedPredictions([1] * 200, [1] * 100 + [0] * 100)).interval
    together = METRICS["accuracy"].of(told).interval
    assert together.high - together.low > 5 * (apart.high - apart.low)


def test_metrics_without_labels() -> None:
    model = bert(transformers.BertModel)
    batch = text_batch(0)
    dense = Evaluator([batch])(model, headprune.resolve(model))
    headprune.remove(model, [(0, 0), (1, 2)])
    pruned = Evaluator([batch])(model, headprune.resolve(model))
    metric = choose_metric(None, dense)
    assert (metric.name, metric.of(dense, dense).value) == ("fidelity", pytest.approx(1.0))
    fresh = bert(transformers.BertModel)
    means = []
    with torch.no_grad():
        for one in (fresh, model):
            states = one(**batch).last_hidden_state
            own = [states[row, batch["attention_mask"][row].bool()].mean(0) for row in range(3)]
            means.append(torch.stack(own))
    expected = functional.cosine_similarity(*means).mean()
    assert metric.of(pruned, dense).value == pytest.approx(float(expected), rel=1e-5)
    assert metric.of(pruned, dense).value < 0.9999


# --- in a run ---


def test_regression_in_a_run() -> None:
    model = bert(num_labels=1, problem_type="regression")
    batches = [{**text_batch(seed, size=5), "labels": torch.linspace(-1, 1, 5)} for seed in (0, 1)]
    with torch.no_grad():
        said = torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits[:, 0] for b in batches])
    result = headprune.prune(model, batches, criterion="his", keep=6)
    assert result.metric.name == "pearson"
    labels = torch.cat([batch["labels"] for batch in batches])
    assert result.trajectory[0].metric == pytest.approx(numpy.corrcoef(labels, said)[0, 1], rel=1e-4)
    assert result.trajectory[0].loss == pytest.approx(float((said - labels).square().mean()), rel=1e-5)
    assert result.trajectory[0].agreement == pytest.approx(1.0)
    assert result.trajectory[-1].agreement < 0.9999


def test_ones_own_metric_is_a_function() -> None:
    seen: list[tuple[Any, Any]] = []

    def share_of_twos(labels: numpy.ndarray, predictions: numpy.ndarray) -> float:
        seen.append((labels, predictions))
        return float((predictions == 2).mean())

    batches = [labelled(ZOO["bert"], 0), labelled(ZOO["bert"], 1)]
    dense = ZOO["bert"].build()
    with torch.no_grad():
        said = [dense(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1) for batch in batches]
    result = headprune.prune(ZOO["bert"].build(), batches, keep=10, metric=share_of_twos)
    assert result.metric.name == "share_of_twos"
    assert len(seen) == len(result.trajectory) == 3
    assert numpy.array_equal(seen[0][0], torch.cat([batch["labels"] for batch in batches]).numpy())
    assert numpy.array_equal(seen[0][1], torch.cat(said).numpy())
    assert result.trajectory[0].metric == float((torch.cat(said) == 2).double().mean())


@pytest.mark.parametrize("constant", [0.0, 0.5, 0.1, -0.37, 1234.567, 1e-9])
@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_a_constant_prediction_correlates_with_nothing(constant: float, rounding: float) -> None:
    """A model without heads may say the same of everything, but for the rounding of float32."""
    labels = numpy.linspace(-1, 1, 28)
    said = constant * (1 + rounding * numpy.cos(numpy.arange(28)))
    assert value("pearson", labels.tolist(), said.tolist()) == 0.0
    assert (
        agreement(FixedPredictions(labels.tolist(), labels.tolist()), FixedPredictions(labels.tolist(), said.tolist()))
        == 0.0
    )
    small = [constant + 1e-3 * label for label in labels.tolist()]  # a small effect is none that is rounded away
    assert value("pearson", labels.tolist(), small) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews"])
def test_metrics_by_name_in_a_run(name: str) -> None:
    from sklearn import metrics

    batches = [labelled(ZOO["bert"], seed) for seed in range(4)]
    model = ZOO["bert"].build()
    with torch.no_grad():
        model.classifier.bias.zero_()
        said = torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits.argmax(-1) for b in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda a, b: metrics.f1_score(a, b, average="macro"),
        "matthews": metrics.matthews_corrcoef,
    }
    result = headprune.prune(model, batches, keep=11, metric=name)
    assert result.trajectory[0].metric == pytest.approx(functions[name](labels, said))


def test_a_metric_of_another_task_is_refused() -> None:
    """scikit-learn would raise an error of its own, which the program would take for a bug."""
    model = bert(num_labels=1, problem_type="regression")
    batches = [{**text_batch(0), "labels": torch.tensor([0.1, 0.2, 0.3])}]
    for name in ("accuracy", "f1", "matthews", "perplexity"):
        with pytest.raises(DataError, match=name):
            headprune.prune(model, batches, metric=name, keep=11)


def test_a_transcript_as_long_as_its_frames_is_a_text() -> None:
    """A new token in every frame: as many as there are logits, and still one prediction per sample."""
    task = task_of(next(case for case in CASES if case.id == "ctc-wav2vec2").build())
    path = torch.tensor([[3, 4, 5], [6, 7, 7]])
    logits = functional.one_hot(path, 12).double()
    measured = Predictions(task)
    measured.add({"input_values": torch.zeros(2, 3)}, SimpleNamespace(logits=logits), logits)
    assert measured.values.tolist() == [[3, 4, 5], [6, 7, IGNORED]]
    other = Predictions(task)
    path = torch.tensor([[3, 4, 5], [6, 6, 6]])
    other.add({"input_values": torch.zeros(2, 3)}, None, functional.one_hot(path, 12).double())
    assert METRICS["fidelity"].of(measured, measured).value == 1.0
    assert METRICS["fidelity"].of(other, measured).value == 0.5  # of two transcripts one is the same
