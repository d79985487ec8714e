"""Journals of small runs, kept as files: five models by five schedules, and the scores of every criterion.

A change of structure must leave them as they are. The models are in float64, so that another CPU or another order of
sums moves no digit that the comparison looks at, and no order of units.

    python tests/golden_journals.py            # compare with the files, byte for byte
    python tests/golden_journals.py --write    # write them anew; say in the CHANGELOG which numbers changed, and why
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import headprune
from score_helpers import applicable, labelled
from zoo import ZOO

FOLDER = Path(__file__).parent / "golden"
# Granite is not in the table of families: its layout is discovered.
MODELS = ("bert", "gpt2", "llama-gqa", "t5", "granite")
SCHEDULES: dict[str, dict[str, Any]] = {
    "greedy-every": {"schedule": "greedy", "rescore": "every", "keep": 0.25},
    "greedy-auto": {"schedule": "greedy", "rescore": "auto", "keep": 0.25},
    "one-shot": {"schedule": "one-shot", "keep": 0.25},
    "rounds": {"schedule": "rounds", "keep_flops": (0.85, 0.7), "rounds": 4, "round_to": 4},
    "layerwise": {"schedule": "layerwise", "keep_flops": 0.75, "round_to": 4},
}
CRITERIA = (
    *("gnorm", "gnorm(objective=loss)", "gnorm(aggregation=batch)", "his", "tis", "taylor", "entropy", "deficit"),
    *("hies", "magnitude", "random", "attribution(steps=2)", "fisher", "fluctuation", "wanda", "elimination"),
    *("elimination(metric=output)", "residual-gradient", "residual-gradient(residual=False)", "residual-error"),
)
NEURONS = ("taylor", "fisher", "fluctuation", "wanda", "elimination", "residual-gradient", "residual-error")
# Published methods, each a combination of a criterion, widths and a repair.
METHODS = ("kwon", "flap", "wanda-sp", "ziplm", "osscar", "llm-pruner")


def model(name: str) -> Any:
    """A model whose weights are drawn as whole numbers: normal ones differ in their last digit from CPU to CPU."""
    made = ZOO[name].build().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            drawn = torch.randint(-512, 513, parameter.shape, generator=generator).double() / 512
            norm = "norm" in key.lower() or "ln_" in key
            if parameter.dim() >= 2 and "embed" not in key and "bias" not in key:
                parameter.copy_(drawn * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + drawn / 8 if norm and key.endswith("weight") else drawn / 2)
    return made


def batches(name: str, *seeds: int) -> list[Any]:
    return [labelled(ZOO[name], seed) for seed in seeds]


def journal(name: str, **options: Any) -> list[dict[str, Any]]:
    """The lines of a run's journal."""
    result = headprune.prune(
        model(name), batches(name, 0, 1, 2, 3), evaluation=batches(name, 10, 11), metric="fidelity", **options
    )
    return [step.to_json() for step in result.trajectory]


def scores(name: str) -> list[dict[str, Any]]:
    """A line per criterion: the scores of heads and, where it knows them, of neurons."""
    lines = []
    data = batches(name, 0, 1)
    for spec in applicable(ZOO[name], CRITERIA):
        actual = headprune.score(model(name), data, criterion=spec)
        line: dict[str, Any] = {"criterion": spec, "heads": _plain(actual.scores)}
        if spec in NEURONS:
            both = headprune.score(model(name), data, criterion=spec, units="heads,neurons")
            line["heads,neurons"] = _plain(both.scores)
        lines.append(line)
    return lines


def _plain(values: torch.Tensor) -> list[list[float | None]]:
    return [[None if value != value else value for value in row] for row in values.tolist()]


def cases() -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """The name of a file, and what makes its lines."""
    for name in MODELS:
        for schedule, options in SCHEDULES.items():
            yield f"{name}-{schedule}", lambda name=name, options=options: journal(name, **options)
        yield f"{name}-scores", lambda name=name: scores(name)
    for method in METHODS:
        options = {"method": method, "keep_flops": 0.75, "round_to": 4}
        yield f"bert-{method}", lambda options=options: journal("bert", **options)


def text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def main() -> int:
    torch.set_num_threads(1)
    different = 0
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for name, make in cases():
        if wanted and not any(part in name for part in wanted):
            continue
        path = FOLDER / f"{name}.jsonl"
        now = text(make())
        if "--write" in sys.argv:
            path.write_text(now)
        elif now != path.read_text():
            different += 1
            print(f"{name}: {difference([json.loads(line) for line in now.splitlines()], read(name))}")
    print(f"{different} files differ")
    return int(different > 0)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def difference(now: Any, then: Any, path: str = "") -> str:
    """What differs by more than 1e-6, the first of it; or how far numbers are apart at most."""
    worst = [0.0]
    actual = _difference(now, then, path, worst)
    return actual or f"the same within {worst[0]:.1e}"


def _difference(now: Any, then: Any, path: str, worst: list[float]) -> str:
    if isinstance(now, dict) and isinstance(then, dict):
        if now.keys() != then.keys():
            return f"{path}: keys {sorted(now)} and {sorted(then)}"
        pairs = [(f"{path}.{key}", now[key], then[key]) for key in now]
    elif isinstance(now, list) and isinstance(then, list):
        if len(now) != len(then):
            return f"{path}: {len(now)} and {len(then)} entries"
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(now, then, strict=True))]
    elif isinstance(now, float) and isinstance(then, float):
        gap = abs(now - then) / max(abs(then), 1e-6)
        worst[0] = max(worst[0], gap)
        return "" if gap <= TOLERANCE else f"{path}: {now} and {then}"
    else:
        return "" if now == then or path.endswith(".outcomes") else f"{path}: {now} and {then}"
    for where, one, other in pairs:
        if actual := _difference(one, other, where, worst):
            return actual
    return ""


TOLERANCE = 1e-6

if __name__ == "__main__":
    sys.exit(main())
