"""The residual stream as a site meets it: what the output of an output map is added to.

Nothing says in a model's structure where that is; so the additions of a forward pass are watched, and the one that
takes what an output map just gave names the stream. Where something lies between them (a norm, a scale), there is none.
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
    """Call back with the stream that each site's output is added to, application after application."""
    watching = _Additions(see)

    def given(site: AnySite) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            watching.given = (site, output)

        return note

    pairs = [(model.get_submodule(site.o), given(site)) for site in sites]
    with hooks(pairs), watching:
        yield


class _Additions(TorchDispatchMode):
    """Looks at additions only, and at the output that was given last only."""

    def __init__(self, see: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.see = see
        self.given: tuple[Any, torch.Tensor] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.given is not None and function in ADDITIONS and not (kwargs or {}).get("alpha"):
            site, output = self.given
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                if _is(one, output) and isinstance(other, torch.Tensor) and other.shape == output.shape:
                    self.given = None
                    self.see(site, other.detach().clone())
                    break
        return function(*args, **(kwargs or {}))


def _is(value: Any, output: torch.Tensor) -> bool:
    """The same numbers in memory; dropout gives what it is given when a model is evaluated, and views are as good."""
    return isinstance(value, torch.Tensor) and value.shape == output.shape and value.data_ptr() == output.data_ptr()
