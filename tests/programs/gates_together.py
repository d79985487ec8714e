"""One of several processes that train gates together; each writes what its gates came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from gate_helpers import gates_after

torch.set_num_threads(1)


def main() -> None:
    out = Path(sys.argv[1])
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(gates_after(out / "trainer", batch_size=2)))


if __name__ == "__main__":
    main()
