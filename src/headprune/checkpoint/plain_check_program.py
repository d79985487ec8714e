"""A program, run where headprune cannot be imported, that checks whether plain transformers loads a checkpoint as it
is.

Reads lines `[folder, expected, ours]` and answers each with `true` or `false`: whether the class that the config names,
loaded from the folder, has the outputs in the file `expected` for the inputs there. Code that the config names is run
only if it is `ours`. Each line is checked in a fork that has imported only torch and transformers, where the system can
fork.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Blocked:
    """An import hook that hides headprune."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "headprune":
            raise ModuleNotFoundError(name)


def same(folder: str, expected: str, ours: bool) -> bool:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = json.loads((Path(folder) / "config.json").read_text())
    (name,) = settings["architectures"]
    if ours:
        name = next(auto for auto, kind in settings["auto_map"].items() if kind.endswith(f".{name}"))
    model, loading_info = getattr(transformers, name).from_pretrained(
        folder, use_safetensors=True, output_loading_info=True, trust_remote_code=ours
    )
    if any(loading_info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return False
    expectation = torch.load(expected, weights_only=True)
    with torch.no_grad():
        result = model.eval()(**expectation["inputs"])
    for key, value in expectation["outputs"].items():
        other = result[key].float()
        if other.shape != value.shape or not (other - value).abs().max() <= expectation["within"] * max(
            1, value.abs().max()
        ):
            return False
    return True


def answer(folder: str, expected: str, ours: bool) -> bool:
    try:
        return same(folder, expected, ours)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False


def in_fork(folder: str, expected: str, ours: bool) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if answer(folder, expected, ours) else 1
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    sys.meta_path.insert(0, Blocked())
    from transformers import AutoModel, GenerationMixin, PreTrainedModel  # noqa: F401  # imported once for all forks

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries go to stderr
    for line in sys.stdin:
        print(json.dumps((in_fork if hasattr(os, "fork") else answer)(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
