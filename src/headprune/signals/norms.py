"""L2 norms of what a head puts out, and of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.hooks.offload import stored
from headprune.signals.spec import Meter, Request, View
from headprune.units import Kind, Site, nan_scores
from headprune.units.linear import is_transposed


def weight_norms(model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
    """[sites x members]: the L2 norm of each member's rows of all maps before it and columns of the output map, without
    biases."""
    norms = nan_scores(sites)
    for site in sites:
        if not site.kept:
            continue
        squares = torch.zeros(site.size, dtype=torch.float64)
        for axis in site.roles.values():
            rows = axis.split(_weight(model, axis.module, outputs_last=True))
            squares += site.by_member(axis, rows.square().sum(dim=(0, 2)))
        columns = site.split(_weight(model, site.o, outputs_last=False))
        squares += columns.square().sum(dim=(0, 2))
        norms[site.index, list(site.kept)] = squares.sqrt()
    return norms


def _weight(model: PreTrainedModel, path: str, *, outputs_last: bool) -> torch.Tensor:
    module: Any = model.get_submodule(path)
    weight = stored(module).detach().double().cpu()
    return weight if is_transposed(module) == outputs_last else weight.T


@dataclass(frozen=True)
class WeightNorms(Request):
    """The norm of each member's weights, the same for every sample: for criteria that combine it with what data say."""

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")

    def meter(self, view: View) -> Meter:
        return _WeightMeter(self, view)


class _WeightMeter(Meter):
    def answer(self) -> torch.Tensor:
        norms = weight_norms(self.view.model, self.view.sites)
        return norms.expand(self.view.size, *norms.shape)


@dataclass(frozen=True)
class OutputNorms(Request):
    """The root of the mean over a sample's real tokens of the squared L2 norm of each member's output."""

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")

    def meter(self, view: View) -> Meter:
        return _OutputMeter(self, view)


class _OutputMeter(Meter):
    def __init__(self, request: OutputNorms, view: View) -> None:
        super().__init__(request, view)
        self.squares = view.blank()

    def output(self, site: Site, columns: torch.Tensor) -> None:
        values = self.view.per_sample(columns, site)
        squares = site.split(widened(values).square()).sum(-1)
        real = self.view.real(site, values.shape[1])
        if real is not None:
            squares = squares.where(real[..., None].to(squares.device), squares.new_zeros(()))
        tokens = self.view.token_counts(site, values.shape[1]).to(squares.device)
        self.squares[:, site.index, list(site.kept)] += (squares.sum(1) / tokens).to(self.squares)

    def answer(self) -> torch.Tensor:
        return self.squares.sqrt()
