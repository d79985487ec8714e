"""The ledger of claims: what it is made of, the verdicts there are, and its page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
PAPERS = {
    "greedy-gnorm": "Greedy-Gnorm, arXiv 2602.04491",
    "hies": "HIES, arXiv 2510.13832",
    "gates": "Layer-wise learned gates, arXiv 2110.03252",
    "headprune": "This project",
}
FINDINGS = Path(__file__).with_name("findings.json")
AUTHORS = "authors' files"  # the subject of findings from published data


@dataclass(frozen=True)
class Claim:
    """One statement that can be tested. `published` is its number in the paper, as printed there."""

    id: str  # such as "hies-stability"
    paper: str  # a key of PAPERS
    place: str  # abstract, equation, table, figure or appendix; "method" and "experiments" where it has no number
    says: str  # one sentence
    tested_by: str  # what is computed, and what the verdict follows from
    published: str = ""
    needs: str = ""  # what a test needs that is not here; only for claims that are not tested


@dataclass(frozen=True)
class Finding:
    """What the test of a claim came to on one subject: a verdict, a sentence with its numbers, and the numbers."""

    claim: str  # the id
    subject: str  # a model and its data, or AUTHORS
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


def read_findings(path: Path = FINDINGS) -> list[Finding]:
    return [Finding(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def findings_by_claim(claims: Sequence[Claim], findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """The findings of every claim, in the order of the ledger; a claim without any was not tested."""
    rows = {claim.id: [finding for finding in findings if finding.claim == claim.id] for claim in claims}
    for claim in claims:
        if not rows[claim.id]:
            sentence = f"needs {claim.needs or 'a run of its experiment'}"
            rows[claim.id].append(Finding(claim.id, "", "not tested", sentence))
    return rows


def page(claims: Sequence[Claim], findings: Sequence[Finding]) -> str:
    """docs/claims.md, between its markers: counts of the verdicts, then a section per paper."""
    rows = findings_by_claim(claims, findings)
    counts = Counter(finding.verdict for each in rows.values() for finding in each)
    lines = [
        f"{len(claims)} claims, {sum(len(each) for each in rows.values())} findings.",
        "",
        "| verdict | findings |",
        "|---|---:|",
        *(f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS),
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}"]
        for claim in claims:
            if claim.paper == paper:
                lines += ["", *_section(claim, rows[claim.id])]
    by_command: dict[str, dict[str, None]] = {}
    for finding in findings:
        by_command.setdefault(finding.command, {})[finding.claim] = None
    lines += ["", "## Commands", "", "| command | claims |", "|---|---|"]
    lines += [f"| `{command}` | {', '.join(names)} |" for command, names in by_command.items()]
    return "\n".join(lines) + "\n"


def _section(claim: Claim, findings: Sequence[Finding]) -> list[str]:
    published = f" Published: {claim.published}." if claim.published else ""
    lines = [f"### {claim.id}", "", f"{claim.says} ({claim.place}.{published}) {claim.tested_by}", ""]
    lines += ["| subject | verdict | numbers |", "|---|---|---|"]
    return [*lines, *(f"| {finding.subject or '-'} | {finding.verdict} | {finding.sentence} |" for finding in findings)]
