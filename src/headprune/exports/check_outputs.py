"""Checks an exported model in its runtime: the same outputs as in PyTorch, or, quantised, about the same metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headprune.display import counted
from headprune.errors import DataError, ExportError
from headprune.exports.runtime import TOKENS, Runner, Runtime, Source
from headprune.measure.intervals import interval
from headprune.measure.metrics import Metric, MetricValue, agreement, choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.trajectory import finite_or_none
from headprune.tasks import Task, batch_size

GENERATIVE_TASKS = ("causal-lm", "seq2seq-lm")

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class CheckResult:
    """The result. `difference` is the largest difference of outputs, relative to the largest output, or to 1."""

    samples: int
    difference: float
    tolerance: float | None  # None where weights were quantised, so that outputs differ
    tokens: int | None = None  # how many of TOKENS generated tokens equal those of PyTorch
    metric: str | None = None
    pytorch: dict[str, Any] | None = None  # value and interval of the metric
    exported: dict[str, Any] | None = None
    agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    runtime: Runtime,
    runner: Runner,
    source: Source,
    batches: Sequence[Batch],
    *,
    quantized: bool,
    metric: str | None = None,
    max_drop: float | None = None,
) -> CheckResult:
    """Run both on the batches, and refuse an export whose outputs differ, with the difference."""
    task, model = source.task, source.model
    ours, theirs = Predictions(task), Predictions(task)
    worst = 0.0
    for batch in _checked_batches(task, batches, runtime.checked_tokens):
        prepared = task.prepare(batch, torch.device("cpu"))
        with torch.no_grad():
            expected = model(**task.inputs(prepared))
        actual = runner(**task.inputs(prepared))
        worst = max(worst, _difference(runtime, source, prepared, expected, actual))
        ours.add(prepared, expected)
        theirs.add(prepared, actual)
    tolerance = None if quantized else runtime.tolerance
    if math.isinf(worst):
        raise ExportError(
            f"In {runtime.title} the outputs are NaN or Inf, so nothing was written; report the model family."
        )
    if tolerance is not None and not worst <= tolerance:
        raise ExportError(
            f"In {runtime.title} the outputs differ from PyTorch's by up to {worst:.3g} of their size (allowed: "
            f"{tolerance:g}), so nothing was written; report the model family."
        )
    tokens = _equal_tokens(runtime, runner, source, tolerance)
    if tokens is not None and tokens < TOKENS and not quantized:
        raise ExportError(
            f"In {runtime.title} the generated text differs from PyTorch's after {counted(tokens, 'token')}, so "
            "nothing was written; report the model family."
        )
    if quantized:
        _refuse_worse(runtime, ours, theirs, metric, max_drop)
    name, before, after = _metric_records(ours, theirs, metric)
    return CheckResult(ours.samples, worst, tolerance, tokens, name, before, after, agreement(ours, theirs))


def _difference(runtime: Runtime, source: Source, batch: Batch, expected: Any, actual: Any) -> float:
    """The largest difference of logits, without padding; infinite where one is NaN or Inf."""
    task = source.task
    expected_logits, actual_logits = task.logits(expected), task.logits(actual)
    if expected_logits.shape != actual_logits.shape:
        raise ExportError(
            f"In {runtime.title} the outputs have the shape {list(actual_logits.shape)} and not "
            f"{list(expected_logits.shape)}, so nothing was written; report the model family."
        )
    if runtime.log_probabilities:
        expected_logits = expected_logits.float().log_softmax(-1)
    if task.per_token and expected_logits.dim() == 3:
        real = task.real_tokens(batch, expected_logits)
        expected_logits, actual_logits = expected_logits[real], actual_logits[real]
    if not torch.isfinite(expected_logits).all():
        raise ExportError("The outputs of the model are NaN or Inf in PyTorch already; check its weights and the data.")
    if not torch.isfinite(actual_logits).all():
        return float("inf")
    # Log-probabilities of improbable tokens are large, so their differences are taken as absolute.
    size = (
        1.0
        if runtime.log_probabilities
        else max(1.0, float(expected_logits.abs().max()) if expected_logits.numel() else 0.0)
    )
    return (
        float((expected_logits.double() - actual_logits.double()).abs().max()) / size
        if expected_logits.numel()
        else 0.0
    )


def prompt_of(source: Source) -> dict[str, torch.Tensor]:
    """A prompt from the first row: its tokens without padding, cut so that more can follow, and the first token of a
    decoder."""
    mask = source.batch.get("attention_mask")
    with_tokens = [] if mask is None or mask.dim() != 2 else (mask.sum(1) > 0).nonzero().flatten().tolist()
    first = with_tokens[0] if with_tokens else 0
    batch = source.task.inputs(source.task.select(source.batch, slice(first, first + 1)))
    row = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "labels"}
    if "decoder_input_ids" in row:
        row["decoder_input_ids"] = row["decoder_input_ids"][:, :1]
        row.pop("decoder_attention_mask", None)
    elif "attention_mask" in row:
        real = row["attention_mask"][0].bool()
        row = {name: value[:, real] if value.shape[1:2] == real.shape else value for name, value in row.items()}
    limit = getattr(source.model.config.get_text_config(), "max_position_embeddings", None)
    if "decoder_input_ids" not in row and isinstance(limit, int):
        length = row["input_ids"].shape[1]
        cut = min(length, max(1, limit - TOKENS))
        row = {name: value[:, :cut] if value.shape[1:2] == (length,) else value for name, value in row.items()}
    return row


def _equal_tokens(runtime: Runtime, runner: Runner, source: Source, tolerance: float | None) -> int | None:
    """How many generated tokens equal PyTorch's, from the first; None for a model that generates none. Where the two
    best tokens differ by less than the tolerance either is accepted, and both continue from the generated one."""
    if source.task.name not in GENERATIVE_TASKS or not runner.can_generate():
        return None
    prompt = prompt_of(source)
    name = "decoder_input_ids" if "decoder_input_ids" in prompt else "input_ids"
    generated = runner.generate(prompt, TOKENS)
    sequence = prompt[name]
    others = {key: value for key, value in prompt.items() if key != "attention_mask" or name != "input_ids"}
    for number, token in enumerate(generated):
        with torch.no_grad():
            logits = source.model(**{**others, name: sequence}, use_cache=False).logits[0, -1]
        best = int(logits.argmax())
        if token != best:
            gap = float(logits[best] - logits[token]) / max(1.0, float(logits.abs().max()))
            if tolerance is None or gap > 2 * tolerance:
                return number
        sequence = torch.cat([sequence, torch.tensor([[token]])], dim=1)
    return TOKENS


Record = dict[str, Any]


def _metric_records(
    ours: Predictions, theirs: Predictions, metric_name: str | None
) -> tuple[str | None, Record | None, Record | None]:
    metric = _metric(ours, metric_name)
    if metric is None:
        return None, None, None
    return metric.name, _record(metric.of(ours)), _record(metric.of(theirs, ours))


def _metric(predictions: Predictions, metric_name: str | None) -> Metric | None:
    try:
        return choose_metric(metric_name, predictions)
    except DataError:
        if metric_name is not None:
            raise
        return None


def _record(value: MetricValue) -> dict[str, Any]:
    interval = None if value.interval is None else list(map(finite_or_none, value.interval))
    return {"value": finite_or_none(value.value), "interval": interval}


def _refuse_worse(
    runtime: Runtime, ours: Predictions, theirs: Predictions, metric_name: str | None, max_drop: float | None
) -> None:
    """Refuse a quantised model whose metric is worse by more than `max_drop`, or than the 95 % interval of the model in
    PyTorch."""
    metric = _metric(ours, metric_name)
    if metric is None:
        return
    before, after = metric.of(ours), metric.of(theirs, ours)
    drop = metric.drop(before.value, after.value)
    noise = before.interval
    if noise is None and before.per_sample is not None:  # fidelity to itself, of as many samples as there are
        noise = interval(before.per_sample)
    if max_drop is not None:
        allowed, why = max_drop, "--max-drop"
    elif noise is not None and all(map(math.isfinite, noise)):
        end = noise.low if metric.higher_is_better else noise.high
        allowed, why = metric.drop(before.value, end), "the 95% interval of the samples"
    else:
        return
    if not drop <= allowed:
        raise ExportError(
            f"Quantised, the model's {metric.name} in {runtime.title} is {after.value:.4g} and not {before.value:.4g}, "
            f"a drop of {drop:.3g} where {allowed:.3g} is allowed ({why}), so nothing was written; allow more with "
            "--max-drop, or leave out --quantize."
        )


def _checked_batches(task: Task, batches: Sequence[Batch], tokens: int | None) -> Iterator[Batch]:
    """All batches, or single rows of them up to this many tokens."""
    if tokens is None:
        yield from batches
        return
    for batch in batches:
        for number in range(batch_size(batch)):
            row = task.select(batch, slice(number, number + 1))
            ids = row["input_ids"]
            if tokens <= 0:
                return
            if ids.shape[1] > tokens:
                row = {
                    name: value[:, :tokens] if value.shape[:2] == ids.shape else value for name, value in row.items()
                }
            tokens -= int(row["input_ids"].shape[1])
            yield row
