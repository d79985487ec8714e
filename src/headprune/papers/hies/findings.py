"""What the claims of the HIES paper come to on one subject."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from headprune.measure.intervals import Difference, with_runs
from headprune.papers.hies.outcome import Outcome, points
from headprune.papers.hies.plan import FEW, HIES, MANY, RAW
from headprune.papers.ledger import Finding, verdict_if_better, verdict_if_not_worse

MARGIN = 0.01  # as good: behind by less than a point
USUAL = 32  # calibration samples of the paper
HALF_OF_VARIANCE = math.sqrt(0.5)  # the correlation from which one order explains half of the other's variance
# Claim -> a baseline that HIES is said to be better than.
BASELINES = {
    "hies-above-random": "random",
    "hies-above-l2": "L2",
    "hies-above-ad": "AD",
    "hies-above-ae": "AE",
    "hies-above-llm-pruner": "LLM-Pruner",
    "hies-above-gnorm": "Gnorm",
}
OTHERS = (HIES, "HIS", *BASELINES.values())  # that the default is compared with


def findings_of(outcome: Outcome) -> list[Finding]:
    many = [share for share in outcome.shares if share > MANY - 1e-9]
    few = [share for share in outcome.shares if share < FEW + 1e-9]
    findings = []
    if many:
        findings += [
            _better(outcome, "hies-quality", HIES, "HIS", many, "metric"),
            _better(outcome, "hies-stability", HIES, "HIS", many, "stability"),
            *(_better(outcome, claim, HIES, name, many, "metric") for claim, name in BASELINES.items()),
            _better(outcome, "hies-entropy-direction", "AE", "AD", many, "metric"),
            _better(outcome, "hies-normalization", HIES, RAW, many, "metric"),
            *(_better(outcome, f"default-above-{name.lower()}", "ours", name, many, "metric") for name in OTHERS),
        ]
    if few:
        gap = outcome.difference("HIS", HIES, few, "metric")
        values = _values(outcome, gap, few) | {"margin": MARGIN}
        sentence = _sentence(outcome, gap, "HIS", HIES, few, "metric")
        findings.append(Finding("hies-few-heads", outcome.title, verdict_if_not_worse(gap, MARGIN), sentence, values))
    if many:
        findings += [_dispersed(outcome, many), *_calibration(outcome, many)]
    return [*findings, _alpha(outcome), _complementary(outcome)]


def _dispersed(outcome: Outcome, shares: Sequence[float]) -> Finding:
    one, other = (torch.tensor(outcome.dispersion(name, shares), dtype=torch.float64) for name in (HIES, "HIS"))
    gap = over_runs(one - other)
    sentence = (
        f"Evenness over the sites of the removed heads, 1 for equal numbers: {float(one.mean()):.2f} by HIES, "
        f"{float(other.mean()):.2f} by HIS; difference {gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}] over seeds."
    )
    return Finding("hies-dispersed", outcome.title, verdict_if_better(gap), sentence, _values(outcome, gap, shares))


def _calibration(outcome: Outcome, shares: Sequence[float]) -> list[Finding]:
    """32 samples against the most that were tried, by HIES; nothing where other numbers were not tried."""
    by_size = {size: seeds for (name, size), seeds in outcome.sizes().items() if name == HIES}
    if not by_size:
        return []
    largest = max(by_size)
    few, all_of_them = (
        torch.tensor([statistics.fmean(seed[f"{share:g}"] for share in shares) for seed in by_size[size]]).double()
        for size in (USUAL, largest)
    )
    gap = over_runs(few - all_of_them)
    sentence = (
        f"Accuracy of HIES with {USUAL} calibration samples minus that with {largest}: {points(gap)} points over seeds."
    )
    values = _values(outcome, gap, shares) | {"margin": MARGIN}
    return [Finding("hies-calibration", outcome.title, verdict_if_not_worse(gap, MARGIN), sentence, values)]


def over_runs(by_run: torch.Tensor) -> Difference:
    """The mean of differences by run, with the interval over runs alone."""
    mean = float(by_run.mean())
    return with_runs(Difference(mean, mean, mean), by_run)


def _better(outcome: Outcome, claim: str, one: str, other: str, shares: Sequence[float], measure: str) -> Finding:
    gap = outcome.difference(one, other, shares, measure)
    sentence = _sentence(outcome, gap, one, other, shares, measure)
    return Finding(claim, outcome.title, verdict_if_better(gap), sentence, _values(outcome, gap, shares))


def _sentence(outcome: Outcome, gap: Difference, one: str, other: str, shares: Sequence[float], measure: str) -> str:
    what = "Accuracy" if measure == "metric" else "Agreement with the dense model"
    at = f"{shares[0]:.0%}" if len(shares) == 1 else f"{shares[0]:.0%} to {shares[-1]:.0%}"
    return f"{what} of {one} minus {other} with {at} of the heads removed: {points(gap)} points."


def _values(outcome: Outcome, gap: Difference, shares: Sequence[float]) -> dict[str, object]:
    return {"difference": list(gap), "shares": list(shares), "seeds": list(outcome.seeds)}


def _alpha(outcome: Outcome) -> Finding:
    """Whether validation chooses a mixture rather than entropy alone; HIS alone is not among the values."""
    chosen = [float(result["alpha"]) for result in outcome.results]
    areas = {alpha: statistics.fmean(values) for alpha, values in outcome.alpha_areas().items()}
    verdict = "holds here" if min(chosen) > 0 else "does not hold here" if max(chosen) == 0 else "cannot be told apart"
    sentence = f"Alpha that validation chooses, by seed: {', '.join(f'{alpha:g}' for alpha in chosen)}."
    values = {"alpha": chosen, "areas": areas, "seeds": list(outcome.seeds)}
    return Finding("hies-alpha", outcome.title, verdict, sentence, values)  # type: ignore[arg-type]


def _complementary(outcome: Outcome) -> Finding:
    """Whether each of the two orders explains less than half of the variance of the other one."""
    correlations = outcome.correlation("HIS", "AE")
    sizes = [abs(value) for value in correlations]
    verdict = "holds here" if max(sizes) < HALF_OF_VARIANCE else "cannot be told apart"
    verdict = "does not hold here" if min(sizes) > HALF_OF_VARIANCE else verdict
    sentence = (
        f"Spearman's correlation of the scores by HIS and AE: {statistics.fmean(correlations):.2f}, from "
        f"{min(correlations):.2f} to {max(correlations):.2f} over seeds."
    )
    values = {"correlations": correlations, "seeds": list(outcome.seeds)}
    return Finding("hies-complementary", outcome.title, verdict, sentence, values)  # type: ignore[arg-type]
