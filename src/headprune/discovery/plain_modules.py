"""Modules that are no transformers models: measured as they are, on inputs that their layers suggest."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headprune.discovery.attention import Discovery, DiscoveryError, discover_sites
from headprune.discovery.twin import Run, attention_modules, randomise
from headprune.hooks.torch_attention import expose
from headprune.units.cutting.record import dense_layout, keep_dense_layout
from headprune.units.linear import is_plain

SAMPLES, TOKENS, SIDE = 2, 7, 4


def discover_module(model: nn.Module) -> Discovery:
    """What an experiment says of this very module; made before any head goes."""
    known: Discovery | None = dense_layout(model, "attention")
    if known is None:
        twin, runs = twin_of_module(model)
        likely = attention_modules(twin)
        order = [path for path, _ in twin.named_modules()]
        found = discover_sites(twin, runs, sorted({*likely, *_mixers(twin)}, key=order.index))
        left = tuple(pair for pair in found.left if pair[0] in likely)  # others only might have been attention
        known = Discovery(found.sites, left)
        keep_dense_layout(model, "attention", known)
    return known


def twin_of_module(model: nn.Module) -> tuple[nn.Module, list[Run]]:
    """The same module with random numbers, and inputs that it runs on."""
    twin = copy.deepcopy(model).cpu().double().eval()
    expose(twin)
    randomise(twin, 0)
    runs = list(_runs(twin))
    if not runs:
        raise DiscoveryError(f"no input was found that {type(model).__name__} runs on by itself")
    return twin, runs


def _mixers(model: nn.Module) -> Iterator[str]:
    """Modules with several linear maps or parameters of their own, whatever they are called."""
    for path, module in model.named_modules():
        maps = sum(is_plain(child) for child in module.children())
        if (
            path
            and not is_plain(module)
            and (maps > 1 or (maps and any(True for _ in module.parameters(recurse=False))))
        ):
            yield path


def _runs(model: nn.Module) -> Iterator[Run]:
    """The first inputs that work for the whole, or else for the modules inside."""
    for inputs in _guesses(model):
        if _works(model, inputs):
            yield Run("", inputs)
            return
    for path, module in model.named_modules():
        if path and any(is_plain(child) for child in module.children()):
            found = next((inputs for inputs in _guesses(module) if _works(module, inputs)), None)
            if found is not None:
                yield Run(path, found)


def _guesses(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    parameters = inspect.signature(module.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
    if not needed:
        return
    generator = torch.Generator().manual_seed(0)

    def given(make: Any) -> dict[str, torch.Tensor]:
        return {name: make() for name in needed}

    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if tables:
        yield given(lambda: torch.randint(0, min(tables), (SAMPLES, TOKENS), generator=generator))
    widths = Counter(
        int(size)
        for child in module.modules()
        for size in (getattr(child, "in_features", None), *getattr(child, "normalized_shape", ())[-1:])
        if isinstance(size, int)
    )
    for width, _ in widths.most_common():
        yield given(lambda width=width: torch.randn(SAMPLES, TOKENS, width, generator=generator).double())
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            height, across = (SIDE * size for size in child.kernel_size)
            shape = (SAMPLES, child.in_channels, height, across)
            yield given(lambda shape=shape: torch.randn(shape, generator=generator).double())
            break


def _works(module: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            module(**inputs)
    except Exception:  # a guess that was wrong
        return False
    return True
