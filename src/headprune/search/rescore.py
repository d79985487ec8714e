"""How often a greedy run scores again: before every step, before every n-th, or before steps of several units.

`auto` removes several units at once while that is safe: old scores would have chosen as new ones do, the units have a
small part of all scores that are left, and scores at a site that has lost a unit are predicted. It decides by the steps
and the scores alone, so a resumed run decides as it would have without the interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headprune.errors import ScheduleError
from headprune.measure.trajectory import Step
from headprune.search.step_rule import StepRule, ranked_units
from headprune.units import Member, Site

EVERY, AUTO = "every", "auto"
ALIKE, UNLIKE = 1 / 2, 1 / 3  # share of the units to be removed next that old and new scores agree on
SHARE = 3  # at most one in this many of the units that are left is removed at once
SCORE_SHARE = 0.08  # of all scores that are left: the largest part that is removed at once


def check_rescore(word: str | int) -> str:
    """The value as text; raises where it is invalid."""
    text = str(word)
    if text in (EVERY, AUTO) or (text.isdecimal() and int(text) >= 1):
        return text
    raise ScheduleError(f"rescore takes 'every', 'auto' or a number of steps such as 4, not {text!r}.")


def is_due(word: str, steps: Sequence[Step]) -> bool:
    """Whether the step after these, the dense model among them, scores again; otherwise it uses the last scores."""
    return word in (EVERY, AUTO) or (len(steps) - 1) % int(word) == 0


Without = Callable[[Site, Sequence[int]], torch.Tensor | None]  # scores of a site without these members


def choose_together(
    rule: StepRule,
    steps: Sequence[Step],
    scores: torch.Tensor,
    sites: Sequence[Site],
    without: Without,
    most: int | None,
) -> list[Member]:
    """The members that `auto` removes in the step after these, by its new scores.

    Units are chosen one after the other, as if the model were scored in between: at a site that has lost one, by
    predicted scores, and not at all where they cannot be predicted.
    """
    one_by_one, every = replace(rule, every=1), rule.every
    ranked = ranked_units(scores, sites)
    total, removed_score = sum(value for value, _ in ranked), 0.0
    limit = every * max(1, min(_steps_trusted(steps, scores, sites, every), len(ranked) // (SHARE * every)))
    if ranked and ranked[0][0] < 0:  # of an inverse criterion: shares of negative scores are meaningless
        limit = every
    left = {site.index: site for site in sites}
    predicted, chosen, unknown = scores.clone(), list[Member](), set[int]()
    for units in range(limit):
        most_left = None if most is None else most - len(chosen)
        unit = one_by_one.choose(predicted, list(left.values()), most_left)
        if not unit or (chosen and most_left is not None and len(unit) > most_left):
            break
        index = unit[0].site
        removed_score += float(torch.stack([predicted[member] for member in unit]).double().mean())
        if units >= every and (index in unknown or not removed_score <= SCORE_SHARE * total):
            break
        chosen += unit
        site = next(site for site in sites if site.index == index)
        leaving = [member.index for member in chosen if member.site == index]
        left[index] = replace(site, kept=tuple(member for member in site.kept if member not in leaving))
        for member in unit:
            predicted[member] = torch.nan
        predicted_scores = without(site, leaving) if left[index].kept and units + 1 < limit else None
        if predicted_scores is None:
            unknown.add(index)
        else:
            predicted[index, list(left[index].kept)] = predicted_scores.to(predicted)
    return chosen


def _steps_trusted(steps: Sequence[Step], scores: torch.Tensor, sites: Sequence[Site], every: int) -> int:
    """How many times `every` units may be removed at once, by how well earlier scores would have chosen."""
    count = 1
    for before, now in zip(steps[1:], [*(step.scores for step in steps[2:]), scores], strict=False):
        count = _update_trust(count, before, now, sites, every)
    return count


def _update_trust(count: int, before: Step, now: torch.Tensor | None, sites: Sequence[Site], every: int) -> int:
    """The same after one more step: twice as many if the scores before would have chosen as the new ones do. `sites`
    are the current ones, which may have lost units since."""
    assert before.scores is not None
    assert now is not None
    left = ~now.isnan()
    sites_then = [replace(site, kept=tuple(left[site.index].nonzero().flatten().tolist())) for site in sites]
    old, new = ([unit for _, unit in ranked_units(scores, sites_then)] for scores in (before.scores, now))
    span = min(2 * count * every, len(new))
    agreement = len(set(old[:span]) & set(new[:span])) / span if span else 1.0
    return 2 * count if agreement >= ALIKE else max(1, count // 2) if agreement < UNLIKE else count
