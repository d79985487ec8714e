"""Run in a process of its own: load every checkpoint under a folder, run it on its batch, and compare with what the
process that saved it had got. Prints one JSON object: kind -> case -> list of problems.

    load_checkpoints.py FOLDER

FOLDER/plain goes through headprune, FOLDER/portable through plain transformers where headprune cannot be imported. Each
in a fork that has seen nothing but the code of transformers, which takes longer to import than all models to load.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

torch.set_num_threads(1)


class Blocked:
    """As if headprune were not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "headprune":
            raise ModuleNotFoundError(name)


def load_with_headprune(folder: Path) -> tuple[Any, list[str]]:
    import headprune

    return headprune.load(folder), []


def load_with_transformers(folder: Path) -> tuple[Any, list[str]]:
    settings = json.loads((folder / "config.json").read_text())
    own = settings["architectures"][0]
    auto = next(auto for auto, kind in settings["auto_map"].items() if kind.endswith(f".{own}"))
    model, actual = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    return model, [f"{what}: {sorted(map(str, names))}" for what, names in actual.items() if names]


def problems(case: Path, load: Any) -> list[str]:
    model, actual = load(case / "checkpoint" / case.name)
    expected = load_file(case / "outputs.safetensors")
    with torch.no_grad():
        result = model.eval()(**load_file(case / "batch.safetensors"))
    actual += [f"output {name} differs" for name in expected if not torch.equal(expected[name], result[name])]
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if shapes != json.loads((case / "shapes.json").read_text()):
        actual.append("parameters differ")
    return actual


def look(folder: Path, load: Any) -> dict[str, list[str]]:
    report = {}
    for case in sorted(folder.iterdir()):
        try:
            report[case.name] = problems(case, load)
        except Exception as error:
            report[case.name] = [f"{type(error).__name__}: {error}"]
    return report


def block_headprune() -> None:
    sys.meta_path.insert(0, Blocked())
    try:
        import headprune  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("headprune could be imported, so this would prove nothing")


def in_fork(work: Callable[[], object], answer: Path) -> Any:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer.write_text(json.dumps(work()))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{answer.stem} came to no end")
    return json.loads(answer.read_text())


def main() -> None:
    folder = Path(sys.argv[1])
    for file in folder.glob("plain/*/checkpoint/*/config.json"):
        for name in json.loads(file.read_text())["architectures"]:
            getattr(transformers, name, None)  # some are headprune's own

    def portable() -> dict[str, list[str]]:
        block_headprune()
        return look(folder / "portable", load_with_transformers)

    def plain() -> dict[str, list[str]]:
        return look(folder / "plain", load_with_headprune)

    works = {"portable": portable, "plain": plain}
    print(json.dumps({kind: in_fork(work, folder / f"{kind}.json") for kind, work in works.items()}))


if __name__ == "__main__":
    main()
