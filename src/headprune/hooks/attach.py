"""Registers hooks on modules and tensors, and removes them again: all hooks of the package are registered here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class HookedSite(Protocol):
    """The part of a site that hooks use."""

    @property
    def index(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def o(self) -> str:
        """The path of its output linear map."""

    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def original(self) -> int:
        """How many members there were."""

    @property
    def applications(self) -> int: ...
    @property
    def producing_maps(self) -> Sequence[str]:
        """The paths of the linear maps whose outputs become its members, each once."""

    def split(self, columns: torch.Tensor) -> torch.Tensor: ...
    def join(self, members: torch.Tensor) -> torch.Tensor: ...


AnySite = TypeVar("AnySite", bound=HookedSite)


def attach_hook(
    module: nn.Module,
    hook: Callable[..., Any],
    *,
    before: bool = False,
    first: bool = False,
    with_kwargs: bool = False,
) -> RemovableHandle:
    """A forward hook (or, `before`, forward pre-hook) that stays until its handle is removed.

    A `first` hook runs before those that are there already, such as the gates of an enclosing block.
    """
    attach = module.register_forward_pre_hook if before else module.register_forward_hook
    return attach(hook, prepend=first, with_kwargs=with_kwargs)


@contextmanager
def hooks(
    pairs: Sequence[tuple[nn.Module, Callable[..., Any]]],
    *,
    before: bool = False,
    first: bool = False,
    with_kwargs: bool = False,
) -> Iterator[None]:
    """One hook per module within a block."""
    with ExitStack() as stack:
        for module, hook in pairs:
            stack.callback(attach_hook(module, hook, before=before, first=first, with_kwargs=with_kwargs).remove)
        yield


def at_gradient(tensor: torch.Tensor, callback: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """Call back with the gradient of a tensor in the backward pass."""
    return tensor.register_hook(callback)


def after_accumulation(parameter: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call back with a parameter whenever a gradient has been accumulated into its `grad`."""
    return parameter.register_post_accumulate_grad_hook(callback)
