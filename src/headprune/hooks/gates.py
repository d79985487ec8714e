"""Gates on the outputs of the members of a site: as a context manager, or as a module that stays and may train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from headprune.errors import GateError
from headprune.hooks.attach import HookedSite, attach_hook, hooks
from headprune.hooks.model_lock import exclusive_method
from headprune.hooks.torch_attention import expose, exposing, hide

AnyGates = TypeVar("AnyGates", bound="InstalledGates")


@contextmanager
def gate_sites(model: nn.Module, sites: Sequence[HookedSite], gates: torch.Tensor) -> Iterator[None]:
    """Multiply the outputs of the members of every site, before the output map, by their gates.

    `gates` is [sites x members], or [batch x sites x members] for a row of gates per sample, in original ids; the
    positions of removed members are ignored. A gate of 1 leaves the output as it is, bit for bit.
    """
    check_gates(gates, sites)
    pairs = [(model.get_submodule(site.o), _Gate(site, _row_of(gates, site))) for site in sites if site.kept]
    with exposing(model), hooks(pairs, before=True):
        yield


class InstalledGates(nn.Module):
    """A module that multiplies the outputs of members until it is detached; subclasses compute the factors."""

    def __init__(self, model: nn.Module, sites: Sequence[HookedSite]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it does not become a submodule
        self.sites = sites
        self._handles: list[Any] = []
        self._exposed: list[Any] = []

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def forward(self, site: HookedSite) -> torch.Tensor:
        """The factors of the members of this site, by their original ids."""
        raise NotImplementedError

    @exclusive_method
    def attach(self: AnyGates) -> AnyGates:
        """Install the gates; the model computes with them from now on."""
        if self.attached:
            raise GateError("These gates are on the model already; detach them first.")
        self._exposed = expose(self.model)
        for site in self.sites:
            if site.kept:
                hook = _Gate(site, functools.partial(self, site))
                self._handles.append(attach_hook(self.model.get_submodule(site.o), hook, before=True))
        return self

    @exclusive_method
    def detach(self) -> None:
        """Remove the gates; the model computes as it did without them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        hide(self._exposed)
        self._exposed = []


def check_gates(gates: torch.Tensor, sites: Sequence[HookedSite]) -> None:
    shape = (len(sites), max((site.original for site in sites), default=0))
    if not isinstance(gates, torch.Tensor) or not gates.is_floating_point():
        raise GateError(f"Gates must be a floating-point tensor of shape {list(shape)}, not {_describe(gates)}.")
    if gates.dim() not in (2, 3) or tuple(gates.shape[-2:]) != shape:
        raise GateError(
            f"Gates must have shape {list(shape)} (sites x heads), or one such row per sample, not {list(gates.shape)}."
        )


def _describe(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _row_of(gates: torch.Tensor, site: HookedSite) -> Callable[[], torch.Tensor]:
    return lambda: gates.select(-2, site.index)


class _Gate:
    """A pre-hook of the output map that multiplies the columns of each member by its gate. An object and no closure, so
    that a copy of a model has a copy of its gates."""

    def __init__(self, site: HookedSite, row: Callable[[], torch.Tensor]) -> None:
        self.site, self.row, self.kept = site, row, torch.tensor(site.kept)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs, *rest = args
        if not outputs.numel():  # an expert that no token is sent to
            return args
        values = self.row()
        values = values.index_select(-1, self.kept.to(values.device)).to(outputs)
        if values.dim() == 2:
            if outputs.shape[0] != values.shape[0]:
                raise GateError(
                    f"There are gates for {values.shape[0]} samples, but {self.site.path} sees a batch of "
                    f"{outputs.shape[0]}."
                )
            values = values.view(values.shape[0], *(1,) * (outputs.dim() - 2), values.shape[1])
        return (self.site.join(self.site.split(outputs) * values.unsqueeze(-1)), *rest)
