"""The result of an evaluation: the metric of a model with its interval, and its difference to the dense model's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headprune.display import counted, data_frame, html_table
from headprune.errors import DataError
from headprune.measure.compare_curves import difference_json, interval_json
from headprune.measure.intervals import Difference, Interval, paired_difference
from headprune.measure.metrics import METRICS, Metric, MetricFunction, MetricValue, choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.trajectory import finite_or_none


@dataclass(frozen=True)
class EvaluatedModel:
    """One model on the data."""

    name: str
    value: float
    interval: Interval | None  # of the value, 95 %
    loss: float | None  # mean per sample
    parameters: int

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "value": finite_or_none(self.value),
            "interval": interval_json(self.interval),
            "loss": finite_or_none(self.loss),
            "parameters": self.parameters,
        }


@dataclass(frozen=True, repr=False)
class EvaluateResult:
    """A model on data, and the dense model on the same samples, where there is one.

    `difference` is the model's metric minus the dense one's, paired over samples, with its 95 % interval; of
    perplexity it is the difference of logarithms. It is None without a dense model, and where the metric is a function
    that gives no number per sample. `agreement` is the share of predictions that equal the dense model's.
    """

    metric: Metric
    samples: int
    model: EvaluatedModel
    dense: EvaluatedModel | None = None
    difference: Difference | None = None
    agreement: float | None = None
    agreement_interval: Interval | None = None
    data: str | None = None  # where the samples come from, if it is a file or a data set
    notes: tuple[str, ...] = ()  # on samples that were left out

    @property
    def value(self) -> float:
        return self.model.value

    @property
    def interval(self) -> Interval | None:
        return self.model.interval

    @property
    def rows(self) -> list[EvaluatedModel]:
        """The dense model, where there is one, and the model."""
        return [*([] if self.dense is None else [self.dense]), self.model]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.model.to_json(),
            "data": self.data,
            "samples": self.samples,
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "dense": None if self.dense is None else self.dense.to_json(),
            "difference": difference_json(self.difference),
            "agreement": finite_or_none(self.agreement),
            "agreement_interval": interval_json(self.agreement_interval),
            "notes": list(self.notes),
        }

    def to_frame(self) -> Any:
        """A pandas frame with a line for each of the models."""
        return data_frame(
            {
                "model": row.name,
                "metric": self.metric.name,
                "value": row.value,
                "low": None if row.interval is None else row.interval.low,
                "high": None if row.interval is None else row.interval.high,
                "loss": row.loss,
                "parameters": row.parameters,
                "samples": self.samples,
            }
            for row in self.rows
        )

    def __repr__(self) -> str:
        text = f"{self.metric.name} {_with_interval(self.model)} on {counted(self.samples, 'sample')}"
        if self.dense is not None:
            text += f", dense {_with_interval(self.dense)}"
        if self.difference is not None:
            gap = self.difference
            text += f", difference {gap.value:+.4g} [{gap.low:.4g}, {gap.high:.4g}]"
        if self.agreement is not None:
            text += f", agreement {self.agreement:.4g}"
        return f"<EvaluateResult: {text}>"

    def _repr_html_(self) -> str:
        headings = ("", self.metric.name, "95% interval", "loss", "parameters")
        rows = [
            (
                f"{row.name} (dense)" if row is self.dense else row.name,
                f"{row.value:.4g}",
                _ends(row.interval),
                _number(row.loss),
                f"{row.parameters:,}",
            )
            for row in self.rows
        ]
        notes = list(self.notes)
        if self.difference is not None:
            gap, log = self.difference, " of logarithms" if self.metric.logarithmic else ""
            notes.append(f"Difference{log}: {gap.value:+.4g} {_ends(Interval(gap.low, gap.high))}")
        if self.agreement is not None:
            notes.append(f"Agreement with the dense model: {self.agreement:.4g} {_ends(self.agreement_interval)}")
        where = counted(self.samples, "sample") + (f" of {self.data}" if self.data else "")
        return html_table(f"Evaluated on {where}", headings, rows, notes)


def evaluate_predictions(
    name: str,
    predictions: Predictions,
    parameters: int,
    *,
    metric: str | MetricFunction | None = None,
    dense: tuple[str, Predictions, int] | None = None,
    data: str | None = None,
    notes: tuple[str, ...] = (),
) -> EvaluateResult:
    """The result from the predictions of a model, and from name, predictions and size of the dense model."""
    chosen = choose_metric(metric, predictions)
    if chosen.name == "fidelity" and dense is None:
        raise DataError(
            "Fidelity is measured against the dense model, and there is none; name it with --dense, or give data with "
            "labels."
        )
    value = chosen.of(predictions, None if dense is None else dense[1])
    model = EvaluatedModel(name, value.value, value.interval, predictions.loss, parameters)
    if dense is None:
        return EvaluateResult(chosen, predictions.samples, model, data=data, notes=notes)
    dense_name, reference, dense_parameters = dense
    dense_value = chosen.of(reference, reference)
    agreement = METRICS["fidelity"].of(predictions, reference)
    return EvaluateResult(
        metric=chosen,
        samples=predictions.samples,
        model=model,
        dense=EvaluatedModel(dense_name, dense_value.value, dense_value.interval, reference.loss, dense_parameters),
        difference=_difference(value, dense_value),
        agreement=None if math.isnan(agreement.value) else agreement.value,
        agreement_interval=agreement.interval,
        data=data,
        notes=notes,
    )


def _difference(one: MetricValue, other: MetricValue) -> Difference | None:
    if one.per_sample is None or other.per_sample is None or len(one.per_sample) != len(other.per_sample):
        return None
    return paired_difference(one.per_sample, other.per_sample)


def _with_interval(row: EvaluatedModel) -> str:
    return f"{row.value:.4g} {_ends(row.interval)}".rstrip()


def _ends(between: Interval | None) -> str:
    return "" if between is None else f"[{between.low:.4g}, {between.high:.4g}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
