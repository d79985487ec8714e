"""What a runtime is: a program that serves models and is not PyTorch with headprune, and how a model gets there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from headprune.errors import ExportError
from headprune.tasks import Task

TOKENS = 20  # that a model writes, to see that what it remembers of earlier ones is right, and how long that takes


@dataclass(frozen=True)
class Source:
    """What is exported: a model, pruned or dense, what it is for, real rows, and the folder of its tokenizer."""

    model: PreTrainedModel  # on the CPU, in float32, in evaluation mode
    task: Task
    batch: Mapping[str, torch.Tensor]  # prepared by the task: what the model takes, and labels where there are some
    folder: Path | None = None  # tokenizer and processor files are here


class Outputs(SimpleNamespace):
    """What a runner gives, under the names that transformers' outputs have, so that a task can read it."""


class Runner(ABC):
    """An exported model that has been opened in its runtime: called as the model is."""

    @abstractmethod
    def __call__(self, **inputs: Any) -> Any:
        """What the model gives for these inputs, as tensors of torch under the names that transformers uses."""

    def generate(self, inputs: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
        """So many tokens after one prompt, each the most probable, with the runtime's cache."""
        raise ExportError("Only models that write text generate.")

    def can_generate(self) -> bool:
        """Whether it writes text from tokens alone."""
        return True

    def close(self) -> None:  # noqa: B027  # most runtimes give back what they hold by themselves
        """Give back what the runtime holds."""


class Runtime(ABC):
    """Where exported models run. One object per runtime, registered by name."""

    name: ClassVar[str]
    title: ClassVar[str]  # for people
    extra: ClassVar[str]  # of headprune, with which its packages come
    modules: ClassVar[tuple[str, ...]]  # what has to be importable
    quantizations: ClassVar[tuple[str, ...]]
    install: ClassVar[str]  # what pip has to bring where the model only runs
    in_caller: ClassVar[bool] = False  # whether one thread is the caller's own, whose clock nothing else disturbs
    log_probabilities: ClassVar[bool] = False  # whether a runner gives these instead of logits
    checked_tokens: ClassVar[int | None] = None  # look at no more than this many, where looking is slow
    # How far an output in float may be from torch's, for outputs of the size of 1: that of the largest one counts.
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def refuse(self, source: Source) -> None:
        """Raise ExportError, in one sentence that names what to do instead, for a model that cannot be exported."""

    @abstractmethod
    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        """Fill an empty folder with all that the runtime needs to run the model."""

    @abstractmethod
    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> Runner:
        """Load what `write` wrote into the real runtime."""

    @abstractmethod
    def snippet(self, folder: Path) -> str:
        """Python that runs the exported folder with nothing but the runtime installed; the folder's path is `DIR`."""


RUNTIMES: dict[str, Runtime] = {}


def runtime(kind: type[Runtime]) -> type[Runtime]:
    """Register a runtime."""
    assert kind.name not in RUNTIMES, f"two runtimes are called {kind.name}"
    RUNTIMES[kind.name] = kind()
    return kind
