"""The table of tasks in the documentation, generated from the task classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headprune.tasks import TASKS, Task
from headprune.tasks.classification import MULTIPLE, REGRESSION, SINGLE, SequenceClassification

# A stand-in for a model: what the constructors of tasks read of one.
NO_MODEL: Any = SimpleNamespace(
    config=SimpleNamespace(ctc_loss_reduction="mean", pad_token_id=0), forward=lambda **inputs: None
)
PROBLEMS = {SINGLE: "", MULTIPLE: "several labels: ", REGRESSION: "numbers: "}


def markdown_table() -> str:
    """One row per task: its name, the contents of a row of data, its default metric, and the others that fit, without
    fidelity, which fits all tasks."""
    lines = ["| task | a row of data | usual metric | other metrics |", "|---|---|---|---|"]
    for kind in TASKS:
        forms = _forms(kind)
        default = "; ".join(f"{word}`{task.metrics[0]}`" for word, task in forms)
        more = "; ".join(f"{word}{_join_names(task.metrics[1:])}" for word, task in forms if task.metrics[1:])
        lines.append(f"| `{kind.name}`: {kind.title} | {kind.data} | {default} | {more or '-'} |")
    return "\n".join(lines) + "\n"


def _forms(kind: type[Task]) -> list[tuple[str, Task]]:
    """A task, or one for each problem type."""
    if not issubclass(kind, SequenceClassification):
        return [("", kind(NO_MODEL))]
    return [(word, kind(NO_MODEL, problem)) for problem, word in PROBLEMS.items()]


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
