"""The table of tasks for people, made from the tasks themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headprune.tasks import TASKS, Task
from headprune.tasks.classification import MULTIPLE, REGRESSION, SINGLE, SequenceClassification

# Tasks belong to a model; these numbers are all that any of them reads from its config at once.
NO_MODEL: Any = SimpleNamespace(config=SimpleNamespace(ctc_loss_reduction="mean", pad_token_id=0))
PROBLEMS = {SINGLE: "", MULTIPLE: "several labels: ", REGRESSION: "numbers: "}


def markdown_table() -> str:
    """One row per task: its name, what a row of data holds, its usual metric, and the others that fit. Fidelity, which
    fits all of them, is not repeated."""
    lines = ["| task | a row of data | usual metric | other metrics |", "|---|---|---|---|"]
    for kind in TASKS:
        forms = _forms(kind)
        usual = "; ".join(f"{word}`{task.metrics[0]}`" for word, task in forms)
        others = "; ".join(f"{word}{_listed(task.metrics[1:])}" for word, task in forms if task.metrics[1:])
        lines.append(f"| `{kind.name}`: {kind.title} | {kind.data} | {usual} | {others or '-'} |")
    return "\n".join(lines) + "\n"


def _forms(kind: type[Task]) -> list[tuple[str, Task]]:
    """A task, or one for each problem that its models may have."""
    if not issubclass(kind, SequenceClassification):
        return [("", kind(NO_MODEL))]
    return [(word, kind(NO_MODEL, problem)) for problem, word in PROBLEMS.items()]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
