"""The interface of runtimes, other programs that run models, and of models that are open in one."""

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

TOKENS = 20  # that a model generates greedily, to check and to time its KV cache


@dataclass(frozen=True)
class Source:
    """What is exported: a model, pruned or dense, its task, real rows, and the folder of its tokenizer."""

    model: PreTrainedModel  # on the CPU, in float32, in evaluation mode
    task: Task
    batch: Mapping[str, torch.Tensor]  # prepared by the task: inputs of the model, and labels where there are some
    folder: Path | None = None  # of tokenizer and processor files


class Outputs(SimpleNamespace):
    """The outputs of a runner, under the names of transformers, so that a task can read them."""


class Runner(ABC):
    """An exported model that is open in its runtime, called like the model."""

    @abstractmethod
    def __call__(self, **inputs: Any) -> Any:
        """The outputs for these inputs, as torch tensors under the names of transformers."""

    def generate(self, inputs: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
        """Generate this many tokens after a prompt greedily, with the KV cache of the runtime."""
        raise ExportError("This exported model does not generate text; export a causal or an encoder-decoder model.")

    def can_generate(self) -> bool:
        """Whether it generates text from tokens alone."""
        return True

    def close(self) -> None:  # noqa: B027  # most runtimes free their memory by themselves
        """Free the memory of the runtime."""


class Runtime(ABC):
    """Where exported models run. One object per runtime, registered by name."""

    name: ClassVar[str]
    title: ClassVar[str]  # in messages
    extra: ClassVar[str]  # of headprune, which installs its packages
    modules: ClassVar[tuple[str, ...]]  # that have to be importable
    quantizations: ClassVar[tuple[str, ...]]
    install: ClassVar[str]  # the packages for pip where the model only runs
    in_caller: ClassVar[bool] = (
        False  # whether a single thread is that of the caller, so that its CPU time can be measured
    )
    log_probabilities: ClassVar[bool] = False  # whether a runner returns these instead of logits
    checked_tokens: ClassVar[int | None] = None  # at most, where a check is slow
    # Allowed difference of outputs in float to those of torch, relative to the largest output.
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def refuse(self, source: Source) -> None:
        """Raise ExportError, with the fix, for a model that cannot be exported."""

    @abstractmethod
    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        """Write all files that the runtime needs into an empty folder."""

    @abstractmethod
    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> Runner:
        """Load the files of `write` into the runtime."""

    @abstractmethod
    def snippet(self, folder: Path) -> str:
        """Python that runs the exported folder with nothing but the runtime installed; the folder's path is `DIR`."""


RUNTIMES: dict[str, Runtime] = {}


def runtime(kind: type[Runtime]) -> type[Runtime]:
    """Register a runtime."""
    assert kind.name not in RUNTIMES, f"two runtimes are called {kind.name}"
    RUNTIMES[kind.name] = kind()
    return kind
