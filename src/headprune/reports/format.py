"""Formats numbers and verdicts, the same in the terminal, on a page and in a model card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headprune import defaults
from headprune.display import counted
from headprune.measure.compare_at_budget import AtBudget, Lead
from headprune.measure.compare_curves import USABLE, Ahead, Comparison
from headprune.measure.intervals import Difference
from headprune.measure.metrics import SHARES_OF_ONE, Metric

END = "the end of the curve"  # the rule of a run that has none, or did not meet it


def value_text(metric: str, value: float | None, nothing: str = "-") -> str:
    if value is None or not math.isfinite(value):
        return nothing
    return f"{value:.2%}" if metric in SHARES_OF_ONE else f"{value:.4g}"


def interval_text(metric: str, interval: Sequence[float | None] | None) -> str:
    """[low, high], in percent without the sign where the metric is a share; empty where there is none, or where both
    ends read the same."""
    ends = [end for end in interval or () if end is not None and math.isfinite(end)]
    if len(ends) != 2:
        return ""
    low, high = (f"{100 * end:.1f}" if metric in SHARES_OF_ONE else f"{end:.4g}" for end in ends)
    return f"[{low}, {high}]" if low != high else ""


def measured_text(metric: str, value: float | None, interval: Sequence[float | None] | None, nothing: str = "-") -> str:
    """A value with its interval, where it has one."""
    return f"{value_text(metric, value, nothing)} {interval_text(metric, interval)}".rstrip()


def spread_text(metric: str, interval: Sequence[float | None] | None) -> str:
    """Lowest..highest, in percent without the sign where the metric is a share; empty where there is none."""
    return interval_text(metric, interval).strip("[]").replace(", ", "..")


def difference_text(metric: Metric, gap: Difference) -> str:
    """A difference with its interval: in points, as a share of the perplexity, or in the unit of the metric."""
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
    """The stopping rule and step of a run, and sites that it left whole; empty where they were not recorded."""
    rule = result.get("rule")
    if not rule:
        return ""
    where = f"step {result['step']} of {result['steps']}"
    stopped = f"At {where}, {END}." if rule == END else f"Stopped at {where} by {rule}."
    return f"{stopped} {_unreached_text(result)}".rstrip()


def _unreached_text(result: Mapping[str, Any]) -> str:
    paths = list((result.get("unreached") or {}).values())
    if not paths:
        return ""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"No sample reaches {paths[0]}{more}, so nothing was removed there."


def removed_text(result: Mapping[str, Any]) -> str:
    """How many units of each kind were removed: "6 of 12 heads", "18 of 72 heads and 4,608 of 9,216 neurons"."""
    counts = {"heads": [result["heads_before"], result["heads_after"]], **(result.get("units") or {})}
    counts_of_kinds = {kind: (before - after, before) for kind, (before, after) in counts.items() if before}
    changed = {kind: count for kind, count in counts_of_kinds.items() if count[0]} or counts_of_kinds
    return (
        " and ".join(f"{removed:,} of {before:,} {kind}" for kind, (removed, before) in changed.items())
        or "0 of 0 heads"
    )


def left_text(dense: Mapping[str, int], left: Mapping[str, int]) -> str:
    """What is left of each kind: "54 of 72 heads and 4,608 of 9,216 neurons"."""
    parts = [f"{left.get(kind, 0):,} of {count:,} {kind}" for kind, count in dense.items() if count]
    return " and ".join(parts) or "0 of 0 heads"


def vocabulary_text(record: Mapping[str, Any]) -> str:
    """How the vocabulary was shrunk; empty where it was not."""
    shrunk = record.get("vocabulary")
    if not shrunk:
        return ""
    return (
        f"The vocabulary was shrunk to {shrunk['after']:,} of {shrunk['before']:,} tokens first, which removed "
        f"{shrunk['parameters']:,} parameters; dense is the model with that vocabulary and all its heads."
    )


def calibration_text(record: Mapping[str, Any]) -> str:
    """A hint where the metric fell and there were fewer calibration rows than a run takes by default."""
    result, settings = record["result"], record["settings"]
    rows = (record.get("samples") or {}).get("calibration")
    sign = 1 if result.get("higher_is_better", True) else -1
    values = [result.get("dense"), result.get("pruned")]
    fell = None not in values and sign * values[1] < sign * values[0]
    if rows is None or rows >= defaults.CALIBRATION_SAMPLES or not fell or settings.get("repair", "none") == "none":
        return ""
    return (
        f"Scores and repairs used {counted(rows, 'row')}; {defaults.CALIBRATION_SAMPLES} or more may keep the metric "
        "closer to the dense model's: give further data, with or without labels, by --calibration FILE."
    )


def scored_samples_text(settings: Mapping[str, Any]) -> str:
    """That the criterion chose how many samples it scores; empty where it did not."""
    if settings.get("scored_samples") is None:
        return ""
    return (
        f"{settings['criterion']} scores {counted(settings['scored_samples'], 'sample')}, as in its paper; "
        "--calibration-samples sets another number."
    )


def markdown(text: str) -> str:
    """Text that markdown shows as it is, in one line."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in " ".join(text.split()))


def verdict(rows: Sequence[Comparison], units: str = "heads") -> list[str]:
    """The verdict of a comparison in sentences: the range by which rows are ranked, by how much the best is ahead of
    each other one, and which neighbours do not differ significantly."""
    if len(rows) < 2 or not rows[0].ahead:
        return []
    best = rows[0]
    sentences = [_range_sentence(best, units), *(_ahead_sentence(best, ahead) for ahead in best.ahead)]
    close = [
        f"{row.name} and {ahead.of}"
        for row in rows[1:]
        for ahead in row.ahead
        if ahead.usable_area is not None and not ahead.usable_area.real
    ]
    if close:
        sentences.append(f"Neighbours that cannot be told apart either: {'; '.join(close)}.")
    return sentences + schedule_sentences(rows)


def schedule_sentences(rows: Sequence[Comparison] | Sequence[AtBudget]) -> list[str]:
    """Which rows have which schedule, where there are several."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.schedule, []).append(row.name)
    if len(names) < 2:
        return []
    words = {
        "one-shot": "scored once, on the dense model",
        "greedy": "scored again between removals",
        "rounds": "scored again in every round",
        "layerwise": "scored layer after layer",
    }
    parts = [f"{words.get(each, each)} ({each}): {_join(names[each])}" for each in sorted(names, reverse=True)]
    text = "; ".join(parts)
    return [f"{text[0].upper()}{text[1:]}."]


def verdict_of(rows: Sequence[Comparison] | Sequence[AtBudget] | Sequence[Comparison | AtBudget]) -> list[str]:
    """The verdict of rows at a budget, or of curves."""
    curves = [row for row in rows if isinstance(row, Comparison)]
    return verdict(curves) if curves else verdict_at_budget([row for row in rows if isinstance(row, AtBudget)])


def verdict_at_budget(rows: Sequence[AtBudget]) -> list[str]:
    """The verdict of models at the same budget: by how much the best is ahead of each other one, and which neighbours
    do not differ significantly."""
    if len(rows) < 2 or not rows[0].ahead:
        return []
    sentences = [_lead_sentence(rows[0], lead) for lead in rows[0].ahead]
    close = [
        f"{row.name} and {lead.of}"
        for row in rows[1:]
        for lead in row.ahead
        if lead.metric is not None and not lead.metric.real
    ]
    if close:
        sentences.append(f"Neighbours that cannot be told apart either: {'; '.join(close)}.")
    return sentences + schedule_sentences(rows)


def _lead_sentence(row: AtBudget, lead: Lead) -> str:
    if lead.metric is None:
        return f"{row.name} and {lead.of} cannot be paired: {lead.unpaired}."
    if not lead.metric.real:
        gap = difference_text(row.measured, lead.metric)
        return f"{row.name} and {lead.of} cannot be told apart at this budget ({gap})."
    return f"{row.name} is {_direction(lead.metric)} {lead.of} by {_size(row.measured, lead.metric)} at this budget."


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
    significant = {
        share: gap_there for share, gap_there in ahead.metric.items() if gap_there is not None and gap_there.real
    }
    insignificant = [share for share, gap_there in ahead.metric.items() if gap_there is not None and not gap_there.real]
    if gap.real:
        sentence = f"{row.name} is {_direction(gap)} {ahead.of} by {_size(metric, gap)}{over}"
    else:
        sentence = f"{row.name} and {ahead.of} cannot be told apart{over} ({difference_text(metric, gap)})"
        if insignificant and not significant:
            return f"{sentence}, nor at {_join(insignificant)}."
    parts = [
        f"at {share} {_direction(gap_there).split()[0]} by {_size(metric, gap_there).replace(' points', '')}"
        for share, gap_there in significant.items()
    ]
    if insignificant:
        parts.append(f"at {_join(insignificant)} cannot be told apart")
    return f"{sentence}{'; ' if parts else ''}{'; '.join(parts)}."


def _direction(gap: Difference) -> str:
    return "ahead of" if gap.value > 0 else "behind"


def _size(metric: Metric, gap: Difference) -> str:
    """The absolute difference, for a sentence that has its direction."""
    return difference_text(metric, gap if gap.value > 0 else Difference(-gap.value, -gap.high, -gap.low))


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
