"""Means and squares of every input column of output maps, which are enough for some criteria.

Full second moments of a feed-forward layer are the square of its width; these are twice its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.offload import stored
from headprune.signals.moments import real_outputs
from headprune.signals.spec import SiteMeter, SiteRequest, View
from headprune.units import Site
from headprune.units.linear import is_transposed


@dataclass
class Columns:
    """Sums over real tokens about a fixed `shift`, which keeps a large mean with a small spread exact."""

    shift: torch.Tensor  # [width]
    total: torch.Tensor  # [width]
    squares: torch.Tensor  # [width]
    tokens: int = 0

    def add(self, values: torch.Tensor) -> None:
        centred = values.double().cpu() - self.shift
        self.total += centred.sum(0)
        self.squares += centred.square().sum(0)
        self.tokens += len(values)

    def __len__(self) -> int:
        return self.tokens

    def __add__(self, other: Columns) -> Columns:
        """Sums over these tokens and others."""
        other = other._about(self.shift)
        return Columns(self.shift, self.total + other.total, self.squares + other.squares, self.tokens + other.tokens)

    def _about(self, shift: torch.Tensor) -> Columns:
        """The same sums about another point."""
        away = self.shift - shift
        squares = self.squares + 2 * away * self.total + self.tokens * away.square()
        return Columns(shift, self.total + self.tokens * away, squares, self.tokens)

    @property
    def variance(self) -> torch.Tensor:
        mean = self.total / self.tokens
        return (self.squares / self.tokens - mean.square()).clamp_min(0)

    @property
    def mean_square(self) -> torch.Tensor:
        return self.variance + (self.shift + self.total / self.tokens).square()


def add_columns(sums: dict[int, Columns], site: Site, tokens: torch.Tensor) -> None:
    """Sums of every column over real tokens [tokens x columns]."""
    if len(tokens):
        if site.index not in sums:
            shift = tokens.double().mean(0).cpu()
            sums[site.index] = Columns(shift, torch.zeros_like(shift), torch.zeros_like(shift))
        sums[site.index].add(tokens)


@dataclass(frozen=True)
class ColumnRequest(SiteRequest):
    """Means and squares of the columns of sites; padding is left out, applications of a tied site are pooled."""

    def bytes_per_token(self, model: PreTrainedModel, site: Site) -> int:
        return 0

    def meter(self, view: View) -> SiteMeter:
        return _ColumnMeter(self, view)


class _ColumnMeter(SiteMeter):
    def output(self, site: Site, columns: torch.Tensor) -> None:
        if site.index in self.request.sites:
            add_columns(self.gathered, site, real_outputs(site, self.view.batch, columns, self.view.task)[0])


def output_weight(model: PreTrainedModel, site: Site) -> torch.Tensor:
    """The output map of a site, [out x in], in float64."""
    output: Any = model.get_submodule(site.o)
    weight: torch.Tensor = stored(output).detach().double().cpu()
    return weight.t() if is_transposed(output) else weight
