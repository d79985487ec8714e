"""Those who watch a run: they are told of every step, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headprune.measure.trajectory import Step

OnStep = Callable[[Step], None]


class Observer:
    """Somebody who watches a pruner: a journal, a progress display, a callback of one's own."""

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        """A step was taken and measured; `seconds` says how long that took."""

    def replayed(self, step: Step) -> None:
        """A step of an earlier process was taken over."""


class Journal(Observer):
    """An observer that keeps the steps, those of earlier processes included."""

    steps: list[Step]


class Callback(Observer):
    """A plain function as an observer; it sees replayed steps as well."""

    def __init__(self, function: OnStep) -> None:
        self.function = function

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.function(step)

    def replayed(self, step: Step) -> None:
        self.function(step)
