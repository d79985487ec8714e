"""All benchmarks, one after the other: `make bench`."""

from __future__ import annotations

import sys

from benchmarks import score

if __name__ == "__main__":
    sys.exit(score.main())
