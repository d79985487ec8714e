"""Numbers and verdicts as people read them: the same in the terminal, on a page and in a model card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.measure.at_budget import AtBudget, Lead
from headprune.measure.comparing import USABLE, Ahead, Comparison
from headprune.measure.intervals import Difference
from headprune.measure.metrics import SHARES_OF_ONE, Metric

END = "the end of the curve"  # what a run stops by that has no rule, or did not meet it


def value_text(metric: str, value: float | None, nothing: str = "-") -> str:
    if value is None or not math.isfinite(value):
        return nothing
    return f"{value:.2%}" if metric in SHARES_OF_ONE else f"{value:.4g}"


def interval_text(metric: str, between: Sequence[float | None] | None) -> str:
    """[low, high], in percent without the sign where the metric is a share; empty where there is none."""
    ends = [end for end in between or () if end is not None and math.isfinite(end)]
    if len(ends) != 2:
        return ""
    low, high = (f"{100 * end:.1f}" if metric in SHARES_OF_ONE else f"{end:.4g}" for end in ends)
    return f"[{low}, {high}]"


def measured_text(metric: str, value: float | None, between: Sequence[float | None] | None, nothing: str = "-") -> str:
    """A value with its interval, where it has one."""
    return f"{value_text(metric, value, nothing)} {interval_text(metric, between)}".rstrip()


def spread_text(metric: str, between: Sequence[float | None] | None) -> str:
    """Lowest..highest, in percent without the sign where the metric is a share; empty where there is none."""
    return interval_text(metric, between).strip("[]").replace(", ", "..")


def difference_text(metric: Metric, gap: Difference) -> str:
    """A size with its interval: points, a share of the perplexity, or the metric's own unit."""
    numbers = (gap.value, gap.low, gap.high)
    if metric.logarithmic:  # exp(difference) is the ratio of the two
        value, low, high = (f"{100 * math.expm1(min(number, 700)):.2g}" for number in numbers)
        return f"{value}% [{low}, {high}]"
    if metric.name in SHARES_OF_ONE:
        value, low, high = (f"{100 * number:.1f}" for number in numbers)
        return f"{value} points [{low}, {high}]"
    value, low, high = (f"{number:.3g}" for number in numbers)
    return f"{value} [{low}, {high}]"


def stop_text(result: Mapping[str, Any]) -> str:
    """Why a run ended where it did; empty where that was not written down."""
    rule = result.get("rule")
    if not rule:
        return ""
    where = f"step {result['step']} of {result['steps']}"
    return f"At {where}, {END}." if rule == END else f"Stopped at {where} by {rule}."


def removed_text(result: Mapping[str, Any]) -> str:
    """How much of each kind of unit went: "6 of 12 heads", "18 of 72 heads and 4,608 of 9,216 neurons"."""
    counts = {"heads": [result["heads_before"], result["heads_after"]], **(result.get("units") or {})}
    there = {kind: (before - after, before) for kind, (before, after) in counts.items() if before}
    went = {kind: count for kind, count in there.items() if count[0]} or there
    return " and ".join(f"{gone:,} of {before:,} {kind}" for kind, (gone, before) in went.items()) or "0 of 0 heads"


def left_text(dense: Mapping[str, int], left: Mapping[str, int]) -> str:
    """What is left of each kind: "54 of 72 heads and 4,608 of 9,216 neurons"."""
    there = [f"{left.get(kind, 0):,} of {count:,} {kind}" for kind, count in dense.items() if count]
    return " and ".join(there) or "0 of 0 heads"


def vocabulary_text(record: Mapping[str, Any]) -> str:
    """What became of the vocabulary; empty where it is as it was."""
    shrunk = record.get("vocabulary")
    if not shrunk:
        return ""
    return (
        f"The vocabulary was cut to {shrunk['after']:,} of {shrunk['before']:,} tokens first, which took "
        f"{shrunk['parameters']:,} parameters; dense is the model with that vocabulary and all its heads."
    )


def verdict(rows: Sequence[Comparison], units: str = "heads") -> list[str]:
    """What a comparison says, in sentences: over which range it ranks, where the best row is ahead of each other one,
    and which neighbours cannot be told apart."""
    if len(rows) < 2 or not rows[0].ahead:
        return []
    best = rows[0]
    said = [_range_sentence(best, units), *(_ahead_sentence(best, ahead) for ahead in best.ahead)]
    close = [
        f"{row.name} and {ahead.of}"
        for row in rows[1:]
        for ahead in row.ahead
        if ahead.usable_area is not None and not ahead.usable_area.real
    ]
    if close:
        said.append(f"Neighbours that cannot be told apart either: {'; '.join(close)}.")
    return said


def verdict_of(rows: Sequence[Comparison] | Sequence[AtBudget] | Sequence[Comparison | AtBudget]) -> list[str]:
    """The same of rows at a budget, or of curves, whichever these are."""
    curves = [row for row in rows if isinstance(row, Comparison)]
    return verdict(curves) if curves else verdict_at_budget([row for row in rows if isinstance(row, AtBudget)])


def verdict_at_budget(rows: Sequence[AtBudget]) -> list[str]:
    """What models at the same budget say: how far the best is ahead of each other one, and which neighbours cannot be
    told apart."""
    if len(rows) < 2 or not rows[0].ahead:
        return []
    said = [_lead_sentence(rows[0], lead) for lead in rows[0].ahead]
    close = [
        f"{row.name} and {lead.of}"
        for row in rows[1:]
        for lead in row.ahead
        if lead.metric is not None and not lead.metric.real
    ]
    if close:
        said.append(f"Neighbours that cannot be told apart either: {'; '.join(close)}.")
    return said


def _lead_sentence(row: AtBudget, lead: Lead) -> str:
    if lead.metric is None:
        return f"{row.name} and {lead.of} cannot be paired: {lead.unpaired}."
    if not lead.metric.real:
        gap = difference_text(row.measured, lead.metric)
        return f"{row.name} and {lead.of} cannot be told apart at this budget ({gap})."
    return f"{row.name} is {_place(lead.metric)} {lead.of} by {_size(row.measured, lead.metric)} at this budget."


def _range_sentence(row: Comparison, units: str) -> str:
    word = row.measured.name
    share = f"{USABLE:.0%}" if row.measured.relative else f"{USABLE:g}"
    limit = f"{100 * USABLE:g} points" if word in SHARES_OF_ONE else share
    if not row.usable_until:
        return f"No run can lose {units} while its {word} stays within {limit} of dense, so the whole curve ranks."
    return (
        f"Ranked by the {word} up to {row.usable_until:.0%} of the {units} removed: as far as any run stays within "
        f"{limit} of dense."
    )


def _ahead_sentence(row: Comparison, ahead: Ahead) -> str:
    if ahead.usable_area is None:
        return f"{row.name} and {ahead.of} cannot be paired: {ahead.unpaired}."
    metric, gap = row.measured, ahead.usable_area
    over = f" up to {row.usable_until:.0%}" if row.usable_until else ""
    sure = {share: there for share, there in ahead.metric.items() if there is not None and there.real}
    rest = [share for share, there in ahead.metric.items() if there is not None and not there.real]
    if gap.real:
        said = f"{row.name} is {_place(gap)} {ahead.of} by {_size(metric, gap)}{over}"
    else:
        said = f"{row.name} and {ahead.of} cannot be told apart{over} ({difference_text(metric, gap)})"
        if rest and not sure:
            return f"{said}, nor at {_listed(rest)}."
    parts = [
        f"at {share} {_place(there).split()[0]} by {_size(metric, there).replace(' points', '')}"
        for share, there in sure.items()
    ]
    if rest:
        parts.append(f"at {_listed(rest)} cannot be told apart")
    return f"{said}{'; ' if parts else ''}{'; '.join(parts)}."


def _place(gap: Difference) -> str:
    return "ahead of" if gap.value > 0 else "behind"


def _size(metric: Metric, gap: Difference) -> str:
    """Of a difference whose direction is said beside it."""
    return difference_text(metric, gap if gap.value > 0 else Difference(-gap.value, -gap.high, -gap.low))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
