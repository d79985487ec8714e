"""How often a greedy run scores again: before every step, before every n-th, or before steps of several units.

`auto` takes several units at once while that is safe: old scores would have chosen as new ones do, what leaves together
is a small part of all that is left, and scores at a site that has lost a unit are those that it will have then. It
decides by the steps and the scores alone, so a run that goes on after a kill decides as it would have.
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
ALIKE, UNLIKE = 1 / 2, 1 / 3  # of the units that would go next, the share that old and new scores agree on
SHARE = 3  # at most one part in so many of the units that are left goes at once
CALM = 0.08  # of all scores that are left, what those that go at once may add up to


def check_rescore(word: str | int) -> str:
    """The word, unless it is no way to score again."""
    text = str(word)
    if text in (EVERY, AUTO) or (text.isdecimal() and int(text) >= 1):
        return text
    raise ScheduleError(f"There is no way {text!r} to score again; use 'every', 'auto' or a number of steps such as 4.")


def is_due(word: str, steps: Sequence[Step]) -> bool:
    """Whether the step after these, the dense model among them, scores again. Removals go by the last scores else."""
    return word in (EVERY, AUTO) or (len(steps) - 1) % int(word) == 0


Without = Callable[[Site, Sequence[int]], torch.Tensor | None]  # scores of a site when these members go as well


def together(
    rule: StepRule,
    steps: Sequence[Step],
    scores: torch.Tensor,
    sites: Sequence[Site],
    without: Without,
    most: int | None,
) -> list[Member]:
    """Who leaves by `auto` in the step after these, by its fresh scores.

    One unit after the other, as if the model were scored in between: at a site that has lost one, by the scores that
    it will have then, where they can be told, and not at all where they cannot.
    """
    one_by_one, every = replace(rule, every=1), rule.every
    ranked = ranked_units(scores, sites)
    total, within = sum(value for value, _ in ranked), 0.0
    limit = every * max(1, min(_trusted(steps, scores, sites, every), len(ranked) // (SHARE * every)))
    if ranked and ranked[0][0] < 0:  # of an order turned round: there are no shares of such scores
        limit = every
    left = {site.index: site for site in sites}
    known, chosen, unknown = scores.clone(), list[Member](), set[int]()
    for units in range(limit):
        room = None if most is None else most - len(chosen)
        unit = one_by_one.choose(known, list(left.values()), room)
        if not unit or (chosen and room is not None and len(unit) > room):
            break
        index = unit[0].site
        within += float(torch.stack([known[member] for member in unit]).double().mean())
        if units >= every and (index in unknown or not within <= CALM * total):
            break
        chosen += unit
        site = next(site for site in sites if site.index == index)
        gone = [member.index for member in chosen if member.site == index]
        left[index] = replace(site, kept=tuple(member for member in site.kept if member not in gone))
        for member in unit:
            known[member] = torch.nan
        ahead = without(site, gone) if left[index].kept and units + 1 < limit else None
        if ahead is None:
            unknown.add(index)
        else:
            known[index, list(left[index].kept)] = ahead.to(known)
    return chosen


def _trusted(steps: Sequence[Step], scores: torch.Tensor, sites: Sequence[Site], every: int) -> int:
    """How many times `every` units may go at once, by how well earlier scores would have chosen."""
    trusted = 1
    for before, now in zip(steps[1:], [*(step.scores for step in steps[2:]), scores], strict=False):
        trusted = _next(trusted, before, now, sites, every)
    return trusted


def _next(trusted: int, before: Step, now: torch.Tensor | None, sites: Sequence[Site], every: int) -> int:
    """The same after scores that were followed by these: twice as many if the scores before would have chosen as these
    do. `sites` are those of today, which may have lost units since."""
    assert before.scores is not None
    assert now is not None
    left = ~now.isnan()
    there = [replace(site, kept=tuple(left[site.index].nonzero().flatten().tolist())) for site in sites]
    old, new = ([unit for _, unit in ranked_units(scores, there)] for scores in (before.scores, now))
    span = min(2 * trusted * every, len(new))
    agreed = len(set(old[:span]) & set(new[:span])) / span if span else 1.0
    return 2 * trusted if agreed >= ALIKE else max(1, trusted // 2) if agreed < UNLIKE else trusted
