"""The ledger: its verdicts, that it follows from the result files, its page and its verb."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import claims as claims_benchmark
from benchmarks.claims import PAGE, RESULTS, derive, with_ledger, without_folders

from headprune.measure.intervals import Difference
from headprune.papers import gradients
from headprune.papers.authors_files import authors_findings as read_authors_files
from headprune.papers.claim_runs import RUNS, run_claim
from headprune.papers.claims import CLAIMS
from headprune.papers.evidence import EVIDENCE, authors_findings, evidence_of, gnorm_findings
from headprune.papers.ledger import (
    AUTHORS,
    PAPERS,
    VERDICTS,
    Claim,
    Finding,
    findings_by_claim,
    page,
    read_findings,
    verdict_if_better,
    verdict_if_not_worse,
)
from headprune.papers.paper_models import ReproductionError
from helpers import SHARED
from run_helpers import headprune as program

FOLDER = SHARED / "reference" / "greedy-gnorm"
needs_published = pytest.mark.skipif(not FOLDER.is_dir(), reason="the authors' files of ../shared are not here")
BY_ID = {claim.id: claim for claim in CLAIMS}


# --- verdicts ---


@pytest.mark.parametrize(
    ("difference", "better", "not_worse"),
    [
        (Difference(0.2, 0.1, 0.3), "holds here", "holds here"),
        (Difference(-0.2, -0.3, -0.1), "does not hold here", "does not hold here"),
        (Difference(0.0, -0.1, 0.1), "cannot be told apart", "cannot be told apart"),
        (Difference(0.0, 0.0, 0.0), "cannot be told apart", "holds here"),
        (Difference(-0.01, -0.015, -0.005), "does not hold here", "holds here"),
        (Difference(-0.02, -0.05, 0.01), "cannot be told apart", "cannot be told apart"),
    ],
)
def test_a_verdict_follows_from_the_interval(difference: Difference, better: str, not_worse: str) -> None:
    assert verdict_if_better(difference) == better
    assert verdict_if_not_worse(difference, 0.02) == not_worse


def comparison(low: float, high: float) -> dict[str, Any]:
    mean = (low + high) / 2
    return {"difference": mean, "interval": [low, high], "by_seed": [mean - 0.001, mean + 0.001]}


def test_findings_of_a_study_of_gnorm() -> None:
    zeros = {"probabilities": 100, "float32": 0, "bfloat16": 0, "float16": 3}
    content = {
        "subject": "a model",
        "seeds": [0, 1],
        "comparisons": {
            "greedy against one-shot": comparison(0.01, 0.03),
            "logit norm against loss": comparison(-0.03, -0.01),
            "per sample against per batch": comparison(-0.01, 0.02),
        },
        "entropy": [
            {"order": {"B, 1e-07": {"inversions": swapped}}, "bounds": {}, "zeros": zeros} for swapped in (0, 2)
        ],
    }
    verdicts = {finding.claim: finding.verdict for finding in gnorm_findings(content)}
    assert verdicts == {
        "gnorm-greedy-above-static": "holds here",
        "gnorm-objective": "does not hold here",
        "gnorm-aggregation": "cannot be told apart",
        "entropy-epsilon-order": "does not hold here",
        "entropy-underflow": "does not hold here",
    }
    (greedy,) = (f for f in gnorm_findings(content) if f.claim == "gnorm-greedy-above-static")
    # Student's quantile for two seeds widens the interval: 12.7 standard errors of 0.001.
    assert greedy.values["difference"] == pytest.approx([0.02, 0.02 - 0.0162, 0.02 + 0.0162], abs=1e-4)
    assert greedy.sentence.endswith("minus the one-shot one: +2.0 [+0.4, +3.6] points; by seed +1.9, +2.1.")


@needs_published
def test_findings_of_the_authors_files() -> None:
    findings = authors_findings(read_authors_files(FOLDER))
    found = {(finding.claim, finding.subject.partition(",")[0]): finding for finding in findings}
    above = {model: f.values["above"] for (claim, model), f in found.items() if claim == "gnorm-above-random"}
    assert above == {"BERT-base": 22, "ALBERT-base-v2": 11, "RoBERTa-large": 6, "XLM-RoBERTa-base": 19}
    assert found["gnorm-above-random", "RoBERTa-large"].verdict == "contradicted by the authors' files"
    assert found["gnorm-above-random", "BERT-base"].verdict == "holds in the authors' files"
    assert found["gnorm-accuracies", "BERT-base"].verdict == "equal"
    assert found["gnorm-stop", "all four models"].verdict == "contradicted by the authors' files"
    assert found["gnorm-stop", "all four models"].values == {
        "knee": "116, 36, 268, 105",
        "published": "117, 36, 245, 105",
    }
    assert found["gnorm-final-masks", "ALBERT-base-v2"].verdict == "equal"


# --- the ledger ---


def test_claims_are_complete() -> None:
    assert len(CLAIMS) == len(BY_ID) >= 26
    assert {claim.paper for claim in CLAIMS} == set(PAPERS)
    for claim in CLAIMS:
        assert claim.says.endswith("."), claim.id
        assert claim.tested_by.endswith("."), claim.id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", claim.id)
    tested = {name for evidence in EVIDENCE for name in evidence.claims}
    assert tested <= set(BY_ID)
    # What has no experiment says what it needs.
    assert {claim.id for claim in CLAIMS if not claim.needs} == tested
    assert set(RUNS) == {evidence.name for evidence in EVIDENCE}


def test_the_findings_follow_from_the_result_files() -> None:
    derived = json.loads(json.dumps([finding.to_json() for finding in derive()]))
    assert [finding.to_json() for finding in read_findings()] == derived, "run python -m benchmarks.claims --derive"


def test_every_finding_has_its_numbers() -> None:
    for finding in read_findings():
        assert finding.verdict in VERDICTS[:-1]
        assert finding.claim in BY_ID
        assert finding.subject
        assert finding.command.startswith(("headprune ", "python -m benchmarks.")), finding
        assert finding.values
        if "difference" in finding.values and isinstance(finding.values["difference"], list):
            margin = finding.values.get("margin", 0.0)
            assert finding.verdict == verdict_if_not_worse(Difference(*finding.values["difference"]), margin)


def test_every_result_file_is_read() -> None:
    assert sorted(RESULTS.glob("*.json"))
    for file in RESULTS.glob("*.json"):
        content = json.loads(file.read_text())
        found = evidence_of(file.stem).findings(content)
        assert found, file.name
        assert {finding.claim for finding in found} <= set(evidence_of(file.stem).claims)
        assert "/tmp" not in json.dumps(content)


def test_the_page_is_the_ledger() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_ledger(text, read_findings()), "run python -m benchmarks.claims --derive"
    assert all(f"### {claim.id}\n" in text for claim in CLAIMS)


def test_a_claim_without_a_finding_is_not_tested() -> None:
    claims = (Claim("a-b", "hies", "Abstract", "It holds.", "By a run.", needs="a cluster"), BY_ID["hies-quality"])
    findings = [Finding("hies-quality", "a model", "holds here", "+1.", {"seeds": [0]}, "headprune x")]
    rows = findings_by_claim(claims, findings)
    assert [finding.verdict for finding in rows["a-b"]] == ["not tested"]
    assert rows["a-b"][0].sentence == "needs a cluster"
    text = page(claims, findings)
    assert "2 claims, 2 findings." in text
    assert "| holds here | 1 |" in text
    assert "| not tested | 1 |" in text
    assert "| a model | holds here | +1. |" in text
    assert "| `headprune x` | hies-quality |" in text


def test_quick_experiments_leave_the_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every experiment is called as its command, and what it writes is read from there."""
    commands: list[list[str]] = []

    def run(words: list[str], *, check: bool) -> None:
        commands.append(words[2:])
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        if "reproduce" in words:
            stored = {"hies": "hies-minilm-sst2", "all-attention": "all-attention", "gates": "gates-encoder-decoder"}
            name = stored[words[words.index("reproduce") + 1]]
            (out / "results.json").write_text((RESULTS / f"{name}.json").read_text())
        else:
            results = Path(words[words.index("--results") + 1])
            (results / "gnorm-langid.json").write_text((RESULTS / "gnorm-langid.json").read_text())

    before = {file.name: file.read_bytes() for file in RESULTS.iterdir()}
    monkeypatch.setattr(claims_benchmark.subprocess, "run", run)
    monkeypatch.setattr(gradients, "demo_task", lambda: None)
    assert claims_benchmark.main(["--quick", "--out", str(tmp_path / "out")]) == 0
    assert {file.name: file.read_bytes() for file in RESULTS.iterdir()} == before
    assert [words[:3] for words in commands[:2]] == [
        ["headprune", "reproduce", "hies"],
        ["benchmarks.gnorm_claims", "--results", str(tmp_path / "out" / "results")],
    ]
    assert all(words[words.index("--seeds") + 1] == "0" for words in commands if "--seeds" in words)
    printed = capsys.readouterr().out
    assert "gnorm-sizes, BERT-base: equal." in printed
    assert "hies-quality, minilm-sst2, test.tsv: cannot be told apart." in printed


def test_commands_have_no_folders_of_a_machine() -> None:
    assert without_folders(["headprune", "--model", "/a/b/models/bert", "--out", "x"]) == [
        *("headprune", "--model", "models/bert", "--out", "x"),
    ]


def test_advice_on_hies_is_that_of_the_ledger() -> None:
    verdicts = Counter(finding.verdict for finding in read_findings() if finding.claim == "hies-quality")
    assert verdicts == {"holds here": 1, "does not hold here": 1, "cannot be told apart": 4}, "change the pages below"
    pages = PAGE.parent / "criteria"
    text = " ".join((pages / "hies.md").read_text(encoding="utf-8").split())
    assert "HIES is more accurate than HIS on one, less accurate on one, and cannot be told apart on four" in text
    assert "it does on one of six models" in " ".join((pages / "his.md").read_text(encoding="utf-8").split())


# --- the verb ---


def test_the_verb_lists_and_shows() -> None:
    shown = program("claims")
    assert shown.code == 0
    assert all(claim.id in shown.out for claim in CLAIMS)
    listed = program("claims", "hies", "--json").json["claims"]
    assert {claim["id"] for claim in listed} == {claim.id for claim in CLAIMS if claim.paper == "hies"}
    assert all(claim["findings"] for claim in listed)
    one = program("claims", "gnorm-sizes").out
    assert "102,269,955 to 79,244,355" in one
    assert "headprune reproduce greedy-gnorm --out DIR" in one


def test_the_verb_runs_an_experiment(tmp_path: Path) -> None:
    done = program("claims", "--run", "gnorm-sizes", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    (claim,) = done.json["claims"]
    assert [finding["verdict"] for finding in claim["findings"]] == ["equal"] * 4
    recorded = [finding for finding in read_findings() if finding.claim == "gnorm-sizes"]
    assert sorted(f["sentence"] for f in claim["findings"]) == sorted(f.sentence for f in recorded)


@needs_published
def test_the_verb_reads_the_authors_files(tmp_path: Path) -> None:
    found = run_claim(BY_ID["gnorm-near-original"], tmp_path, published=FOLDER)
    assert [finding.subject for finding in found] == [f"RoBERTa-large, {AUTHORS}"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "There is no claim and no paper 'nothing'; papers are greedy-gnorm, hies, gates, headprune"),
        (["--run", "nothing"], "There is no claim and no paper 'nothing'"),
        (["--run", "hies"], "There is no claim and no paper 'hies'"),
        (["hies", "--run", "gnorm-sizes"], "--run takes one claim; leave out the other name."),
        (["--run", "gnorm-accuracies"], "gnorm-accuracies is about the authors' result files; give their folder with"),
        (["--run", "gnorm-accuracy-measured"], "cannot be tested here; it needs the four checkpoints"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = program("claims", *words, "--out", tmp_path / "out")
    assert done.code == 2
    assert sentence in " ".join(done.err.split())
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_of_the_authors_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReproductionError):
        run_claim(BY_ID["gnorm-accuracies"], tmp_path, published=tmp_path / "none")
