"""Which measurements test which claims, and what their result files say about them.

A result file is what a command wrote, without the parts that only resuming needs; findings follow from it alone, so
that the ledger can be derived again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headprune.measure.intervals import Difference, with_runs
from headprune.papers.claims import HIES, OURS
from headprune.papers.gate_evidence import TECHNIQUES, all_attention_findings, encoder_decoder_findings
from headprune.papers.ledger import AUTHORS, Finding, Verdict, verdict_if_better
from headprune.papers.paper_models import MODELS

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """A kind of result file: how its name begins, the claims it tests, and its findings."""

    name: str
    claims: tuple[str, ...]
    findings: Callable[[Content], list[Finding]]


# --- sizes ---


def size_findings(content: Content) -> list[Finding]:
    """Of `published_sizes.compare_sizes`."""
    found = []
    for model in content["models"]:
        total, *parts = model["rows"]
        for claim, rows in (("gnorm-sizes", [total]), ("gnorm-module-sizes", parts)):
            equal = all(row["counted"] == row["published"] for row in rows)
            before, after = (f"{rows[0]['counted'][place][0]:,}" for place in (0, 1))
            what = "Parameters" if len(rows) == 1 else f"{len(rows)} rows, the first is {rows[0]['part']}: parameters"
            sentence = f"{what} {before} to {after}; with shares and megabytes as printed."
            verdict: Verdict = "equal" if equal else "does not hold here"
            values = {row["part"]: [numbers[0] for numbers in row["counted"]] for row in rows if row["counted"]}
            found.append(Finding(claim, model["title"], verdict, sentence, values))
    return found


# --- the authors' files ---


def authors_findings(content: Content) -> list[Finding]:
    """Of `authors_files.authors_findings`."""
    found: list[Finding] = []

    def add(claim: str, model: str, holds: bool, sentence: str, values: Any, holding: Verdict | None = None) -> None:
        verdict: Verdict = "contradicted by the authors' files"
        if holds:
            verdict = holding or "holds in the authors' files"
        found.append(Finding(claim, f"{model}, {AUTHORS}", verdict, sentence, values))

    for model in MODELS:
        one, title = content["models"][model.key], model.title
        accuracy = one["table_1"]
        text = f"{accuracy['curve'][0]} and {accuracy['curve'][1]} % on the curve, printed {accuracy['published'][0]} "
        text += f"and {accuracy['published'][1]} %."
        add("gnorm-accuracies", title, accuracy["equal"], text, accuracy, "equal")
        if "mask" in one:
            text = f"The {one['mask']['kept']} heads of the mask are those that the order leaves."
            add("gnorm-final-masks", title, one["mask"]["equal"], text, one["mask"], "equal")
        chance = one["against_random"]
        low, high = chance["above_interval"]
        text = f"Above the median of the random trials at {chance['above']} [{low}, {high}] of {chance['points']} "
        text += f"points; {chance['trials_with_at_least_its_area']} of {one['areas']['random']['trials']} trials have "
        text += "at least its area."
        add("gnorm-above-random", title, chance["above"] > chance["points"] / 2, text, chance)
        areas = one["areas"]
        best = max(areas["entropy"], areas["inverse:entropy"])
        text = f"Area {areas['gnorm']:.3f}; by entropy {areas['entropy']:.3f}, in inverse order "
        text += f"{areas['inverse:entropy']:.3f}."
        add("gnorm-above-entropy", title, areas["gnorm"] > best, text, areas)
        text = f"Area {areas['gnorm']:.3f}, in inverse order {areas['inverse:gnorm']:.3f}."
        add("gnorm-direction", title, areas["gnorm"] > areas["inverse:gnorm"], text, areas)
    stops = [content["models"][model.key]["stop"] for model in MODELS]
    ours, theirs = (", ".join(str(stop[name]) for stop in stops) for name in ("knee", "published"))
    text = f"The rule of --knee stops after {ours} removals, published {theirs}."
    add("gnorm-stop", "all four models", ours == theirs, text, {"knee": ours, "published": theirs}, "equal")
    roberta = content["models"]["roberta"]["pruned"][-1]
    low, high = roberta["change_interval"]
    lowest = roberta["lowest_before"]
    text = f"{roberta['pruned']} with {roberta['removed']} of 384 heads removed, dense {roberta['dense']}: change "
    text += f"{roberta['change']:+.3f} [{low:+.3f}, {high:+.3f}]; on the way there {lowest['accuracy']} after "
    text += f"{lowest['removed']}."
    # Near: the whole interval is within five points.
    add("gnorm-near-original", "RoBERTa-large", low > -0.05, text, roberta)
    return found


# --- experiments on Greedy-Gnorm ---

COMPARED = {
    "gnorm-greedy-above-static": ("greedy against one-shot", "Area of the greedy curve minus the one-shot one"),
    "gnorm-objective": ("logit norm against loss", "Area by the norm of the logits minus that by the loss"),
    "gnorm-aggregation": ("per sample against per batch", "Area by norms per sample minus that by the batch's norm"),
    "gnorm-greedy-above-random": ("greedy against random", "Area of the greedy curve minus that at random"),
}


def gnorm_findings(content: Content) -> list[Finding]:
    """Of `gnorm_study.study_gnorm`."""
    subject, seeds = content["subject"], content["seeds"]
    found = []
    for claim, (name, what) in COMPARED.items():
        if name not in content["comparisons"]:
            continue
        gap = content["comparisons"][name]
        over_samples = Difference(gap["difference"], *gap["interval"])
        difference = with_runs(over_samples, torch.tensor(gap["by_seed"], dtype=torch.float64))
        by_seed = ", ".join(f"{100 * value:+.1f}" for value in gap["by_seed"])
        sentence = f"{what}: {_points(difference)} points; by seed {by_seed}."
        values = {"difference": list(difference), "by_seed": gap["by_seed"], "seeds": seeds}
        found.append(Finding(claim, subject, verdict_if_better(difference), sentence, values))
    orders = [entry for seed in content["entropy"] for entry in seed["order"].values()]
    swapped = max(entry["inversions"] for entry in orders)
    bounds = [seed["bounds"] for seed in content["entropy"]]
    sentence = (
        f"At most {swapped} pairs of heads change places, over {len(orders)} comparisons of variants and epsilons."
    )
    verdict: Verdict = "holds here" if swapped == 0 else "does not hold here"
    found.append(Finding("entropy-epsilon-order", subject, verdict, sentence, {"seeds": seeds, "bounds": bounds}))
    zeros = [seed["zeros"] for seed in content["entropy"]]
    total = sum(each["probabilities"] for each in zeros)
    by_precision = {name: sum(each[name] for each in zeros) for name in ("float32", "bfloat16", "float16")}
    counts = ", ".join(f"{count:,} in {name}" for name, count in by_precision.items())
    sentence = (
        f"Of {total:,} attention probabilities without padding, exactly zero are {counts}; a * log(a) is NaN there."
    )
    verdict = "holds here" if by_precision["float32"] else "does not hold here"
    found.append(Finding("entropy-underflow", subject, verdict, sentence, {**by_precision, "seeds": seeds}))
    return found


def gradient_findings(content: Content) -> list[Finding]:
    """Of `gradients.change_by_site`: the rest of the model, without the site that loses a head."""
    site = content["removed"][0][0]
    others = [value for index, row in enumerate(content["relative"]) if index != site for value in row]
    sentence = (
        f"Without head {tuple(content['removed'][0])}, the Q, K and V gradients of the other sites change by "
        f"{100 * min(others):.0f} to {100 * max(others):.0f} % of their norm, on {content['samples']} samples."
    )
    verdict: Verdict = "holds here" if min(others) > 0.01 else "does not hold here"
    values = {"removed": content["removed"], "relative": content["relative"]}
    return [Finding("gnorm-gradients-change", content["subject"], verdict, sentence, values)]


# --- reproductions that write findings themselves ---

HIES_CLAIMS = tuple(claim.id for claim in (*HIES, *OURS) if not claim.needs)


def own_findings(content: Content) -> list[Finding]:
    return [Finding(**row) for row in content["findings"]]


def _points(gap: Difference) -> str:
    return f"{100 * gap.value:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"


EVIDENCE: Sequence[Evidence] = (
    Evidence("sizes", ("gnorm-sizes", "gnorm-module-sizes"), size_findings),
    Evidence(
        "gnorm-authors-files",
        (
            "gnorm-accuracies",
            "gnorm-stop",
            "gnorm-final-masks",
            "gnorm-above-random",
            "gnorm-above-entropy",
            "gnorm-direction",
            "gnorm-near-original",
        ),
        authors_findings,
    ),
    Evidence("gnorm-", (*COMPARED, "entropy-epsilon-order", "entropy-underflow"), gnorm_findings),
    Evidence("gradients", ("gnorm-gradients-change",), gradient_findings),
    Evidence("hies-", HIES_CLAIMS, own_findings),
    Evidence(
        "all-attention",
        ("gates-sizes", "gates-all-attention", *TECHNIQUES, "gates-above-importance", "gates-speed"),
        all_attention_findings,
    ),
    Evidence(
        "gates-encoder-decoder",
        ("gates-encoder-first", "gates-cross-longest", "gates-quality", "gates-above-importance"),
        encoder_decoder_findings,
    ),
)


def evidence_of(name: str) -> Evidence:
    """Of a result file, by its name without a suffix: the longest beginning counts."""
    return max((each for each in EVIDENCE if name.startswith(each.name)), key=lambda each: len(each.name))
