"""Runs the experiment behind a claim: what `headprune claims --run CLAIM` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from headprune.errors import DataError
from headprune.papers.evidence import EVIDENCE
from headprune.papers.ledger import Claim, Finding


def run_claim(
    claim: Claim, out: Path, *, published: Path | None = None, console: Console | None = None
) -> list[Finding]:
    """The findings of this claim from its experiment, whose files are in `out`, where it resumes; those from the
    authors' files need the folder `published`."""
    evidence = next((each for each in EVIDENCE if claim.id in each.claims), None)
    if claim.needs or evidence is None:
        raise DataError(f"{claim.id} cannot be tested here; it needs {claim.needs or 'an experiment of its own'}.")
    if evidence.name == AUTHORS_FILES and published is None:
        raise DataError(f"{claim.id} is about the authors' result files; give their folder with --published.")
    content = RUNS[evidence.name](out / evidence.name.rstrip("-"), published, console or Console())
    return [finding for finding in evidence.findings(content) if finding.claim == claim.id]


def _sizes(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.published_sizes import compare_sizes

    return compare_sizes()


def _authors_files(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.authors_files import authors_findings

    assert published is not None
    return authors_findings(published)


def _gnorm(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.gnorm_study import demo_subject, study_gnorm

    return study_gnorm(demo_subject(out / "demo"), out)


def _hies(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.hies import reproduce_hies

    done = reproduce_hies(out, console=console)
    return {"findings": [finding.to_json() for finding in done.findings]}


def _all_attention(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.all_attention import reproduce_all_attention

    return _results(reproduce_all_attention(out, seeds=SEEDS, console=console)[0])


def _encoder_decoder(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers.translation_gates import reproduce_gates

    return _results(reproduce_gates(out, seeds=SEEDS, console=console)[0])


def _results(files: Sequence[Path]) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    return content


def _gradients(out: Path, published: Path | None, console: Console) -> Mapping[str, Any]:
    from headprune.papers import gradients

    task = gradients.demo_task()
    if task is None:
        raise DataError("Gradients are measured on the model of the demo; install headprune[demo].")
    return gradients.change_by_site(task, gradients.DEMO_NAME)


SEEDS = (0, 1, 2)
AUTHORS_FILES = "gnorm-authors-files"
RUNS: dict[str, Callable[[Path, Path | None, Console], Mapping[str, Any]]] = {
    "sizes": _sizes,
    AUTHORS_FILES: _authors_files,
    "gnorm-": _gnorm,
    "gradients": _gradients,
    "all-attention": _all_attention,
    "gates-encoder-decoder": _encoder_decoder,
    "hies-": _hies,
}
