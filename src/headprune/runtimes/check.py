"""Whether an exported model is the model: the same numbers in the real runtime; quantised, the same quality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headprune.errors import DataError, ExportError
from headprune.measure.metrics import Measured, Metric, agreement, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.trajectory import plain
from headprune.runtimes.spec import TOKENS, Runner, Runtime, Source
from headprune.tasks import batch_size, rows_of

WRITING = ("causal-lm", "seq2seq-lm")

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Checked:
    """What came out. `difference` is the largest one of outputs, in units of the largest output, or of 1."""

    samples: int
    difference: float
    tolerance: float | None  # None where weights were quantised, so that outputs are others
    tokens: int | None = None  # how many generated tokens are those of PyTorch, of TOKENS
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
) -> Checked:
    """Run both on the batches, and refuse an export that is not the model, saying by how much."""
    task, model = source.task, source.model
    ours, theirs = Quality(task), Quality(task)
    worst = 0.0
    for batch in _looked_at(batches, runtime.checked_tokens):
        prepared = task.prepare(batch, torch.device("cpu"))
        with torch.no_grad():
            expected = model(**task.inputs(prepared))
        found = runner(**task.inputs(prepared))
        worst = max(worst, _difference(runtime, source, prepared, expected, found))
        ours.add(prepared, expected)
        theirs.add(prepared, found)
    tolerance = None if quantized else runtime.tolerance
    if math.isinf(worst):
        raise ExportError(f"In {runtime.title} the outputs are no numbers (NaN or Inf), so nothing was written.")
    if tolerance is not None and not worst <= tolerance:
        raise ExportError(
            f"In {runtime.title} the outputs differ from PyTorch's by up to {worst:.3g} of their size (allowed: "
            f"{tolerance:g}), so nothing was written; report the model family."
        )
    tokens = _same_tokens(runtime, runner, source, tolerance)
    if tokens is not None and tokens < TOKENS and not quantized:
        raise ExportError(
            f"In {runtime.title} the model writes another text than in PyTorch after {tokens} tokens, so nothing was "
            "written; report the model family."
        )
    if quantized:
        _refuse_worse(runtime, ours, theirs, metric, max_drop)
    name, before, after = _measured(ours, theirs, metric)
    return Checked(ours.samples, worst, tolerance, tokens, name, before, after, agreement(ours, theirs))


def _difference(runtime: Runtime, source: Source, batch: Batch, expected: Any, found: Any) -> float:
    """The largest difference of what the task looks at, padding left out; infinite where something is no number."""
    task = source.task
    one, other = task.logits(expected), task.logits(found)
    if one.shape != other.shape:
        raise ExportError(
            f"In {runtime.title} the outputs have the shape {list(other.shape)} and not {list(one.shape)}, so nothing "
            "was written; report the model family."
        )
    if runtime.log_probabilities:
        one = one.float().log_softmax(-1)
    if task.per_token and one.dim() == 3:
        real = task.real_tokens(batch, one)
        one, other = one[real], other[real]
    if not torch.isfinite(one).all():
        raise ExportError("The model's own outputs are NaN or Inf, in PyTorch already; check its weights and the data.")
    if not torch.isfinite(other).all():
        return float("inf")
    # Log-probabilities of what will not come are large and mean nothing; their differences count as they are.
    size = 1.0 if runtime.log_probabilities else max(1.0, float(one.abs().max()) if one.numel() else 0.0)
    return float((one.double() - other.double()).abs().max()) / size if one.numel() else 0.0


def prompt_of(source: Source) -> dict[str, torch.Tensor]:
    """The first row that can be gone on from: real tokens alone, as many as leave room for more, and of a decoder its
    first one."""
    mask = source.batch.get("attention_mask")
    full = [] if mask is None or mask.dim() != 2 else (mask.sum(1) > 0).nonzero().flatten().tolist()
    first = full[0] if full else 0
    batch = rows_of(source.task.inputs(source.batch), slice(first, first + 1))
    row = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "labels"}
    if "decoder_input_ids" in row:
        row["decoder_input_ids"] = row["decoder_input_ids"][:, :1]
        row.pop("decoder_attention_mask", None)
    elif "attention_mask" in row:
        real = row["attention_mask"][0].bool()
        row = {name: value[:, real] if value.shape[1:2] == real.shape else value for name, value in row.items()}
    room = getattr(source.model.config.get_text_config(), "max_position_embeddings", None)
    if "decoder_input_ids" not in row and isinstance(room, int):
        length = row["input_ids"].shape[1]
        kept = min(length, max(1, room - TOKENS))
        row = {name: value[:, :kept] if value.shape[1:2] == (length,) else value for name, value in row.items()}
    return row


def _same_tokens(runtime: Runtime, runner: Runner, source: Source, tolerance: float | None) -> int | None:
    """How many tokens agree with PyTorch's, one after the other; None for a model that writes none. Where the two best
    are nearer to each other than the tolerance, either may come, and both go on from the one that came."""
    if source.task.name not in WRITING or not runner.can_generate():
        return None
    prompt = prompt_of(source)
    name = "decoder_input_ids" if "decoder_input_ids" in prompt else "input_ids"
    found = runner.generate(prompt, TOKENS)
    every = prompt[name]
    given = {key: value for key, value in prompt.items() if key != "attention_mask" or name != "input_ids"}
    for number, token in enumerate(found):
        with torch.no_grad():
            logits = source.model(**{**given, name: every}, use_cache=False).logits[0, -1]
        best = int(logits.argmax())
        if token != best:
            gap = float(logits[best] - logits[token]) / max(1.0, float(logits.abs().max()))
            if tolerance is None or gap > 2 * tolerance:
                return number
        every = torch.cat([every, torch.tensor([[token]])], dim=1)
    return TOKENS


Record = dict[str, Any]


def _measured(ours: Quality, theirs: Quality, asked: str | None) -> tuple[str | None, Record | None, Record | None]:
    metric = _metric(ours, asked)
    if metric is None:
        return None, None, None
    return metric.name, _record(metric.of(ours)), _record(metric.of(theirs, ours))


def _metric(quality: Quality, asked: str | None) -> Metric | None:
    try:
        return choose_metric(asked, quality)
    except DataError:
        if asked is not None:
            raise
        return None


def _record(measured: Measured) -> dict[str, Any]:
    between = None if measured.interval is None else list(map(plain, measured.interval))
    return {"value": plain(measured.value), "interval": between}


def _refuse_worse(runtime: Runtime, ours: Quality, theirs: Quality, asked: str | None, max_drop: float | None) -> None:
    """Quantised weights are others, so the metric counts: it may be worse by as much as was asked for, or as samples
    cannot tell apart (the worse end of the interval of the model in PyTorch)."""
    metric = _metric(ours, asked)
    if metric is None:
        return
    before, after = metric.of(ours), metric.of(theirs, ours)
    drop = metric.drop(before.value, after.value)
    if max_drop is not None:
        allowed, why = max_drop, "asked for"
    elif before.interval is not None and all(map(math.isfinite, before.interval)):
        end = before.interval.low if metric.higher_is_better else before.interval.high
        allowed, why = metric.drop(before.value, end), "the 95% interval of the samples"
    else:
        return
    if not drop <= allowed:
        raise ExportError(
            f"Quantised, the model's {metric.name} in {runtime.title} is {after.value:.4g} and not {before.value:.4g}, "
            f"a drop of {drop:.3g} where {allowed:.3g} is allowed ({why}), so nothing was written; allow more with "
            "--max-drop, or leave out --quantize."
        )


def _looked_at(batches: Sequence[Batch], tokens: int | None) -> Iterator[Batch]:
    """All batches, or rows of them until so many tokens were seen."""
    if tokens is None:
        yield from batches
        return
    for batch in batches:
        for number in range(batch_size(batch)):
            row = rows_of(batch, slice(number, number + 1))
            ids = row["input_ids"]
            if tokens <= 0:
                return
            if ids.shape[1] > tokens:
                row = {
                    name: value[:, :tokens] if value.shape[:2] == ids.shape else value for name, value in row.items()
                }
            tokens -= int(row["input_ids"].shape[1])
            yield row
