"""What the result files of the two studies of learned gates say about the claims: by seed, so that intervals are over
seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.measure.intervals import Difference, with_runs
from headprune.papers.ledger import Finding, Verdict, verdict_if_better, verdict_if_not_worse

Content = Mapping[str, Any]
ALL_ATTENTION, TRANSLATION = "All-attention of 40 heads, text", "Marian of 48 heads, a made-up language"
SETTINGS = {"gates": "the default setting", "voita": "the setting voita"}
# Claim -> the row without the technique, and the one with it.
TECHNIQUES = {
    "gates-initial-value": "without initial value",
    "gates-rescaling": "without rescaling",
    "gates-warm-up": "without warm-up",
}
TARGET = "keep=0.6"


def over_seeds(values: Sequence[float]) -> Difference:
    """The mean of a difference by seed, with Student's interval over seeds."""
    mean = sum(values) / len(values)
    return with_runs(Difference(mean, mean, mean), torch.tensor(values, dtype=torch.float64))


def encoder_decoder_findings(content: Content) -> list[Finding]:
    """Of `headprune reproduce gates`."""
    rows = {row["name"]: row for row in content["rows"]}
    keeps, seeds = content["settings"]["keeps"], content["seeds"]
    found = []
    for setting, title in SETTINGS.items():
        cells = [
            {part: kept["values"][place] for part, kept in rows[f"{setting} keep={keep}"]["kept"].items()}
            for keep in keeps
            for place in range(len(seeds))
        ]
        first = sum(cell["encoder"] <= min(cell.values()) for cell in cells)
        longest = sum(cell["cross"] >= max(cell.values()) for cell in cells)
        for claim, count, what in (
            ("gates-encoder-first", first, "The encoder keeps the fewest heads"),
            ("gates-cross-longest", longest, "The decoder's attention to the encoder keeps the most heads"),
        ):
            sentence = f"{what} in {count} of {len(cells)} cases (targets and seeds), by {title}."
            found.append(
                Finding(claim, f"{TRANSLATION}, {title}", _if_always(count, len(cells)), sentence, {"cases": cells})
            )
        for keep in keeps:
            row, dense = rows[f"{setting} keep={keep}"], rows["trained on"]
            gaps = [(one - other) / 100 for one, other in zip(*_exact(row, dense), strict=True)]
            gap = over_seeds(gaps)
            what = f"Exact sentences with {row['heads']} of 48 heads minus dense, by {title}"
            sentence = f"{what}: {_points(gap)} points."
            values = _values(gap, gaps, seeds) | {"margin": 0.01}
            subject = f"{TRANSLATION}, {keep:.0%} kept, {title}"
            found.append(Finding("gates-quality", subject, verdict_if_not_worse(gap, 0.01), sentence, values))
    for keep in keeps:
        gaps = [
            (one - other) / 100
            for one, other in zip(*_exact(rows[f"gates keep={keep}"], rows[f"his keep={keep}"]), strict=True)
        ]
        gap = over_seeds(gaps)
        by_seed = ", ".join(f"{100 * value:+.1f}" for value in gaps)
        sentence = f"Exact sentences by gates minus by HIS, same heads and steps: {_points(gap)} points; {by_seed}."
        subject = f"{TRANSLATION}, {keep:.0%} kept"
        values = _values(gap, gaps, seeds)
        found.append(Finding("gates-above-importance", subject, verdict_if_better(gap), sentence, values))
    return found


def _exact(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return row["exact"]["values"], other["exact"]["values"]


def all_attention_findings(content: Content) -> list[Finding]:
    """Of `headprune reproduce all-attention`. Losses are in nats per byte: lower is better."""
    rows = {(row["model"], row["what"]): row for row in content["rows"]}
    seeds = content["seeds"]
    found = [_sizes(content)]

    def losses(what: str, model: str = "all-attention") -> list[float]:
        return list(rows[model, what]["loss"]["values"])

    def compared(claim: str, better: Sequence[float], worse: Sequence[float], what: str, subject: str = "") -> None:
        gaps = [one - other for one, other in zip(worse, better, strict=True)]
        gap = over_seeds(gaps)
        by_seed = ", ".join(f"{value:+.4f}" for value in gaps)
        sentence = f"{what}: {gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}] nats per byte; by seed {by_seed}."
        values = _values(gap, gaps, seeds)
        found.append(Finding(claim, subject or ALL_ATTENTION, verdict_if_better(gap), sentence, values))

    for claim, what in TECHNIQUES.items():
        compared(claim, losses(TARGET), losses(what), f"Loss {what} minus with it, {TARGET}")
    for name in ("his", "gnorm", "default"):
        for keep in ("keep=0.6", "keep=0.4"):
            if ("all-attention", f"{name} {keep}") in rows:
                compared(
                    "gates-above-importance",
                    losses(keep),
                    losses(f"{name} {keep}"),
                    f"Loss by {name} minus by gates, same heads and steps",
                    f"{ALL_ATTENTION}, {keep}, {name}",
                )
    for keep in ("keep=0.8", "keep=0.6", "keep=0.4"):
        gaps = [
            (mine - whole) - (other - other_whole)
            for mine, whole, other, other_whole in zip(
                losses(keep, "transformer"),
                losses("dense trained on", "transformer"),
                losses(keep),
                losses("dense trained on"),
                strict=True,
            )
        ]
        gap = over_seeds(gaps)
        sizes = [rows[model, keep]["of_dense"]["mean"] for model in ("all-attention", "transformer")]
        sentence = (
            f"Loss added by pruning, Transformer minus All-attention, {keep}: {gap.value:+.4f} [{gap.low:+.4f}, "
            f"{gap.high:+.4f}] nats per byte; {sizes[0]:.0f} and {sizes[1]:.0f} % of the parameters are left."
        )
        values = _values(gap, gaps, seeds)
        verdict = verdict_if_better(gap)
        found.append(Finding("gates-all-attention", f"{ALL_ATTENTION}, {keep}", verdict, sentence, values))
    speeds = [row for row in content["rows"] if row["model"] == "all-attention" and row["what"].startswith("keep=")]
    for row in speeds:
        if "speed" in row:
            ratios = [of_seed["speedup"] for of_seed in row["speed"]]
            gap = over_seeds([ratio - 1 for ratio in ratios])
            times = f"{1 + gap.value:.2f} [{1 + gap.low:.2f}, {1 + gap.high:.2f}]"
            sentence = f"{times} times as fast as dense, {row['what']}."
            values = _values(gap, [ratio - 1 for ratio in ratios], seeds)
            subject = f"{ALL_ATTENTION}, {row['what']}"
            found.append(Finding("gates-speed", subject, verdict_if_better(gap), sentence, values))
    return found


def _sizes(content: Content) -> Finding:
    """The published sizes are in millions with one decimal."""
    sizes = content["sizes"]
    equal = all(round(row["total"] / 1e6, 1) == row["published_millions"] for row in sizes)
    dense, pruned = sizes
    quotient, published = pruned["total"] / dense["total"], pruned["published_millions"] / dense["published_millions"]
    sentence = (
        f"{dense['total']:,} and {pruned['total']:,} parameters without adaptive tables, published "
        f"{dense['published_millions']} and {pruned['published_millions']} million: "
        f"{dense['percent_to_published']:+.2f} and {pruned['percent_to_published']:+.2f} %; their quotient is "
        f"{quotient:.4f}, published {published:.4f}."
    )
    verdict: Verdict = "equal" if equal else "does not hold here"
    return Finding("gates-sizes", "the authors' configuration", verdict, sentence, {"sizes": sizes})


def _if_always(count: int, total: int) -> Verdict:
    return "holds here" if count == total else "does not hold here" if 2 * count < total else "cannot be told apart"


def _values(gap: Difference, by_seed: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    return {"difference": list(gap), "by_seed": list(by_seed), "seeds": list(seeds)}


def _points(gap: Difference) -> str:
    return f"{100 * gap.value:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
