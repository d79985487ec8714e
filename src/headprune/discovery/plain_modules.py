"""Discovery for modules that are no transformers models: on a copy with random weights, with inputs guessed from the
layers."""

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
from headprune.units.linear import is_plain, refuse_computed
from headprune.units.slicing.record import dense_layout, keep_dense_layout

SAMPLES, TOKENS, SIDE = 2, 7, 4


def discover_module(model: nn.Module) -> Discovery:
    """The attention sites of this module, measured on a copy before any head is removed."""
    discovery: Discovery | None = dense_layout(model, "attention")
    if discovery is None:
        twin, runs = twin_of_module(model)
        likely = attention_modules(twin)
        order = [path for path, _ in twin.named_modules()]
        result = discover_sites(twin, runs, sorted({*likely, *_mixers(twin)}, key=order.index))
        skipped = tuple(pair for pair in result.left if pair[0] in likely)  # the other paths were only guesses
        discovery = Discovery(result.sites, skipped)
        keep_dense_layout(model, "attention", discovery)
    return discovery


def twin_of_module(model: nn.Module) -> tuple[nn.Module, list[Run]]:
    """A copy of the module with random weights, and inputs that it runs on."""
    for path, module in model.named_modules():
        if is_plain(module):
            refuse_computed(module, path)  # which could not be copied either
    twin = copy.deepcopy(model).cpu().double().eval()
    expose(twin)
    randomise(twin, 0)
    runs = list(_runs(twin))
    if not runs:
        raise DiscoveryError(f"{type(model).__name__} runs on none of the inputs that were guessed from its layers")
    return twin, runs


def _mixers(model: nn.Module) -> Iterator[str]:
    """Modules with several linear maps, or one and direct parameters, whatever their class names."""
    for path, module in model.named_modules():
        maps = sum(is_plain(child) for child in module.children())
        if (
            path
            and not is_plain(module)
            and (maps > 1 or (maps and any(True for _ in module.parameters(recurse=False))))
        ):
            yield path


def _runs(model: nn.Module) -> Iterator[Run]:
    """The first inputs that work for the whole module, or else for submodules."""
    for inputs in _guesses(model):
        if _works(model, inputs):
            yield Run("", inputs)
            return
    for path, module in model.named_modules():
        if path and any(is_plain(child) for child in module.children()):
            working = next((inputs for inputs in _guesses(module) if _works(module, inputs)), None)
            if working is not None:
                yield Run(path, working)


def _guesses(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    parameters = inspect.signature(module.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
    if not names:
        return
    generator = torch.Generator().manual_seed(0)

    def inputs(make: Any) -> dict[str, torch.Tensor]:
        return {name: make() for name in names}

    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if tables:
        yield inputs(lambda: torch.randint(0, min(tables), (SAMPLES, TOKENS), generator=generator))
    widths = Counter(
        int(size)
        for child in module.modules()
        for size in (getattr(child, "in_features", None), *getattr(child, "normalized_shape", ())[-1:])
        if isinstance(size, int)
    )
    for width, _ in widths.most_common():
        yield inputs(lambda width=width: torch.randn(SAMPLES, TOKENS, width, generator=generator).double())
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            height, across = (SIDE * size for size in child.kernel_size)
            shape = (SAMPLES, child.in_channels, height, across)
            yield inputs(lambda shape=shape: torch.randn(shape, generator=generator).double())
            break


def _works(module: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            module(**inputs)
    except Exception:  # the guess does not fit
        return False
    return True
