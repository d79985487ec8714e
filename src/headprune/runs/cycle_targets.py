"""Splits the target of a run into parts, one for each cycle of pruning and recovery."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from headprune.config.groups import BUDGETS
from headprune.errors import TrainingError
from headprune.search.config import Experiment


def split_target(experiment: Experiment, result: Mapping[str, Any], rounds: int) -> list[dict[str, Any]]:
    """The settings of each cycle that differ from the run's; each removes the same part of what the run removed.

    A cycle starts from the model of the previous one, so its budget is relative to that model.
    """
    no_rules: dict[str, Any] = {"max_drop": None, "knee": False, "explore": False, "keep": None}
    budget = experiment.budget
    if budget is not None:
        (name,) = [name for name, measure in BUDGETS.items() if measure == budget.measure]
        shares = [1 - (1 - budget.last) * number / rounds for number in range(rounds + 1)]
        left = [now / before for before, now in itertools.pairwise(shares)]
        return [{**no_rules, name: (1 / share if name == "speedup" else share,)} for share in left]
    if len(experiment.units) > 1:
        raise TrainingError("Cycles need a target, and the run has no budget; prune with one, or leave out --cycles.")
    counts = (result.get("units") or {}).get(experiment.units[0])
    before, after = counts or (result["heads_before"], result["heads_after"])
    if before - after < rounds:
        raise TrainingError(
            f"The run removed {before - after} of {before} {experiment.units[0]}, too few for {rounds} cycles; use "
            "fewer."
        )
    return [{**no_rules, "keep": before - round((before - after) * number / rounds)} for number in range(1, rounds + 1)]
