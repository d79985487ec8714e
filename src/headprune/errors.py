"""The errors that a user can cause; each message is one sentence that names the problem and the fix.

The command line turns every `HeadpruneError` into exit code 2; anything else is a bug and exits with 1.
"""

import warnings
from typing import Any


class HeadpruneError(Exception):
    """The input is wrong; nothing was changed and nothing was written."""


class UnsupportedModelError(HeadpruneError):
    """The attention of this model cannot be read, or its heads cannot be removed exactly."""


class HeadSelectionError(HeadpruneError, ValueError):
    """The selected heads do not exist, have been removed already, or are only part of a unit."""


class GateError(HeadpruneError, ValueError):
    """A gate tensor does not fit the model or the batch."""


class EquivalenceError(HeadpruneError):
    """The pruned model does not compute what the gated model computes."""

    def __init__(self, difference: float, tolerance: float) -> None:
        self.difference = difference
        self.tolerance = tolerance
        super().__init__(
            f"Removing these heads changed the outputs by up to {difference:.3g} (allowed: {tolerance:.3g}) compared "
            "with gating them to zero, so the removal was undone; report the model family, or register it with "
            "headprune.register_family(...)."
        )


class CheckpointError(HeadpruneError):
    """A checkpoint directory cannot be written or loaded."""


class VocabularyError(HeadpruneError, ValueError):
    """The vocabulary of a model cannot be shrunk."""


class RegistrationError(HeadpruneError, ValueError):
    """A family or criterion is registered under a bad or taken name."""


class DataError(HeadpruneError, ValueError):
    """The data does not fit the model or the method."""


class CriterionError(HeadpruneError, ValueError):
    """There is no such criterion, or it does not have these options."""


class NonFiniteError(HeadpruneError):
    """A NaN or Inf appeared; the message says where first."""


class ScheduleError(HeadpruneError, ValueError):
    """A schedule or a stopping rule has invalid or conflicting settings."""


class MissingPackageError(HeadpruneError, ImportError):
    """A package that comes with an extra is not installed."""


class ReplayError(HeadpruneError):
    """Repeating a step of a journal does not give the recorded result."""


class TrainingError(HeadpruneError, ValueError):
    """A model cannot be trained with these settings."""


class ExportError(HeadpruneError, ValueError):
    """A model cannot be exported with these settings, or the exported model gives other outputs."""


class RunError(HeadpruneError):
    """A run directory cannot be used, or belongs to another run."""


class RunBusyError(RunError):
    """Another process is working on a run."""


class ConfigError(HeadpruneError, ValueError):
    """A file with options cannot be read, or names an option that there is not."""


class StudyError(HeadpruneError, ValueError):
    """A study of models, data, criteria, seeds and budgets cannot be run as it is described."""


class RankError(HeadpruneError):
    """Another process of a distributed run failed, died or does not answer."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that something was used by its name in an earlier version."""
    warnings.warn(f"{old} is called {new} now; use that, as the old name will go.", FutureWarning, stacklevel=3)


def __getattr__(name: str) -> Any:
    if name != "SweepError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed("SweepError", "StudyError")
    return StudyError


class FormerName:
    """An attribute by its name in an earlier version: a descriptor that warns, and gives the attribute of today."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self.old}", self.new)
        return getattr(instance, self.new)
