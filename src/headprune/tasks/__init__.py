"""What a model predicts: its inputs, targets, loss per sample, predictions and metrics, one class per task."""

from headprune.batches import IGNORED, batch_size, own_batches, to_device
from headprune.tasks.resolve import task_of
from headprune.tasks.spec import TASKS, Labels, Task

__all__ = [
    "IGNORED",
    "TASKS",
    "Labels",
    "Task",
    "batch_size",
    "own_batches",
    "task_of",
    "to_device",
]
