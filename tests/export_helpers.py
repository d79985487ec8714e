"""What the tests of exports share: models with uneven layers, and what PyTorch says of them, slowly."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import headprune
from headprune.exports.runtime import Source
from headprune.tasks import task_of
from helpers import flat, some_heads
from neuron_helpers import scattered
from zoo import ZOO, spread

CPU = torch.device("cpu")


def smaller(build: Callable[[], Any], **numbers: int) -> Any:
    """The model that is built, with other numbers in its config and in those of its parts: tracing takes its time for
    every layer."""
    dense = build()
    config = copy.deepcopy(dense.config)
    parts = [config, *(getattr(config, name) for name in ("text_config", "vision_config") if hasattr(config, name))]
    for part in parts:
        for name, number in numbers.items():
            if hasattr(part, name):
                setattr(part, name, number)
        if hasattr(part, "layer_types"):
            part.layer_types = None
    torch.manual_seed(0)
    model = type(dense)(config)
    spread(model)
    return model.eval()


def uneven(name: str, gone: int = 1, **numbers: int) -> Any:
    """A model of the zoo without half of its heads, some of its neurons, and all heads of one site."""
    model = smaller(ZOO[name].build, **numbers) if numbers else ZOO[name].build()
    sites = headprune.resolve(model)
    others = [site for site in sites if site.index != gone]
    heads = flat(sites[gone].units()) + some_heads(others, seed=3)
    headprune.remove(model, heads, neurons=scattered(model, seed=2))
    assert len({site.size for site in headprune.resolve(model)}) > 1
    return model.eval()


def source(name: str, gone: int = 1, **numbers: int) -> Source:
    model = uneven(name, gone, **numbers)
    task = task_of(model)
    return Source(model, task, task.prepare(ZOO[name].batch(5), CPU))


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Padded rows, and one shorter row alone."""
    whole = ZOO[name].batch(6)
    one = {key: value[:1] for key, value in ZOO[name].batch(7).items()}
    short = {key: value[:, :4].contiguous() if value.dim() == 2 else value for key, value in one.items()}
    return [whole, short]


def said(given: Source, call: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """What a model or a runner says of the real tokens of a batch."""
    prepared = given.task.prepare(batch, CPU)
    with torch.no_grad():
        logits = given.task.logits(call(**given.task.inputs(prepared)))
    return logits[given.task.real_tokens(prepared, logits)] if logits.dim() == 3 else logits


def written(given: Source, prompt: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
    """The most probable tokens one after the other, each from the whole text so far."""
    name = "decoder_input_ids" if "decoder_input_ids" in prompt else "input_ids"
    every = prompt[name]
    rest = {key: value for key, value in prompt.items() if name == "decoder_input_ids" or key != "attention_mask"}
    for _ in range(tokens):
        with torch.no_grad():
            logits = given.model(**{**rest, name: every}, use_cache=False).logits
        first, second = logits[0, -1].topk(2).values
        assert first - second > 1e-4, "too near for rounding not to matter; take another seed"
        every = torch.cat([every, logits[:, -1:].argmax(-1)], dim=1)
    return every[0, -tokens:].tolist()


def alone(code: str, *without: str) -> str:
    """What Python code prints in a process of its own, in which these packages cannot be imported."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in ("headprune", *without))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{hidden}{code}"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def program(folder: Path, hidden: Sequence[str] = ("torch", "transformers", "tokenizers")) -> str:
    """What the program in an exported folder prints, where nothing but its runtime can be imported."""
    return alone(f"import runpy; runpy.run_path({str(folder / 'run.py')!r}, run_name='__main__')", *hidden)
