"""The errors a user can cause. Each message is one sentence that names the problem and the fix.

The command line turns every `HeadpruneError` into exit code 2; anything else is a bug and exits with 1.
"""

import warnings


class HeadpruneError(Exception):
    """Something about the input is wrong; nothing was changed and nothing was written."""


class UnsupportedModelError(HeadpruneError):
    """The attention of this model cannot be read, or its heads cannot be removed exactly."""


class HeadSelectionError(HeadpruneError, ValueError):
    """The heads asked for do not exist, are gone already, or are only part of a unit."""


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
    """A checkpoint directory cannot be written or loaded as it is."""


class VocabularyError(HeadpruneError, ValueError):
    """The vocabulary of a model cannot be made smaller as asked for."""


class RegistrationError(HeadpruneError, ValueError):
    """A family or criterion is registered under a bad or taken name."""


class DataError(HeadpruneError, ValueError):
    """The data does not fit the model or the method."""


class CriterionError(HeadpruneError, ValueError):
    """There is no such criterion, or it does not take these options."""


class NonFiniteError(HeadpruneError):
    """A NaN or Inf appeared; the message says where first."""


class ScheduleError(HeadpruneError, ValueError):
    """A schedule or a stopping rule makes no sense."""


class MissingPackageError(HeadpruneError, ImportError):
    """A package that comes with an extra is not installed."""


class ReplayError(HeadpruneError):
    """A step of a journal does not come out as it did when it was written."""


class TrainingError(HeadpruneError, ValueError):
    """A model cannot be trained as asked for."""


class ExportError(HeadpruneError, ValueError):
    """A model cannot be exported as asked for, or what was exported computes something else."""


class RunError(HeadpruneError):
    """A run directory cannot be used, or belongs to another run."""


class RunBusyError(RunError):
    """Another process is working on a run."""


class SweepError(HeadpruneError, ValueError):
    """A sweep over models, data, criteria, seeds and budgets is not asked for as it can be."""


class RankError(HeadpruneError):
    """Another of several processes failed, died or does not answer."""


def warn_renamed(old: str, new: str) -> None:
    """Say that an option was given by the name of an earlier version."""
    warnings.warn(f"{old} is called {new} now; use that, as the old name will go.", FutureWarning, stacklevel=3)
