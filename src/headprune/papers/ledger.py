"""What the ledger of claims is made of: a claim of a paper, what a test of it came to, and the verdicts there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from headprune.measure.intervals import Difference

Verdict = Literal[
    "equal",  # recomputed exactly
    "holds in the authors' files",
    "contradicted by the authors' files",
    "holds here",
    "does not hold here",
    "cannot be told apart",
    "not tested",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Claim:
    """One statement that can be tested. `published` is its number in the paper, as printed there."""

    id: str  # such as "hies-stability"
    paper: str  # a key of PAPERS, or "headprune" for a claim of this project
    place: str  # section, table or figure
    says: str  # one sentence
    tested_by: str  # one sentence: what is computed, and what the verdict follows from
    published: str = ""
    needs: str = ""  # what a test needs that is not here; only for claims that are not tested


@dataclass(frozen=True)
class Finding:
    """What the test of a claim came to on one subject: a verdict, a sentence with its numbers, and the numbers."""

    claim: str  # the id
    subject: str  # a model and its data, or "authors' files"
    verdict: Verdict
    sentence: str
    values: Mapping[str, Any] = field(default_factory=dict)  # with intervals as [low, high], and seeds
    command: str = ""  # what wrote the numbers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict_if_better(difference: Difference) -> Verdict:
    """Of the claim that the first of two is better, by the 95 % interval of the difference."""
    if difference.low > 0:
        return "holds here"
    return "does not hold here" if difference.high < 0 else "cannot be told apart"


def verdict_if_not_worse(difference: Difference, margin: float) -> Verdict:
    """Of the claim that the first of two is as good as the second, up to a margin."""
    return verdict_if_better(Difference(*(end + margin for end in difference)))


PAPERS = {
    "greedy-gnorm": "arXiv 2602.04491",
    "hies": "arXiv 2510.13832",
    "gates": "arXiv 2110.03252",
}
