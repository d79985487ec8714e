"""The ledger of claims: runs the experiments behind it, and derives findings and page from their result files.

    python -m benchmarks.claims                    # all that runs here: more than an hour on two cores
    python -m benchmarks.claims --quick            # smaller ones; their numbers are printed and not kept
    python -m benchmarks.claims --derive           # findings and page alone, from benchmarks/results/claims

Every experiment is a command of the program or of this folder, and resumes in --out. With --sst2 FOLDER (a BERT
classifier in `model`, and train.tsv and test.tsv), --images FILE.npz and --published FOLDER there are more subjects.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headprune.papers.claims import CLAIMS
from headprune.papers.evidence import evidence_of
from headprune.papers.ledger import FINDINGS, Finding, page
from headprune.papers.published_sizes import compare_sizes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "claims"
PAGE = ROOT / "docs" / "claims.md"
LEDGER = re.compile(r"(<!-- ledger -->\n).*?(<!-- end -->)", re.DOTALL)
# What is not kept of results.json: the ledger needs no single cell.
DROPPED = ("cells",)


def derive(folder: Path = RESULTS) -> list[Finding]:
    """The findings of all result files, in the order of the claims."""
    findings = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        of_file = evidence_of(file.stem).findings(content)
        findings += [dataclasses.replace(finding, command=content["command"]) for finding in of_file]
    order = [claim.id for claim in CLAIMS]
    unknown = sorted({finding.claim for finding in findings} - set(order))
    if unknown:
        raise SystemExit(f"There are findings of claims that are not in the ledger: {', '.join(unknown)}.")
    return sorted(findings, key=lambda finding: (order.index(finding.claim), finding.subject))


def with_ledger(text: str, findings: Sequence[Finding]) -> str:
    """The page with its generated part updated."""
    return LEDGER.sub(lambda block: f"{block[1]}\n{page(CLAIMS, findings)}\n{block[2]}", text)


def write(findings: Sequence[Finding]) -> None:
    rows = [finding.to_json() for finding in findings]
    FINDINGS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_ledger(PAGE.read_text(encoding="utf-8"), findings), encoding="utf-8")


def keep(name: str, content: Mapping[str, Any], command: str = "", folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in content.items() if key not in DROPPED}
    kept = {"command": command, **kept} if command else kept
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def experiments(options: argparse.Namespace) -> list[tuple[str, list[str], Path | None]]:
    """Name of the result file, words of the command, and the results.json to keep; None where the command writes its
    result file itself."""
    out: Path = options.out
    seeds = ["--seeds", "0"] if options.quick else []
    hies = ["headprune", "reproduce", "hies"]
    gnorm = ["benchmarks.gnorm_claims", "--results", str(results_of(options))]
    gnorm += ["--curves", "greedy,one-shot"] if options.quick else []
    made: list[tuple[str, list[str], Path | None]] = [
        ("hies-small-models", [*hies, *seeds, "--out", str(out / "hies")], out / "hies" / "results.json"),
        ("gnorm-langid", [*gnorm, "--out", str(out / "gnorm")], None),
    ]
    for name, paper in (("all-attention", "all-attention"), ("gates-encoder-decoder", "gates")):
        place = out / paper
        scale = ["--scale", "0.1" if options.quick else "0.3"] if paper == "all-attention" else []
        words = ["headprune", "reproduce", paper, *(seeds or ["--seeds", "0,1,2"]), *scale, "--out", str(place)]
        made.append((name, words, place / "results.json"))
    if options.sst2 is not None:
        folder: Path = options.sst2
        model, test = str(folder / "model"), str(folder / "test.tsv")
        place = out / "hies-sst2"
        words = [*hies, "--model", model, "--data", test, *seeds, "--out", str(place)]
        made.append(("hies-minilm-sst2", words, place / "results.json"))
        files = ["--model", model, "--calibration", str(folder / "train.tsv"), "--evaluation", test]
        made.append(("gnorm-minilm-sst2", [*gnorm, *files, "--out", str(out / "gnorm")], None))
    if options.images is not None:
        place = out / "hies-images"
        words = [*hies, "--data", str(options.images), *seeds, "--out", str(place)]
        made.append((f"hies-{options.images.stem}", words, place / "results.json"))
    return made


def results_of(options: argparse.Namespace) -> Path:
    """Where result files go: quick ones are not kept."""
    return Path(options.out) / "results" if options.quick else RESULTS


def run(options: argparse.Namespace) -> None:
    folder = results_of(options)
    from headprune.papers import gradients

    keep("sizes", compare_sizes(), folder=folder)
    task = gradients.demo_task()
    if task is not None:
        change = gradients.change_by_site(task, gradients.DEMO_NAME)
        keep("gradients", change, "headprune claims --run gnorm-gradients-change", folder)
    if options.published is not None:
        from headprune.papers.authors_files import authors_findings

        command = "headprune reproduce greedy-gnorm --published FOLDER --out DIR"
        keep("gnorm-authors-files", authors_findings(options.published), command, folder)
    for name, words, result in experiments(options):
        print(f"{name}: {shlex.join(words)}", flush=True)
        module = ["headprune", *words[1:]] if words[0] == "headprune" else words
        subprocess.run([sys.executable, "-m", *module], check=True)
        if result is not None:
            content = json.loads(result.read_text(encoding="utf-8"))
            keep(name, content, content.get("command") or shlex.join(without_folders(words)), folder)


def without_folders(words: Sequence[str]) -> list[str]:
    """A command without the folders of this machine, which do not belong into a result."""
    return ["/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word for word in words]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--derive", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("claims"), help="runs and models")
    parser.add_argument("--sst2", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--published", type=Path)
    options = parser.parse_args(arguments)
    if not options.derive:
        run(options)
    findings = derive(results_of(options))
    if options.quick:
        print("\n".join(f"{each.claim}, {each.subject}: {each.verdict}. {each.sentence}" for each in findings))
    else:
        write(findings)
    print(f"{len(CLAIMS)} claims, {len(findings)} findings.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
