"""The rows of several seeds as one: means with standard deviations, and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.papers.paper_models import ReproductionError

ResultRow = Mapping[str, Any]  # of rows.json
DIGITS = 5
SPEED = "speed"


def summarise(
    seeds: Mapping[int, Sequence[ResultRow]], speeds: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row per row of the plan, from those of all seeds, in the order of the plan. Percentages compare rows of the
    same seed."""
    by_name = [{row["name"]: row for row in rows} for rows in seeds.values()]
    return [_row(name, by_name, list(speeds.values())) for name in by_name[0]]


def _row(name: str, seeds: Sequence[Mapping[str, ResultRow]], speeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [rows[name] for rows in seeds]
    first = rows[0]
    model = first["model"]

    def share(key: str, reference: str) -> list[float]:
        """Per cent of the same of another row, seed by seed."""
        return [100 * row[key] / others[reference][key] for row, others in zip(rows, seeds, strict=True)]

    def percent(reference: str) -> list[float]:
        return [value - 100 for value in share("loss", reference)]

    result: dict[str, Any] = {
        **{key: first[key] for key in ("name", "model", "kind", "what", "steps")},
        "heads": _one_or_all([row["heads"] for row in rows]),
        "parameters": _one_or_all([row["parameters"] for row in rows]),
        "of_dense": spread(share("parameters", f"{model}-dense")),
        "loss": spread([row["loss"] for row in rows]),
        "interval": [round(row["interval"], DIGITS) for row in rows],
        "bits_per_byte": spread([row["loss"] / math.log(2) for row in rows]),
        "kept_per_layer": [[len(ids) for ids in row["kept"].values()] for row in rows],
    }
    if first["kind"] != "dense":
        result["percent_to_dense"] = spread(percent(f"{model}-dense"))
    if "loss_before_tuning" in first:
        result["loss_before_tuning"] = spread([row["loss_before_tuning"] for row in rows])
        result["percent_to_trained_on"] = spread(percent(f"{model}-dense-trained-on"))
    if "behind_gates" in first:
        # Of the difference in loss, on the text of each seed, and over seeds.
        result["behind_gates"] = spread([row["behind_gates"] for row in rows])
        result["behind_gates_interval"] = [round(row["behind_gates_interval"], DIGITS) for row in rows]
    if all(name in of_seed for of_seed in speeds):
        result[SPEED] = [of_seed[name] for of_seed in speeds]
    return result


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of the sample; None for one value) and the values."""
    deviation = round(statistics.stdev(values), DIGITS) if len(values) > 1 else None
    rounded = [round(value, DIGITS) for value in values]
    return {"mean": round(statistics.fmean(values), DIGITS), "deviation": deviation, "values": rounded}


def _one_or_all(values: Sequence[int]) -> int | list[int]:
    """The value that all seeds share, or that of each."""
    return values[0] if len(set(values)) == 1 else list(values)


def format_spread(spread: Mapping[str, Any] | None, form: str) -> str | None:
    """Mean ± standard deviation, as text; the mean alone where all seeds agree or there is one."""
    if spread is None:
        return None
    mean = format(spread["mean"], form)
    return mean if not spread["deviation"] else f"{mean} ± {format(spread['deviation'], form.removeprefix('+'))}"


def check_seeds(seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) != len(seeds):
        raise ReproductionError(f"--seeds needs one or more different numbers, such as 0,1,2, not {list(seeds)}.")
    if min(seeds) < 0:
        raise ReproductionError(f"A seed must be 0 or more, but --seeds has {min(seeds)}.")
