"""Metrics by name, computed by scikit-learn, or a user's own function."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.measure.quality import Quality

MetricFunction = Callable[[numpy.ndarray, numpy.ndarray], float]  # (labels, predictions) -> value


@dataclass(frozen=True)
class Metric:
    name: str
    higher_is_better: bool
    of: Callable[[Quality], float]

    def drop(self, dense: float, value: float) -> float:
        """How much worse `value` is than `dense`: a difference, or for perplexity the relative rise."""
        return dense - value if self.higher_is_better else (value - dense) / dense


def choose_metric(asked: str | MetricFunction | None, model: PreTrainedModel, quality: Quality) -> Metric:
    """The metric asked for, or the usual one of the task."""
    if callable(asked):
        return Metric(getattr(asked, "__name__", "metric"), True, _from_labels(asked))
    if quality.labels is None:
        raise DataError(
            "The evaluation data has no labels, so accuracy cannot be measured; name their column with "
            "--label-column, or "
            'add a "labels" entry to the batches.'
        )
    if asked is None:
        continuous = quality.labels.is_floating_point()
        asked = "pearson" if continuous else "perplexity" if quality.per_token else "accuracy"
    if asked not in METRICS:
        near = difflib.get_close_matches(asked, METRICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METRICS)}."
        raise DataError(f"There is no metric {asked!r}; {hint}")
    if quality.labels.is_floating_point() and asked != "pearson":
        raise DataError(f"{asked} needs classes, and these labels are continuous; use pearson.")
    if asked == "perplexity" and not quality.per_token:
        raise DataError("perplexity needs a language model and text; use accuracy, f1 or matthews.")
    return METRICS[asked]


def _from_labels(function: MetricFunction) -> Callable[[Quality], float]:
    def of(quality: Quality) -> float:
        labels, predictions = quality.labels, quality.predictions
        if labels is None or predictions is None:
            raise DataError('This metric needs labels; add a "labels" entry to the evaluation batches.')
        return float(
            function(labels.numpy(), predictions.float().numpy() if labels.is_floating_point() else predictions.numpy())
        )

    return of


def _perplexity(quality: Quality) -> float:
    loss = quality.counted_loss
    if loss is None:
        raise DataError("Perplexity needs a language model and text.")
    return math.exp(min(loss, 700.0))


def _f1(labels: numpy.ndarray, predictions: numpy.ndarray) -> float:
    from sklearn.metrics import f1_score

    return f1_score(labels, predictions, average="macro")


def _matthews(labels: numpy.ndarray, predictions: numpy.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predictions)


def _accuracy(labels: numpy.ndarray, predictions: numpy.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(labels, predictions)


def _pearson(labels: numpy.ndarray, predictions: numpy.ndarray) -> float:
    from sklearn.feature_selection import r_regression

    # A constant prediction, but for rounding, has no correlation with anything.
    if not numpy.ptp(predictions) > 1e-6 * numpy.abs(predictions).max():
        return 0.0
    return float(r_regression(predictions[:, None], labels, force_finite=True)[0])


METRICS = {
    "accuracy": Metric("accuracy", True, _from_labels(_accuracy)),
    "f1": Metric("f1", True, _from_labels(_f1)),
    "matthews": Metric("matthews", True, _from_labels(_matthews)),
    "pearson": Metric("pearson", True, _from_labels(_pearson)),
    "perplexity": Metric("perplexity", False, _perplexity),
}


def agreement(reference: torch.Tensor | None, predictions: torch.Tensor | None) -> float | None:
    """Share of equal predictions; for a regressor, which agrees with nobody exactly, the correlation."""
    if reference is None or predictions is None:
        return None
    if reference.is_floating_point():
        return _pearson(reference.double().numpy(), predictions.double().numpy())
    return float((reference == predictions).double().mean())
