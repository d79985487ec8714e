"""Recovery from Python: train a pruned model, and say what it was worth before and after."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from headprune.hooks.offload import refuse_offloaded
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Measured, Metric, MetricFunction, choose_metric
from headprune.measure.quality import Quality
from headprune.recovery.config import TrainConfig, train_config
from headprune.recovery.pace import Evaluated
from headprune.recovery.rows import as_examples
from headprune.recovery.trainer import Fitted, fit
from headprune.store.checkpoint import load
from headprune.tasks import Task, task_of
from headprune.units.linear import refuse_quantized


@dataclass(frozen=True, repr=False)
class FinetuneResult:
    """The model, which is the one that was given, and what it was before and after on the evaluation data."""

    model: PreTrainedModel
    fitted: Fitted
    config: TrainConfig
    metric: Metric | None = None
    before: Measured | None = None
    after: Measured | None = None
    dense: Measured | None = None

    @property
    def history(self) -> list[dict[str, float]]:
        return self.fitted.history

    @property
    def evaluations(self) -> list[Evaluated]:
        return self.fitted.evaluations

    @property
    def best_step(self) -> int:
        return self.fitted.best_step

    @property
    def seconds(self) -> float:
        return self.fitted.seconds

    def __repr__(self) -> str:
        said = f"{self.fitted.steps} steps, at step {self.best_step}, {self.seconds:.0f} s"
        if self.metric is None or self.before is None or self.after is None:
            return f"<FinetuneResult: {said}>"
        dense = "" if self.dense is None else f" (dense {self.dense.value:.4g})"
        change = f"{self.metric.name} {self.before.value:.4g} -> {self.after.value:.4g}{dense}"
        return f"<FinetuneResult: {change}, {said}>"


def finetune(
    model: PreTrainedModel,
    data: Any,
    *,
    teacher: nn.Module | str | Path | None = None,
    evaluation: Any = None,
    validation: Any = None,
    task: Task | str | None = None,
    metric: str | MetricFunction | None = None,
    folder: str | Path | None = None,
    config: TrainConfig | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> FinetuneResult:
    """Train a pruned model, in place, on labels, on what the dense model says, or on both.

    `data` are batches, whose samples are shuffled into new ones, `headprune.data.Examples`, or a data set of rows.
    `teacher` is the dense model, or where it was saved: the pruned model learns its predictions and, where widths
    match, its hidden states; without labels these alone. `evaluation` batches, which are not trained on, measure the
    model before and after. The best model is chosen on `validation` data, or on a share of `data` that is held out,
    where there is more than one evaluation. `folder` holds checkpoints, from which the same call goes on after a kill;
    without one nothing is kept. `options` are the fields of `TrainConfig`: epochs, learning_rate, lora, patience, ...
    """
    settings = train_config(options, config)
    refuse_quantized(model, "trained")
    refuse_offloaded(model, "trained")
    chosen = task if isinstance(task, Task) else task_of(model, task)
    dense = load(teacher, dtype=model.dtype).to(model.device) if isinstance(teacher, (str, Path)) else teacher
    held = None if evaluation is None else as_examples(evaluation, model).batches(settings.batch_size)
    measured: Metric | None = None
    before = after = reference = None
    if held is not None:
        before, reference = _quality(model, held, chosen), _dense_quality(dense, held, chosen)
        measured = choose_metric(metric, before)
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as place:
        fitted = fit(
            model,
            data,
            task=chosen,
            config=settings,
            folder=place,
            teacher=dense,
            validation=validation,
            callbacks=callbacks,
            metric=metric,
        )
    if held is None or measured is None or before is None:
        return FinetuneResult(model, fitted, settings)
    against = reference or before  # fidelity without the dense model is to the model as it was
    after = _quality(model, held, chosen)
    return FinetuneResult(
        model,
        fitted,
        settings,
        measured,
        measured.of(before, against),
        measured.of(after, against),
        None if reference is None else measured.of(reference, reference),
    )


def _quality(model: Any, batches: Sequence[Any], task: Task) -> Quality:
    return Evaluator(batches, task, cache_bytes=0)(model, ())


def _dense_quality(model: Any, batches: Sequence[Any], task: Task) -> Quality | None:
    return None if model is None else _quality(model, batches, task_of(model, task.same))
