"""How many units every site keeps, decided before anything is removed: the same share everywhere, or by estimated
errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.site_activations import site_callbacks
from headprune.layerwise.walker import Layer, Walker
from headprune.search.budget import Prices, units
from headprune.search.config import PruneConfig
from headprune.search.selection import choose
from headprune.signals.column_statistics import Columns, add_columns
from headprune.signals.moments import real_outputs
from headprune.units import Site, by_site, nan_scores
from headprune.units.linear import is_transposed


def widths(
    config: PruneConfig, sites: Sequence[Site], prices_of_sites: Prices, target: float, errors: torch.Tensor | None
) -> dict[int, int]:
    """site -> units to keep, so that the price of the model is at most `target`; `errors` are those of `errors_of`."""
    chosen = choose(
        nan_scores(sites).fill_(1.0) if errors is None else errors,
        sites,
        prices_of_sites,
        target,
        kinds=config.units,
        round_to=config.round_to,
        min_per_site=config.min_per_site,
        widths=config.widths,
    )
    ids_by_site = by_site(chosen)
    return {site.index: units(site) - len(ids_by_site.get(site.index, ())) // site.group for site in sites}


def errors_of(walker: Walker, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
    """The change of a site's output without each member, relative to the residual stream: the variance of its columns
    times their squared weights. NaN at sites that do not run on this data. Takes one pass, layer after layer."""
    scores = nan_scores(sites)
    for layer in walker.layers():
        statistics = _LayerStatistics(walker, layer)
        with site_callbacks(model, layer.sites, output=statistics.add_inputs):
            walker.advance(
                layer,
                "pruned",
                before=statistics.start_batch,
                after=statistics.add_output,
                phase="estimating errors of",
            )
        for site in layer.sites:
            if site.kept and site.index in statistics.columns_by_site:
                errors_of_site = _member_errors(model, site, statistics.columns_by_site[site.index])
                scores[site.index, list(site.kept)] = errors_of_site / statistics.power
    return scores


def _member_errors(model: PreTrainedModel, site: Site, statistics: Columns) -> torch.Tensor:
    output: Any = model.get_submodule(site.o)
    dim = 1 if is_transposed(output) else 0
    weight = torch.linalg.vector_norm(output.weight.detach(), dim=dim, dtype=torch.float64).square().cpu()
    column_power = statistics.mean_square if output.bias is None else statistics.variance
    return site.split(weight * column_power).sum(-1)


class _LayerStatistics:
    """Statistics of one layer: of the input columns of its sites, and the mean square of its output."""

    def __init__(self, walker: Walker, layer: Layer) -> None:
        self.walker, self.layer = walker, layer
        self.columns_by_site: dict[int, Columns] = {}
        self.batch: Mapping[str, Any] = {}
        self.total, self.tokens = 0.0, 0

    def start_batch(self, number: int) -> None:
        self.batch = self.walker.prepared(number)

    def add_inputs(self, site: Site, columns: torch.Tensor) -> None:
        add_columns(self.columns_by_site, site, real_outputs(site, self.batch, columns, self.walker.task)[0])

    def add_output(self, number: int, hidden: torch.Tensor) -> None:
        for site in self.layer.sites[:1]:  # to find the tokens that are not padding
            real, _ = real_outputs(site, self.batch, hidden, self.walker.task)
            self.total += float(real.double().square().sum())
            self.tokens += len(real)

    @property
    def power(self) -> float:
        return max(self.total / max(self.tokens, 1), 1e-300)
