"""Gates on what the members of a site give: as a context manager, or as a module that stays and may train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from headprune.errors import GateError
from headprune.hooks.watch import hooks
from headprune.units import Site, resolve, widest
from headprune.units.offload import input_device

Own = TypeVar("Own", bound="Installed")


@contextmanager
def gated(model: nn.Module, gates: torch.Tensor, *, sites: Sequence[Site] | None = None) -> Iterator[None]:
    """Multiply the output of every head, before the output projection, by its gate.

    `gates` is [sites x heads], or [batch x sites x heads] for a row of gates per sample, in original head ids; the
    positions of removed heads are not looked at. A gate of 1 leaves the output as it is, bit for bit. With the
    `sites` of `all_sites(model)` the table has rows for neurons, too.
    """
    sites = resolve(model) if sites is None else sites
    check_gates(gates, sites)
    pairs = [(model.get_submodule(site.o), _Gate(site, _row_of(gates, site))) for site in sites if site.kept]
    with hooks(pairs, before=True):
        yield


class Installed(nn.Module):
    """What stays on a model and multiplies the outputs of members until it is taken off; subclasses say by what."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it does not become a submodule
        self.sites = sites
        self._handles: list[Any] = []

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def forward(self, site: Site) -> torch.Tensor:
        """What multiplies the members of this site, by their original ids."""
        raise NotImplementedError

    def attach(self: Own) -> Own:
        """Install the gates; the model computes with them from now on."""
        if self.attached:
            raise GateError("These gates are on the model already; detach them first.")
        for site in self.sites:
            if site.kept:
                hook = _Gate(site, functools.partial(self, site))
                self._handles.append(self.model.get_submodule(site.o).register_forward_pre_hook(hook))
        return self

    def detach(self) -> None:
        """Take the gates off; the model computes as it did without them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Gates(Installed):
    """Gates that stay on a model until they are taken off, one value per member of every site.

        gates = headprune.Gates(model, trainable=True)
        gates.attach()
        optimizer = torch.optim.AdamW([*model.parameters(), *gates.parameters()])
        ...
        gates.detach()

    The values are parameters if `trainable`, buffers otherwise; they start at 1, or at `values` [sites x members].
    Those of neurons come with the `sites` of `all_sites(model)`. The model is not a part of this module, so its
    parameters are its own. Gates that learn to close are `LearnedGates`.
    """

    values: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        values: torch.Tensor | None = None,
        *,
        trainable: bool = False,
        sites: Sequence[Site] | None = None,
    ) -> None:
        super().__init__(model, resolve(model) if sites is None else sites)
        parameter = next(model.parameters())
        start = torch.ones(len(self.sites), widest(self.sites)) if values is None else values.detach().clone()
        check_gates(start, self.sites)
        if start.dim() != 2:
            raise GateError("Gates that stay are [sites x heads], the same for every sample.")
        start = start.to(input_device(model), parameter.dtype)
        if trainable:
            self.values = nn.Parameter(start)
        else:
            self.register_buffer("values", start)

    def forward(self, site: Site) -> torch.Tensor:
        """What multiplies the members of this site, [members]; a subclass may draw them."""
        return self.values[site.index]


def check_gates(gates: torch.Tensor, sites: Sequence[Site]) -> None:
    wanted = (len(sites), widest(sites))
    if not isinstance(gates, torch.Tensor) or not gates.is_floating_point():
        raise GateError(f"Gates must be a floating-point tensor of shape {list(wanted)}, not {_describe(gates)}.")
    if gates.dim() not in (2, 3) or tuple(gates.shape[-2:]) != wanted:
        raise GateError(
            f"Gates must have shape {list(wanted)} (sites x heads), or one such row per sample, not "
            f"{list(gates.shape)}."
        )


def _describe(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _row_of(gates: torch.Tensor, site: Site) -> Callable[[], torch.Tensor]:
    return lambda: gates.select(-2, site.index)


class _Gate:
    """A pre-hook of the output map that multiplies the columns of each member by its gate. An object and no closure: a
    copy of a model takes its own gates along."""

    def __init__(self, site: Site, row: Callable[[], torch.Tensor]) -> None:
        self.site, self.row, self.kept = site, row, torch.tensor(site.kept)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs, *rest = args
        own = self.row()
        own = own.index_select(-1, self.kept.to(own.device)).to(outputs)
        if own.dim() == 2:
            if outputs.shape[0] != own.shape[0]:
                raise GateError(
                    f"There are gates for {own.shape[0]} samples, but {self.site.path} sees a batch of "
                    f"{outputs.shape[0]}."
                )
            own = own.view(own.shape[0], *(1,) * (outputs.dim() - 2), own.shape[1])
        return (self.site.join(self.site.split(outputs) * own.unsqueeze(-1)), *rest)
