"""Facts about a module for making inputs: numbers of its config, the arguments of its forward, sizes to try."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .config_patterns import TOKEN
from .config_tree import nodes

BATCH = 2
TOKENS = 7
SEED = 20


class Facts:
    """A module with the parameters of its forward and the values of its config, and a generator of random inputs."""

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        self.module = module
        config = getattr(module, "config", None)
        if not isinstance(config, PretrainedConfig):
            config = getattr(root, "config", None)
        self.config = config
        self.tree = list(nodes(config)) if isinstance(config, PretrainedConfig) else []
        self.generator = torch.Generator().manual_seed(SEED)
        tensors = [*module.parameters(), *module.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.dtype = next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)
        self.parameters = {
            name: parameter
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def required(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]

    def find(self, *names: str, among: str = "") -> Any:
        """The first value of one of these names: in configs whose path matches `among`, then in all configs."""
        matching = [node for node in self.tree if among and re.search(among, node.path)]
        for node in [*matching, *self.tree]:
            for name in names:
                value = getattr(node.config, name, None)
                if value is not None:
                    return value
        return None

    def number(self, *names: str, among: str = "", default: int = 0) -> int:
        value = self.find(*names, among=among)
        while isinstance(value, list | tuple) and value:
            value = value[-1]
        if isinstance(value, dict):
            value = next(iter(value.values()), default)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def ids(self, below: int, *shape: int, avoid: frozenset[int] = frozenset()) -> torch.Tensor:
        """Random ids, all different where there are enough, without those in `avoid`."""
        allowed = torch.tensor([token for token in range(min(below, 4096)) if token not in avoid] or [0])
        size = int(torch.tensor(shape).prod())
        if len(allowed) >= size:
            indices = torch.randperm(len(allowed), generator=self.generator)[:size]
        else:
            indices = torch.randint(len(allowed), (size,), generator=self.generator)
        return allowed[indices].reshape(shape).to(self.device)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.long, device=self.device)

    def special(self) -> frozenset[int]:
        return frozenset(token for node in self.tree for token in special_ids(node.old))

    def vocabulary(self, decoder: bool = False) -> int:
        rows = [count for count in self.embeddings() if count > 1]
        size = self.number("decoder_vocab_size", "tgt_vocab_size", "vocab_size", among="decoder" if decoder else "text")
        if size and (decoder or not rows):
            return size
        return min([size, *rows]) if size else min(rows, default=32)

    def embeddings(self) -> Iterator[int]:
        """The number of rows of the input embeddings, where the module has them."""
        try:
            table = self.module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError, TypeError):
            table = None
        if isinstance(getattr(table, "weight", None), torch.Tensor) and table.weight.dim() == 2:
            yield table.weight.shape[0]

    def lengths(self) -> list[int]:
        """Sequence lengths to try; first one long enough for block-sparse attention to be sparse."""
        block = self.number("block_size", "local_radius")
        lengths = [TOKENS, 16, 64]
        if self.find("attention_type") == "block_sparse" and block:
            lengths.insert(0, (6 + 2 * self.number("num_random_blocks")) * block)
        most = self.number("max_position_embeddings", "n_positions", default=1024)
        return [length for length in lengths if length <= most] or [TOKENS]


def special_ids(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if TOKEN.search(name):
            for token in value if isinstance(value, list | tuple) else [value]:
                if isinstance(token, int) and not isinstance(token, bool):
                    yield token
