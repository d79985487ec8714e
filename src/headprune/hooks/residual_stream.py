"""The residual stream at a site: the tensor that the output of its output map is added to.

The structure of a model does not say where that is, so the additions of a forward pass are intercepted: the other
operand of the one that takes the output is the stream. Where something lies between them (a norm, a scale), there is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.hooks.attach import AnySite, hooks

ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@contextmanager
def streams(model: nn.Module, sites: Sequence[AnySite], see: Callable[[AnySite, torch.Tensor], None]) -> Iterator[None]:
    """Call back with the residual stream that the output of each site is added to, application after application."""
    additions = _Additions(see)

    def site_output(site: AnySite) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            additions.last_output = (site, output)

        return record

    pairs = [(model.get_submodule(site.o), site_output(site)) for site in sites]
    with hooks(pairs), additions:
        yield


class _Additions(TorchDispatchMode):
    """Compares the operands of additions with the last output of a site."""

    def __init__(self, see: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.see = see
        self.last_output: tuple[Any, torch.Tensor] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.last_output is not None and function in ADDITIONS and not (kwargs or {}).get("alpha"):
            site, output = self.last_output
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                if _same_memory(one, output) and isinstance(other, torch.Tensor) and other.shape == output.shape:
                    self.last_output = None
                    self.see(site, other.detach().clone())
                    break
        return function(*args, **(kwargs or {}))


def _same_memory(value: Any, output: torch.Tensor) -> bool:
    """Whether both have the same memory; dropout in eval mode returns its input, and views count too."""
    return isinstance(value, torch.Tensor) and value.shape == output.shape and value.data_ptr() == output.data_ptr()
