"""Which steps of a greedy run score again: every one, every n-th, or as often as the scores have moved.

All that a policy knows is in the steps themselves, so a run that goes on after a kill decides as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headprune.errors import ScheduleError
from headprune.measure.trajectory import Step
from headprune.units import Member

EVERY, AUTO = "every", "auto"
ALIKE, UNLIKE = 0.75, 0.5  # of the units that would go next, the share that old and new scores agree on
SHARE = 4  # at most so much of what is left, one part in this many, goes by the same scores


def check_rescore(word: str | int) -> str:
    """The word, unless it is no way to score again."""
    text = str(word)
    if text in (EVERY, AUTO) or (text.isdecimal() and int(text) >= 1):
        return text
    raise ScheduleError(f"There is no way {text!r} to score again; use 'every', 'auto' or a number of steps such as 4.")


def is_due(word: str, steps: Sequence[Step]) -> bool:
    """Whether the step after these, the dense model among them, scores again. Removals go by the last scores else."""
    if word == EVERY or len(steps) == 1:
        return True
    if word != AUTO:
        return (len(steps) - 1) % int(word) == 0
    last, interval = 1, 1
    for number in range(2, len(steps)):
        if number - last >= _most(interval, steps[number - 1]):
            interval = _next(interval, steps, last, number)
            last = number
    return len(steps) - last >= _most(interval, steps[-1])


def _most(interval: int, before: Step) -> int:
    """The interval in steps, as long as it leaves most of the model alone."""
    units = max(1, len(before.removed))
    return max(1, min(interval, before.left // (SHARE * units)))


def _next(interval: int, steps: Sequence[Step], old: int, new: int) -> int:
    """The interval after the scores of step `new`: longer if those of step `old` would have done for twice as long."""
    before, now = steps[old].scores, steps[new].scores
    assert before is not None
    assert now is not None
    there = ~now.isnan()
    span = min(2 * interval * max(1, len(steps[new].removed)), int(there.sum()))
    both = set(_lowest(before.masked_fill(~there, torch.nan), span)) & set(_lowest(now, span))
    agreed = len(both) / span if span else 1.0
    return 2 * interval if agreed >= ALIKE else max(1, interval // 2) if agreed < UNLIKE else interval


def _lowest(scores: torch.Tensor, count: int) -> list[Member]:
    """The members with the least scores, equal ones in order of site and member."""
    there = (~scores.isnan()).nonzero().tolist()
    return sorted((Member(*place) for place in there), key=lambda member: (float(scores[member]), member))[:count]
