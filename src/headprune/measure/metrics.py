"""Metrics by name, or a user's own function: a value, and an outcome per sample that says how sure it is."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch

from headprune.errors import DataError
from headprune.measure.intervals import Interval, interval, ratio_outcomes
from headprune.measure.quality import Quality
from headprune.tasks import IGNORED

MetricFunction = Callable[[numpy.ndarray, numpy.ndarray], float]  # (labels, predictions) -> value
Shares = tuple[torch.Tensor, torch.Tensor]  # numerators and denominators of a ratio, one per sample


@dataclass(frozen=True)
class Measured:
    """A metric's value, its 95 % interval, and what every sample has to do with it."""

    value: float
    interval: Interval | None = None
    outcomes: torch.Tensor | None = None  # their mean is the value, or its logarithm for perplexity


@dataclass(frozen=True)
class Metric:
    """`of` measures a quality; some metrics compare it with that of the dense model, the `reference`."""

    name: str
    measure: Callable[[Quality, Quality], Measured]
    higher_is_better: bool = True
    needs_labels: bool = True
    relative: bool = False  # whether a drop is a share of the dense value
    logarithmic: bool = False  # whether outcomes average to the logarithm

    def of(self, quality: Quality, reference: Quality | None = None) -> Measured:
        return self.measure(quality, quality if reference is None else reference)

    def drop(self, dense: float, value: float) -> float:
        """How much worse `value` is than `dense`: a difference, or for perplexity the relative rise."""
        worse = dense - value if self.higher_is_better else value - dense
        return worse / abs(dense) if self.relative and dense else worse


def choose_metric(asked: str | MetricFunction | None, quality: Quality) -> Metric:
    """The metric asked for, or the usual one of the task; without labels, fidelity to the dense model."""
    task = quality.task
    if callable(asked):
        return Metric(getattr(asked, "__name__", "metric"), _own_function(asked))
    labelled = quality.labels is not None
    name = asked or (task.metrics[0] if labelled or task.metrics[0] == "fidelity" else "fidelity")
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
    shares: Callable[[Quality, Quality], Shares], finish: Callable[[float], float] = float
) -> Callable[[Quality, Quality], Measured]:
    def measure(quality: Quality, reference: Quality) -> Measured:
        numerators, denominators = (part.double() for part in shares(quality, reference))
        counted = denominators > 0
        if not counted.any():
            return Measured(math.nan)
        numerators, denominators = numerators[counted], denominators[counted]
        single = bool((denominators == 1).all())
        outcomes = numerators if single else ratio_outcomes(numerators, denominators)
        value = float(numerators.sum() / denominators.sum())
        low, high = interval(outcomes)
        return Measured(finish(value), Interval(finish(low), finish(high)), outcomes)

    return measure


def _per_sample(quality: Quality, values: torch.Tensor) -> Shares:
    """Sums of values over each sample's predictions, and their counts."""
    owners = quality.owners
    assert owners is not None
    blank = torch.zeros(quality.samples, dtype=torch.float64)
    return blank.index_add(0, owners, values.double()), blank.index_add(0, owners, torch.ones_like(values).double())


def _both(quality: Quality) -> tuple[torch.Tensor, torch.Tensor]:
    labels, predictions = quality.labels, quality.predictions
    if labels is None or predictions is None:
        raise DataError('This metric needs labels; add a "labels" entry to the evaluation batches.')
    return labels, predictions


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = one == other
    return same.flatten(1).all(1) if same.dim() > 1 else same


def _right(quality: Quality, reference: Quality) -> Shares:
    return _per_sample(quality, _equal(*_both(quality)))


def _losses(quality: Quality, reference: Quality) -> Shares:
    if quality.loss_parts is None:
        raise DataError("Perplexity needs a language model and text.")
    sums, counts = quality.loss_parts
    return sums.sum(1), counts.sum(1)


def _squared_errors(quality: Quality, reference: Quality) -> Shares:
    labels, predictions = _both(quality)
    errors = (labels.double() - predictions.double()).square()
    return _per_sample(quality, errors.flatten(1).mean(1) if errors.dim() > 1 else errors)


def _span_overlap(quality: Quality, reference: Quality) -> Shares:
    """F1 of the tokens of the predicted span against those of the right one."""
    labels, predictions = _both(quality)
    first, last = torch.maximum(labels[:, 0], predictions[:, 0]), torch.minimum(labels[:, 1], predictions[:, 1])
    common = (last - first + 1).clamp_min(0).double()
    lengths = sum((part[:, 1] - part[:, 0] + 1).clamp_min(0) for part in (labels, predictions))
    return _per_sample(quality, torch.where(common > 0, 2 * common / lengths, torch.zeros_like(common)))


def _edits(quality: Quality, reference: Quality) -> Shares:
    """Edits that turn the predicted transcript into the right one, and the length of that one."""
    labels, predictions = _both(quality)
    pairs = [
        (row[row != IGNORED].tolist(), said[said != IGNORED].tolist())
        for row, said in zip(labels, predictions, strict=True)
    ]
    edits = torch.tensor([edit_distance(row, said) for row, said in pairs], dtype=torch.float64)
    return edits, torch.tensor([max(1, len(row)) for row, _ in pairs], dtype=torch.float64)


def edit_distance(one: list[int], other: list[int]) -> int:
    """Insertions, deletions and replacements between two sequences (Levenshtein)."""
    before = list(range(len(other) + 1))
    for row, item in enumerate(one, start=1):
        now = [row]
        for column, against in enumerate(other, start=1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (item != against)))
        before = now
    return before[-1]


def _faithful(quality: Quality, reference: Quality) -> Measured:
    """Agreement with the dense model: equal predictions, correlated numbers, or the cosine of embeddings."""
    if quality.embeddings is not None and reference.embeddings is not None:
        cosines = torch.nn.functional.cosine_similarity(
            quality.embeddings.double(), reference.embeddings.double(), dim=-1
        )
        return _ratio(lambda *_: (cosines, torch.ones_like(cosines)))(quality, reference)
    mine, dense = quality.predictions, reference.predictions
    if mine is None or dense is None:
        return Measured(math.nan)
    if mine.is_floating_point():
        return _correlation(dense, mine)
    if quality.task.name == "ctc":
        width = max(mine.shape[1], dense.shape[1])
        mine, dense = (torch.nn.functional.pad(p, (0, width - p.shape[1]), value=IGNORED) for p in (mine, dense))
    same = _equal(mine, dense)
    return _ratio(lambda *_: _per_sample(quality, same))(quality, reference)


# --- metrics of all samples together ---


def _counts(labels: torch.Tensor, predictions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A confusion matrix [classes x classes], and the class of every label and prediction in it."""
    known, numbers = torch.unique(torch.cat([labels, predictions]), return_inverse=True)
    rows, columns = numbers[: len(labels)], numbers[len(labels) :]
    cells = rows * len(known) + columns
    return torch.bincount(cells, minlength=len(known) ** 2).view(len(known), -1).double(), cells


def _confused(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quality, Quality], Measured]:
    """A function of confusion matrices [.. x classes x classes]. The jackknife leaves out one sample after the other,
    and samples with the same predictions and labels leave the same matrix."""

    def measure(quality: Quality, reference: Quality) -> Measured:
        labels, predictions = _both(quality)
        if labels.dim() == 2:
            return _several_labels(labels, predictions)
        matrix, cells = _counts(labels, predictions)
        value = float(of(matrix))
        owners = quality.owners
        assert owners is not None
        if len(owners) != len(torch.unique(owners)):  # tokens: the samples are what is left out
            samples = torch.unique(owners, return_inverse=True)[1]
            own = torch.zeros(int(samples.max()) + 1, matrix.numel(), dtype=torch.float64)
            own.index_put_((samples, cells), torch.ones(len(cells), dtype=torch.float64), accumulate=True)
            without = of(matrix - own.view(-1, *matrix.shape))
        else:
            kinds, places = torch.unique(cells, return_inverse=True)
            own = torch.nn.functional.one_hot(kinds, matrix.numel()).double().view(-1, *matrix.shape)
            without = of(matrix - own)[places]
        return _jackknifed(value, without)

    return measure


def _jackknifed(value: float, without: torch.Tensor) -> Measured:
    """From the values with each sample left out."""
    count = len(without)
    if count < 2:
        return Measured(value)
    outcomes = count * value - (count - 1) * without.double()
    spread = interval(outcomes)
    half = (spread.high - spread.low) / 2
    return Measured(value, Interval(value - half, value + half), outcomes - outcomes.mean() + value)


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


def _several_labels(labels: torch.Tensor, predictions: torch.Tensor) -> Measured:
    """Macro F1 over labels of which a sample may have several; a label that nobody has or predicts counts 0."""
    right = ((labels == 1) & (predictions == 1)).double()
    total = (labels + predictions).double()

    def of(right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total > 0, 2 * right / total.clamp_min(1), torch.zeros_like(right)).mean(-1)

    value = float(of(right.sum(0), total.sum(0)))
    return _jackknifed(value, of(right.sum(0) - right, total.sum(0) - total))


def _pearson(quality: Quality, reference: Quality) -> Measured:
    return _correlation(*_both(quality))


def _correlation(labels: torch.Tensor, predictions: torch.Tensor) -> Measured:
    """Pearson's correlation, the mean over outputs where there are several."""
    x, y = (part.double().reshape(len(part), -1) for part in (labels, predictions))
    if not torch.isfinite(y).all():
        return Measured(math.nan)
    # A constant prediction, but for rounding, has no correlation with anything.
    flat = ~((y.amax(0) - y.amin(0)) > 1e-6 * y.abs().amax(0)) | ~(x.amax(0) > x.amin(0))
    count = len(x)
    x, y = x - x.mean(0), y - y.mean(0)
    xx, yy, xy = x.square().sum(0), y.square().sum(0), (x * y).sum(0)
    value = float(torch.where(flat, torch.zeros_like(xy), xy / (xx * yy).sqrt().clamp_min(1e-300)).mean())
    if count < 3:
        return Measured(value)
    # Leaving out sample i changes each sum of centred squares and products by its own term times n / (n - 1).
    scale = count / (count - 1)
    lost = torch.stack([xx - scale * x.square(), yy - scale * y.square(), xy - scale * x * y])
    without = lost[2] / (lost[0] * lost[1]).clamp_min(0).sqrt().clamp_min(1e-300)
    without = torch.where(flat, torch.zeros_like(without), without.clamp(-1, 1)).mean(-1)
    return _jackknifed(value, without)


def _own_function(function: MetricFunction) -> Callable[[Quality, Quality], Measured]:
    def measure(quality: Quality, reference: Quality) -> Measured:
        labels, predictions = _both(quality)
        said = predictions.float() if predictions.is_floating_point() else predictions
        return Measured(float(function(labels.numpy(), said.numpy())))

    return measure


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _ratio(_right)),
        Metric("subset_accuracy", _ratio(_right)),
        Metric("f1", _confused(_f1)),
        Metric("matthews", _confused(_matthews)),
        Metric("exact_match", _ratio(_right)),
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
        Metric("fidelity", _faithful, needs_labels=False),
    )
}
SHARES_OF_ONE = ("accuracy", "subset_accuracy", "f1", "exact_match", "span_f1", "error_rate", "fidelity", "agreement")


def agreement(reference: Quality, quality: Quality) -> float | None:
    """Stability: the share of predictions that equal the dense model's; for numbers their correlation, for embeddings
    their cosine."""
    value = _faithful(quality, reference).value
    return None if math.isnan(value) else value
