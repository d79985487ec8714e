"""Metrics by name, or a user's own function: a value, its interval, and a value per sample."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import torch

from headprune.errors import DataError, FormerName
from headprune.measure.intervals import Interval, interval, ratio_per_sample
from headprune.measure.predictions import Predictions
from headprune.tasks import IGNORED

MetricFunction = Callable[[numpy.ndarray, numpy.ndarray], float]  # (labels, predictions) -> value
Shares = tuple[torch.Tensor, torch.Tensor]  # numerators and denominators of a ratio, one per sample


@dataclass(frozen=True)
class MetricValue:
    """A metric's value, its 95 % interval, and a value per sample."""

    value: float
    interval: Interval | None = None
    per_sample: torch.Tensor | None = None  # their mean is the value, or its logarithm for perplexity

    outcomes = FormerName("per_sample")


@dataclass(frozen=True)
class Metric:
    """A metric of predictions; some metrics compare them with those of the dense model, the `reference`."""

    name: str
    measure: Callable[[Predictions, Predictions], MetricValue]
    higher_is_better: bool = True
    needs_labels: bool = True
    relative: bool = False  # whether a drop is a share of the dense value
    logarithmic: bool = False  # whether values per sample average to the logarithm

    def of(self, predictions: Predictions, reference: Predictions | None = None) -> MetricValue:
        return self.measure(predictions, predictions if reference is None else reference)

    def drop(self, dense: float, value: float) -> float:
        """How much worse `value` is than `dense`: a difference, or for perplexity the relative rise."""
        worse = dense - value if self.higher_is_better else value - dense
        return worse / abs(dense) if self.relative and dense else worse


def choose_metric(metric_or_name: str | MetricFunction | None, predictions: Predictions) -> Metric:
    """The named metric, or the default of the task; without labels, fidelity to the dense model."""
    task = predictions.task
    if callable(metric_or_name):
        return Metric(getattr(metric_or_name, "__name__", "metric"), _custom_metric(metric_or_name))
    labelled = predictions.labels is not None
    name = metric_or_name or (task.metrics[0] if labelled or task.metrics[0] == "fidelity" else "fidelity")
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METRICS)}."
        raise DataError(f"There is no metric {name!r}; {hint}")
    metric = METRICS[name]
    fitting = (*task.metrics, *(["accuracy"] if "subset_accuracy" in task.metrics else []), "fidelity")
    if name not in fitting:
        raise DataError(f"{name} does not fit a model of the task {task.name!r}; use {' or '.join(fitting)}.")
    if metric.needs_labels and not labelled:
        raise DataError(
            f"The evaluation data has no labels, so {name} cannot be measured; name their column with --label-column, "
            'add a "labels" entry to the batches, or use --metric fidelity.'
        )
    return metric


# --- metrics that are a ratio of sums over samples ---


def _ratio(
    shares: Callable[[Predictions, Predictions], Shares], finish: Callable[[float], float] = float
) -> Callable[[Predictions, Predictions], MetricValue]:
    def measure(predictions: Predictions, reference: Predictions) -> MetricValue:
        numerators, denominators = (part.double() for part in shares(predictions, reference))
        counted = denominators > 0
        if not counted.any():
            return MetricValue(math.nan)
        numerators, denominators = numerators[counted], denominators[counted]
        single = bool((denominators == 1).all())
        per_sample = numerators if single else ratio_per_sample(numerators, denominators)
        value = float(numerators.sum() / denominators.sum())
        low, high = interval(per_sample)
        return MetricValue(finish(value), Interval(finish(low), finish(high)), per_sample)

    return measure


def _sum_per_sample(predictions: Predictions, values: torch.Tensor) -> Shares:
    """Sums of values over each sample's predictions, and their counts."""
    sample_ids = predictions.sample_ids
    assert sample_ids is not None
    blank = torch.zeros(predictions.samples, dtype=torch.float64)
    return blank.index_add(0, sample_ids, values.double()), blank.index_add(
        0, sample_ids, torch.ones_like(values).double()
    )


def _labels_and_values(predictions: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    labels, values = predictions.labels, predictions.values
    if labels is None or values is None:
        raise DataError('This metric needs labels; add a "labels" entry to the evaluation batches.')
    return labels, values


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = one == other
    return same.flatten(1).all(1) if same.dim() > 1 else same


def _correct(predictions: Predictions, reference: Predictions) -> Shares:
    return _sum_per_sample(predictions, _equal(*_labels_and_values(predictions)))


def _losses(predictions: Predictions, reference: Predictions) -> Shares:
    if predictions.loss_parts is None:
        raise DataError("Perplexity needs a language model and text.")
    sums, counts = predictions.loss_parts
    return sums.sum(1), counts.sum(1)


def _squared_errors(predictions: Predictions, reference: Predictions) -> Shares:
    labels, values = _labels_and_values(predictions)
    errors = (labels.double() - values.double()).square()
    return _sum_per_sample(predictions, errors.flatten(1).mean(1) if errors.dim() > 1 else errors)


def _span_overlap(predictions: Predictions, reference: Predictions) -> Shares:
    """F1 of the tokens of the predicted span against those of the right one."""
    labels, values = _labels_and_values(predictions)
    first, last = torch.maximum(labels[:, 0], values[:, 0]), torch.minimum(labels[:, 1], values[:, 1])
    common = (last - first + 1).clamp_min(0).double()
    lengths = sum((part[:, 1] - part[:, 0] + 1).clamp_min(0) for part in (labels, values))
    return _sum_per_sample(predictions, torch.where(common > 0, 2 * common / lengths, torch.zeros_like(common)))


def _edits(predictions: Predictions, reference: Predictions) -> Shares:
    """Edits that turn the predicted transcript into the right one, and the length of that one."""
    labels, values = _labels_and_values(predictions)
    pairs = [
        (row[row != IGNORED].tolist(), hypothesis[hypothesis != IGNORED].tolist())
        for row, hypothesis in zip(labels, values, strict=True)
    ]
    edits = torch.tensor([edit_distance(row, hypothesis) for row, hypothesis in pairs], dtype=torch.float64)
    return edits, torch.tensor([max(1, len(row)) for row, _ in pairs], dtype=torch.float64)


def edit_distance(one: list[int], other: list[int]) -> int:
    """Insertions, deletions and replacements between two sequences (Levenshtein)."""
    previous = list(range(len(other) + 1))
    for row, item in enumerate(one, start=1):
        current = [row]
        for column, other_item in enumerate(other, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (item != other_item)))
        previous = current
    return previous[-1]


def _fidelity(predictions: Predictions, reference: Predictions) -> MetricValue:
    """Fidelity to the dense model: the share of equal predictions, the correlation of numbers, or the cosine of
    embeddings. That of the dense model to itself is exact, so it has no interval."""
    measured = _fidelity_of_samples(predictions, reference)
    return replace(measured, interval=None) if predictions is reference else measured


def _fidelity_of_samples(predictions: Predictions, reference: Predictions) -> MetricValue:
    if predictions.embeddings is not None and reference.embeddings is not None:
        cosines = torch.nn.functional.cosine_similarity(
            predictions.embeddings.double(), reference.embeddings.double(), dim=-1
        )
        return _ratio(lambda *_: (cosines, torch.ones_like(cosines)))(predictions, reference)
    values, reference_values = predictions.values, reference.values
    if values is None or reference_values is None:
        return MetricValue(math.nan)
    if values.is_floating_point():
        return _correlation(reference_values, values)
    if predictions.task.transcribes:
        width = max(values.shape[1], reference_values.shape[1])
        values, reference_values = (
            torch.nn.functional.pad(p, (0, width - p.shape[1]), value=IGNORED) for p in (values, reference_values)
        )
    same = _equal(values, reference_values)
    return _ratio(lambda *_: _sum_per_sample(predictions, same))(predictions, reference)


# --- metrics of all samples together ---


def _counts(labels: torch.Tensor, predictions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A confusion matrix [classes x classes], and the class of every label and prediction in it."""
    classes, numbers = torch.unique(torch.cat([labels, predictions]), return_inverse=True)
    rows, columns = numbers[: len(labels)], numbers[len(labels) :]
    cells = rows * len(classes) + columns
    return torch.bincount(cells, minlength=len(classes) ** 2).view(len(classes), -1).double(), cells


def _of_confusion_matrix(
    of: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Predictions, Predictions], MetricValue]:
    """A function of confusion matrices [.. x classes x classes]. The jackknife leaves out one sample after the other,
    and samples with the same predictions and labels leave the same matrix."""

    def measure(predictions: Predictions, reference: Predictions) -> MetricValue:
        labels, values = _labels_and_values(predictions)
        if labels.dim() == 2:
            return _multilabel_f1(labels, values)
        matrix, cells = _counts(labels, values)
        value = float(of(matrix))
        sample_ids = predictions.sample_ids
        assert sample_ids is not None
        if len(sample_ids) != len(torch.unique(sample_ids)):  # tokens: the samples are what is left out
            samples = torch.unique(sample_ids, return_inverse=True)[1]
            counts_of_sample = torch.zeros(int(samples.max()) + 1, matrix.numel(), dtype=torch.float64)
            counts_of_sample.index_put_((samples, cells), torch.ones(len(cells), dtype=torch.float64), accumulate=True)
            without = of(matrix - counts_of_sample.view(-1, *matrix.shape))
        else:
            distinct, positions = torch.unique(cells, return_inverse=True)
            counts_of_sample = torch.nn.functional.one_hot(distinct, matrix.numel()).double().view(-1, *matrix.shape)
            without = of(matrix - counts_of_sample)[positions]
        return _jackknife(value, without)

    return measure


def _jackknife(value: float, without: torch.Tensor) -> MetricValue:
    """From the values with each sample left out."""
    count = len(without)
    if count < 2:
        return MetricValue(value)
    per_sample = count * value - (count - 1) * without.double()
    spread = interval(per_sample)
    half = (spread.high - spread.low) / 2
    return MetricValue(value, Interval(value - half, value + half), per_sample - per_sample.mean() + value)


def _f1(matrix: torch.Tensor) -> torch.Tensor:
    """Macro F1: the mean over classes that occur among labels or predictions."""
    right = matrix.diagonal(dim1=-2, dim2=-1)
    total = matrix.sum(-1) + matrix.sum(-2)
    occurs = total > 0
    scores = torch.where(occurs, 2 * right / total.clamp_min(1), torch.zeros_like(right))
    return scores.sum(-1) / occurs.sum(-1).clamp_min(1)


def _matthews(matrix: torch.Tensor) -> torch.Tensor:
    count, right = matrix.sum((-1, -2)), matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    labels, predictions = matrix.sum(-1), matrix.sum(-2)
    covariance = right * count - (labels * predictions).sum(-1)
    spread = (count**2 - labels.square().sum(-1)) * (count**2 - predictions.square().sum(-1))
    return torch.where(spread > 0, covariance / spread.clamp_min(1).sqrt(), torch.zeros_like(covariance))


def _multilabel_f1(labels: torch.Tensor, predictions: torch.Tensor) -> MetricValue:
    """Macro F1 over labels of which a sample may have several; a label that nobody has or predicts counts 0."""
    right = ((labels == 1) & (predictions == 1)).double()
    total = (labels + predictions).double()

    def of(right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total > 0, 2 * right / total.clamp_min(1), torch.zeros_like(right)).mean(-1)

    value = float(of(right.sum(0), total.sum(0)))
    return _jackknife(value, of(right.sum(0) - right, total.sum(0) - total))


def _pearson(predictions: Predictions, reference: Predictions) -> MetricValue:
    return _correlation(*_labels_and_values(predictions))


def _correlation(labels: torch.Tensor, predictions: torch.Tensor) -> MetricValue:
    """Pearson's correlation, the mean over outputs where there are several."""
    x, y = (part.double().reshape(len(part), -1) for part in (labels, predictions))
    if not torch.isfinite(y).all():
        return MetricValue(math.nan)
    # A constant prediction, but for rounding, has no correlation with anything.
    flat = ~((y.amax(0) - y.amin(0)) > 1e-6 * y.abs().amax(0)) | ~(x.amax(0) > x.amin(0))
    count = len(x)
    x, y = x - x.mean(0), y - y.mean(0)
    xx, yy, xy = x.square().sum(0), y.square().sum(0), (x * y).sum(0)
    value = float(torch.where(flat, torch.zeros_like(xy), xy / (xx * yy).sqrt().clamp_min(1e-300)).mean())
    if count < 3:
        return MetricValue(value)
    # Leaving out sample i changes each sum of centred squares and products by its own term times n / (n - 1).
    scale = count / (count - 1)
    lost = torch.stack([xx - scale * x.square(), yy - scale * y.square(), xy - scale * x * y])
    without = lost[2] / (lost[0] * lost[1]).clamp_min(0).sqrt().clamp_min(1e-300)
    without = torch.where(flat, torch.zeros_like(without), without.clamp(-1, 1)).mean(-1)
    return _jackknife(value, without)


def _custom_metric(function: MetricFunction) -> Callable[[Predictions, Predictions], MetricValue]:
    def measure(predictions: Predictions, reference: Predictions) -> MetricValue:
        labels, values = _labels_and_values(predictions)
        hypothesis = values.float() if values.is_floating_point() else values
        return MetricValue(float(function(labels.numpy(), hypothesis.numpy())))

    return measure


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _ratio(_correct)),
        Metric("subset_accuracy", _ratio(_correct)),
        Metric("f1", _of_confusion_matrix(_f1)),
        Metric("matthews", _of_confusion_matrix(_matthews)),
        Metric("exact_match", _ratio(_correct)),
        Metric("span_f1", _ratio(_span_overlap)),
        Metric("pearson", _pearson),
        Metric("mse", _ratio(_squared_errors), higher_is_better=False, relative=True),
        Metric(
            "perplexity",
            _ratio(_losses, lambda loss: math.exp(min(loss, 700.0)) if loss == loss else loss),
            higher_is_better=False,
            relative=True,
            logarithmic=True,
        ),
        Metric("error_rate", _ratio(_edits), higher_is_better=False),
        Metric("fidelity", _fidelity, needs_labels=False),
    )
}
SHARES_OF_ONE = ("accuracy", "subset_accuracy", "f1", "exact_match", "span_f1", "error_rate", "fidelity", "agreement")


def agreement(reference: Predictions, predictions: Predictions) -> float | None:
    """The share of predictions that equal the dense model's; for numbers their correlation, for embeddings their
    cosine."""
    value = _fidelity(predictions, reference).value
    return None if math.isnan(value) else value
