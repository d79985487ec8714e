"""The experiments on the claims of Greedy-Gnorm (headprune/papers/gnorm_study.py) on one model.

    python -m benchmarks.gnorm_claims                                     the demo's language identification
    python -m benchmarks.gnorm_claims --model DIR --calibration TSV --evaluation TSV

writes benchmarks/results/claims/gnorm-NAME.json. Parts are kept in --out, and a further call takes them from there. It
takes about 5 minutes of one core for a model of 6 layers with 12 heads and a thousand evaluation samples.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import headprune
from headprune.papers.gnorm_study import CURVES, demo_subject, load_subject, study_gnorm

RESULTS = Path(__file__).parent / "results" / "claims"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gnorm-claims"), help="parts, and what the demo trains")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--curves", default=",".join(CURVES), help="all by default; a further call can add others")
    options = parser.parse_args()
    files = {"model": options.model, "calibration": options.calibration, "evaluation": options.evaluation}
    given = {name: path for name, path in files.items() if path is not None}
    if given and len(given) < len(files):
        parser.error("give --model, --calibration and --evaluation, or none of them")
    subject = load_subject(options.model.name, **given) if given else demo_subject(options.out / "demo")
    # Folders of this machine do not belong into a result.
    words = [word for name, path in given.items() for word in (f"--{name}", "/".join(path.parts[-2:]))]
    if options.curves != ",".join(CURVES):
        words += ["--curves", options.curves]
    result = {
        "command": " ".join(["python -m benchmarks.gnorm_claims", *words]),
        "versions": {"headprune": headprune.__version__, "torch": torch.__version__},
        **study_gnorm(subject, options.out / subject.name, curves=options.curves.split(",")),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"gnorm-{subject.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for claim, found in result["comparisons"].items():
        low, high = found["interval"]
        print(f"{claim}: {found['difference']:+.4f} [{low:+.4f}, {high:+.4f}]")
    print(file)


if __name__ == "__main__":
    main()
