"""`python -m headprune.papers`, a former command: says which one it is today."""

import sys

MESSAGE = (
    "Error: python -m headprune.papers MODEL is now headprune reproduce greedy-gnorm --run MODEL, with --model for "
    "--checkpoint; use that command."
)

if __name__ == "__main__":
    print(MESSAGE, file=sys.stderr)
    sys.exit(2)
