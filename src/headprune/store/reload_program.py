"""Run as a program of its own, where headprune cannot be imported: does plain transformers load a checkpoint as it is?

Reads lines `[folder, expected, ours]` and answers each with `true` or `false`: whether the class that the config names,
as loaded from the folder, gave the outputs that the file `expected` has for the inputs there. Code that the config
names is run only if it is `ours`. Each is answered by a fork that has seen nothing but the code of torch and
transformers, where the system can fork.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Blocked:
    """As if headprune were not installed."""

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
    model, found = getattr(transformers, name).from_pretrained(
        folder, use_safetensors=True, output_loading_info=True, trust_remote_code=ours
    )
    if any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return False
    told = torch.load(expected, weights_only=True)
    with torch.no_grad():
        result = model.eval()(**told["inputs"])
    for key, value in told["outputs"].items():
        other = result[key].float()
        if other.shape != value.shape or not (other - value).abs().max() <= told["within"] * max(1, value.abs().max()):
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
    from transformers import AutoModel, GenerationMixin, PreTrainedModel  # noqa: F401  # once, for all forks

    talk = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        print(json.dumps((in_fork if hasattr(os, "fork") else answer)(*json.loads(line))), file=talk, flush=True)


if __name__ == "__main__":
    main()
