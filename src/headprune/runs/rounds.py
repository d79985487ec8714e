"""The target of a run in parts: what each round of pruning and recovery may leave."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from headprune.errors import TrainingError
from headprune.search.config import BUDGETS, Experiment


def plan_rounds(experiment: Experiment, result: Mapping[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Settings of each round that differ from the run's; each removes the same part of what the run removed.

    A round starts from the model of the one before, so a budget is what is left of that one.
    """
    ends: dict[str, Any] = {"max_drop": None, "knee": False, "explore": False, "keep": None}
    budget = experiment.budget
    if budget is not None:
        (name,) = [name for name, measure in BUDGETS.items() if measure == budget.measure]
        shares = [1 - (1 - budget.last) * number / rounds for number in range(rounds + 1)]
        left = [now / before for before, now in itertools.pairwise(shares)]
        return [{**ends, name: (1 / share if name == "speedup" else share,)} for share in left]
    if len(experiment.units) > 1:
        raise TrainingError("Rounds need a target, and the run has no budget; prune with one, or leave out --rounds.")
    counts = (result.get("units") or {}).get(experiment.units[0])
    before, after = counts or (result["heads_before"], result["heads_after"])
    if before - after < rounds:
        raise TrainingError(
            f"The run removed {before - after} of {before} {experiment.units[0]}, too few for {rounds} rounds; ask for "
            "fewer."
        )
    return [{**ends, "keep": before - round((before - after) * number / rounds)} for number in range(1, rounds + 1)]
