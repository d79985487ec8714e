"""`python -m headprune.papers MODEL --out DIR`: all runs of one of the paper's models in one command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headprune.errors import HeadpruneError
from headprune.papers.protocol import PROTOCOLS, run_protocol


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headprune.papers", description=__doc__)
    parser.add_argument("model", choices=[protocol.key for protocol in PROTOCOLS])
    parser.add_argument("--out", type=Path, required=True, help="directory for the runs of all models")
    parser.add_argument("--checkpoint", help="another model: a local folder or a hub name")
    parser.add_argument("--data", help="a local table with the data set's columns, instead of the data set")
    parser.add_argument("--trials", type=int, help="runs of random; by default as many as the authors'")
    parser.add_argument(
        "--aggregation",
        choices=["sample", "batch"],
        default="sample",
        help="sample: the formula of the paper; batch: the computation of the notebooks",
    )
    options = parser.parse_args(arguments)
    try:
        folder = run_protocol(
            options.model,
            options.out,
            checkpoint=options.checkpoint,
            source=options.data,
            aggregation=options.aggregation,
            trials=options.trials,
        )
    except HeadpruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"The runs are in {folder}; draw them with headprune reproduce greedy-gnorm --runs {options.out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
