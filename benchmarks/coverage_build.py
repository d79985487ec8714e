"""How many architectures of transformers build small, run, and reach their attention: one process for each.

`python -m benchmarks.coverage_build [TYPE ...]` prints what failed, and counts.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from headprune.units.small import attention_modules, randomise, sample_runs, small_config

SECONDS = 60
AT_ONCE = 2


def model_class(model_type: str, config: Any) -> Any:
    """The base class, or the first that any task has."""
    names = sorted(name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES") and "CONFIG" not in name)
    for name in ["MODEL_MAPPING_NAMES", *names]:
        if model_type in getattr(modeling_auto, name):
            found = getattr(modeling_auto, name.removesuffix("_NAMES"))[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    return None


def tried(model_type: str) -> dict[str, Any]:
    """How far one architecture comes: `no class`, `build`, `run`, `reach` or `fine`."""
    try:
        config = CONFIG_MAPPING[model_type]()
        cls = model_class(model_type, config)
        if cls is None:
            return {"stage": "no class"}
        model = cls(small_config(config, keep_heads=False, depth=2)).eval()
        randomise(model, 0)
    except Exception as error:  # any of hundreds of architectures may say anything
        return {"stage": "package" if isinstance(error, ImportError) else "build", "why": repr(error)[:200]}
    missing = set(attention_modules(model))
    if not missing:
        return {"stage": "no attention"}
    runs = sample_runs(model)
    for path in list(missing):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: missing.discard(path))
    with torch.no_grad():
        for run in runs:
            model.get_submodule(run.path)(**run.inputs)
    stage = "run" if not runs else "reach" if missing else "fine"
    return {"stage": stage, "why": f"not reached: {sorted(missing)[:3]}", "whole": any(not run.path for run in runs)}


def measure(types: list[str]) -> dict[str, dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, Any] = {}
    waiting = list(types)
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            model_type = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=report, args=(model_type, sender))
            process.start()
            sender.close()
            running[model_type] = process, receiver, time.monotonic()
        for model_type, (process, receiver, start) in list(running.items()):
            if receiver.poll(0.01):
                try:
                    results[model_type] = receiver.recv()
                except EOFError:
                    results[model_type] = {"stage": "crash"}
            elif time.monotonic() - start > SECONDS:
                results[model_type] = {"stage": "too slow"}
                process.kill()
            if model_type in results:
                process.join()
                del running[model_type]
    return results


def report(model_type: str, sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(tried(model_type))


def main() -> None:
    transformers.logging.set_verbosity_error()
    results = measure(sys.argv[1:] or list(CONFIG_MAPPING_NAMES))
    for model_type, result in results.items():
        if result["stage"] not in ("fine", "no class", "no attention"):
            print(model_type, result["stage"], result.get("why", ""))
    print(dict(Counter(result["stage"] for result in results.values())))
    print("run as a whole:", sum(bool(result.get("whole")) for result in results.values()))


if __name__ == "__main__":
    main()
