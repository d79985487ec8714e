"""`headprune reproduce hies`: HIES against its baselines (arXiv 2510.13832), whose code was never published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import headprune
from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.extras import require
from headprune.papers.hies.figures import figures_of
from headprune.papers.hies.findings import findings_of
from headprune.papers.hies.outcome import Outcome, tables_of
from headprune.papers.hies.plan import HIES, PAPER, Settings
from headprune.papers.hies.study import Study
from headprune.papers.hies.subjects import Subject, default_subjects, image_subject, own_subject, without_packages
from headprune.papers.ledger import Finding
from headprune.papers.paper_models import ReproductionError
from headprune.progress import phase_bar
from headprune.reports.save_figures import save_figure

with require("cli", "Reproducing a paper needs"):
    from rich.console import Console

RESULTS, FINDINGS = "results.json", "findings.md"


@dataclass(frozen=True)
class Reproduction:
    files: list[Path]
    outcomes: list[Outcome]
    findings: list[Finding]


def reproduce_hies(
    out: Path,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
    long: bool = False,
    console: Console | None = None,
) -> Reproduction:
    """Prune every subject by every criterion, as published: scored once, nothing refitted. Writes all cells, tables,
    figures and a sentence per claim to `out`; finished seeds in `out` are not measured again.

    `model` and `data` are a model folder and a file of examples with labels, in place of the subjects; `data` alone is
    an npz file of images, on which a small ViT is trained.
    """
    console, settings = console or Console(), settings or Settings()
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the tables and figures.")
    chosen = _chosen(model, data, long, console)
    study = Study(out, settings)
    outcomes: list[Outcome] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for subject in chosen:
            outcomes.append(_measure(study, subject, console))
        return _write(out, study, outcomes, console)
    except OSError as error:
        raise ReproductionError(f"Cannot write to {out}: {error.strerror}; choose another directory.") from None


def _chosen(model: str | Path | None, data: str | Path | None, long: bool, console: Console) -> Sequence[Subject]:
    if model is not None and data is not None:
        return [own_subject(model, data)]
    if model is not None:
        raise ReproductionError(f"Give the data to evaluate {model} on as well, with --data.")
    if data is not None:
        return [image_subject(data)]
    chosen = []
    for subject in default_subjects(long=long):
        absent = without_packages(subject)
        if absent:
            console.print(f"{subject.title} was left out: it needs {', '.join(absent)}.", highlight=False)
        else:
            chosen.append(subject)
    return chosen


def _measure(study: Study, subject: Subject, console: Console) -> Outcome:
    total = len(study.settings.seeds)

    def finished(seed: int, content: dict[str, Any]) -> None:
        result = content["result"]
        console.print(
            f"{subject.title}, seed {seed}: alpha {result['alpha']:g}; {_seeds_left(study, subject)} of {total} seeds "
            "left",
            highlight=False,
            soft_wrap=True,
        )

    with phase_bar(subject.title):
        study.run_subject(subject.name, subject.title, subject.make, finished, sizes=subject.sizes)
    contents = [study.read(subject.name, seed) for seed in study.settings.seeds]
    return Outcome([content for content in contents if content is not None])


def _seeds_left(study: Study, subject: Subject) -> int:
    return sum(study.read(subject.name, seed) is None for seed in study.settings.seeds)


def _write(out: Path, study: Study, outcomes: list[Outcome], console: Console) -> Reproduction:
    findings = [finding for outcome in outcomes for finding in findings_of(outcome)]
    files = [out / RESULTS, out / FINDINGS]
    write_text(files[0], json.dumps(results_json(study.settings, outcomes, findings), indent=1) + "\n")
    lines = [f"- {f.claim}, {f.subject}: **{f.verdict}**. {f.sentence}" for f in findings]
    write_text(files[1], "\n".join(lines) + "\n")
    for table in tables_of(outcomes):
        for suffix, text in (("md", table.markdown()), ("csv", table.csv())):
            files.append(out / f"{table.name}.{suffix}")
            write_text(files[-1], text)
    for name, chart in figures_of(outcomes).items():
        files += save_figure(chart, out / "figures", name)
    for outcome in outcomes:
        area, other = (100 * outcome.area(name, "metric") for name in (HIES, "HIS"))
        console.print(
            f"{outcome.title}: weighted area of HIES {area:.1f} %, of HIS {other:.1f} %.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"{len(files)} files are in {out}; {FINDINGS} has a sentence per claim.", highlight=False)
    return Reproduction(files, outcomes, findings)


def results_json(settings: Settings, outcomes: Sequence[Outcome], findings: Sequence[Finding]) -> dict[str, Any]:
    """All cells without values per sample, which are in `cells`."""
    versions = {module.__name__: str(module.__version__) for module in (headprune, torch, transformers)}
    return {
        "paper": PAPER,
        "settings": settings.to_json(),
        "made_by": versions,
        "subjects": [dict(outcome.about) for outcome in outcomes],
        "rows": [row for outcome in outcomes for row in outcome.rows()],
        "cells": [
            {"subject": outcome.name, **{name: value for name, value in cell.items() if name != "per_sample"}}
            for outcome in outcomes
            for result in outcome.results
            for cell in result["cells"]
        ],
        "findings": [finding.to_json() for finding in findings],
    }
