"""Recovery from Python: train a pruned model, and measure it before and after."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from headprune import distributed
from headprune.checkpoint.save_load import load
from headprune.display import counted, data_frame, html_table
from headprune.hooks.model_lock import exclusively
from headprune.hooks.offload import refuse_offloaded
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, MetricFunction, MetricValue, choose_metric
from headprune.measure.predictions import Predictions
from headprune.search.progress_bars import TrainingBar
from headprune.tasks import Task, task_of
from headprune.training.config import TrainConfig, train_config
from headprune.training.dataset import as_examples
from headprune.training.fit import FitResult, fit
from headprune.training.schedule import Evaluation, LogCallback
from headprune.units.linear import drop_gguf_quantizer, refuse_inference_weights, refuse_quantized


@dataclass(frozen=True, repr=False)
class FinetuneResult:
    """The model, trained in place, and its metric on the evaluation data before and after."""

    model: PreTrainedModel
    fitted: FitResult
    config: TrainConfig
    metric: Metric | None = None
    before: MetricValue | None = None
    after: MetricValue | None = None
    dense: MetricValue | None = None

    @property
    def history(self) -> list[dict[str, float]]:
        return self.fitted.history

    @property
    def evaluations(self) -> list[Evaluation]:
        return self.fitted.evaluations

    @property
    def best_step(self) -> int:
        return self.fitted.best_step

    @property
    def seconds(self) -> float:
        return self.fitted.seconds

    def to_frame(self) -> Any:
        """A pandas frame with a line per logged step: its losses, and the metric where the model was evaluated."""
        lines: dict[int, dict[str, Any]] = {entry["step"]: dict(entry) for entry in self.fitted.history}  # type: ignore[misc]
        for evaluation in self.evaluations:
            line = lines.setdefault(evaluation.step, {"step": evaluation.step})
            line[self.fitted.metric or "metric"] = evaluation.value
        return data_frame(lines[step] for step in sorted(lines))

    def plot(self) -> Any:
        """The losses over the steps of the training, as an Altair chart."""
        from headprune.reports.recovery import losses

        return losses({"history": self.history})

    def _repr_html_(self) -> str:
        measured = {"dense": self.dense, "before": self.before, "after": self.after}
        rows = [(name, f"{value.value:.4g}", _ends(value)) for name, value in measured.items() if value is not None]
        headings = ("", "metric" if self.metric is None else self.metric.name, "95% interval")
        notes = [] if rows else ["Nothing was evaluated before and after; pass evaluation=batches for that."]
        return html_table(f"Fine-tuned: {self._training}", headings, rows, notes)

    @property
    def _training(self) -> str:
        return f"{counted(self.fitted.steps, 'step')}, at step {self.best_step}, {self.seconds:.0f} s"

    def __repr__(self) -> str:
        training = self._training
        if self.metric is None or self.before is None or self.after is None:
            return f"<FinetuneResult: {training}>"
        dense = "" if self.dense is None else f" (dense {self.dense.value:.4g})"
        change = f"{self.metric.name} {self.before.value:.4g} -> {self.after.value:.4g}{dense}"
        return f"<FinetuneResult: {change}, {training}>"


def _ends(value: MetricValue) -> str:
    return "" if value.interval is None else f"[{value.interval.low:.4g}, {value.interval.high:.4g}]"


@exclusively
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
    progress: bool | None = None,
    **options: Any,
) -> FinetuneResult:
    """Train a pruned model, in place, on labels, on the dense model's predictions, or on both.

    `data` are batches, whose samples are shuffled into new ones, `headprune.data.Examples`, or a data set of rows.
    `teacher` is the dense model, or where it was saved: the pruned model learns its predictions and, where widths
    match, its hidden states; without labels these alone. `evaluation` batches, which are not trained on, measure the
    model before and after. The best model is chosen on `validation` data, or on a share of `data` that is held out,
    where there is more than one evaluation. `folder` holds checkpoints, from which the same call resumes after a kill;
    without it there are none. A `progress` bar is shown as by `prune`. `options` are the fields of `TrainConfig`:
    epochs, learning_rate, lora, patience, ...
    """
    settings = train_config(options, config)
    refuse_quantized(model, "trained")
    refuse_inference_weights(model)
    drop_gguf_quantizer(model)
    refuse_offloaded(model, "trained")
    resolved = task if isinstance(task, Task) else task_of(model, task)
    dense = load(teacher, dtype=model.dtype).to(model.device) if isinstance(teacher, (str, Path)) else teacher
    batches = None if evaluation is None else as_examples(evaluation, model).batches(settings.batch_size)
    chosen: Metric | None = None
    before = after = reference = None
    value_before = None
    with (
        TrainingBar(progress if distributed.is_main() else False) as bar,
        tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as output_dir,
    ):
        if batches is not None:
            teacher_task = None if dense is None else task_of(dense, resolved.transferable_name)
            before = _predictions(model, batches, resolved)
            reference = None if teacher_task is None else _predictions(dense, batches, teacher_task)
            chosen = choose_metric(metric, before)
            value_before = chosen.of(before, reference or before).value
        fitted = fit(
            model,
            data,
            task=resolved,
            config=settings,
            folder=output_dir,
            teacher=dense,
            validation=validation,
            callbacks=[*callbacks, LogCallback(bar, "metric" if chosen is None else chosen.name, value_before)],
            metric=metric,
        )
        if batches is not None:
            after = _predictions(model, batches, resolved)
    if chosen is None or before is None or after is None:
        return FinetuneResult(model, fitted, settings)
    baseline = reference or before  # fidelity without the dense model is to the model before training
    return FinetuneResult(
        model,
        fitted,
        settings,
        chosen,
        chosen.of(before, baseline),
        chosen.of(after, baseline),
        None if reference is None else chosen.of(reference, reference),
    )


def _predictions(model: Any, batches: Sequence[Any], task: Task) -> Predictions:
    return Evaluator(batches, task, cache_bytes=0)(model, ())
