"""How many units every site keeps, decided before anything is cut: the same share everywhere, or by a first cheap pass
of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.watch import watched
from headprune.layerwise.walker import Layer, Walker
from headprune.search.budget import Prices, units
from headprune.search.config import PruneConfig
from headprune.search.selection import choose
from headprune.signals.columns import Columns, add_columns
from headprune.signals.moments import real_outputs
from headprune.units import Site, by_site, nan_scores
from headprune.units.linear import is_transposed


def widths(
    config: PruneConfig, sites: Sequence[Site], known: Prices, target: float, errors: torch.Tensor | None
) -> dict[int, int]:
    """site -> units to keep, so that the model costs at most `target`; `errors` are those of the first pass."""
    chosen = choose(
        nan_scores(sites).fill_(1.0) if errors is None else errors,
        sites,
        known,
        target,
        kinds=config.units,
        round_to=config.round_to,
        min_per_site=config.min_per_site,
        widths=config.widths,
    )
    gone = by_site(chosen)
    return {site.index: units(site) - len(gone.get(site.index, ())) // site.group for site in sites}


def errors_of(walker: Walker, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
    """What the removal of every member would change of its site's output, relative to the stream that it goes into:
    the spread of its columns times their weights. NaN at sites that do not run on this data. One pass over it, layer
    after layer."""
    scores = nan_scores(sites)
    for layer in walker.layers():
        seen = _Seen(walker, layer)
        with watched(model, layer.sites, output=seen.columns):
            walker.advance(layer, "pruned", before=seen.begin, after=seen.stream)
        for site in layer.sites:
            if site.kept and site.index in seen.found:
                own = _own_errors(model, site, seen.found[site.index])
                scores[site.index, list(site.kept)] = own / seen.power
    return scores


def _own_errors(model: PreTrainedModel, site: Site, seen: Columns) -> torch.Tensor:
    output: Any = model.get_submodule(site.o)
    dim = 1 if is_transposed(output) else 0
    weight = torch.linalg.vector_norm(output.weight.detach(), dim=dim, dtype=torch.float64).square().cpu()
    moved = seen.mean_square if output.bias is None else seen.variance
    return site.split(weight * moved).sum(-1)


class _Seen:
    """What passes in one layer: the columns of its sites, and the mean square of the stream behind it."""

    def __init__(self, walker: Walker, layer: Layer) -> None:
        self.walker, self.layer = walker, layer
        self.found: dict[int, Columns] = {}
        self.batch: Mapping[str, Any] = {}
        self.total, self.tokens = 0.0, 0

    def begin(self, number: int) -> None:
        self.batch = self.walker.prepared(number)

    def columns(self, site: Site, given: torch.Tensor) -> None:
        add_columns(self.found, site, real_outputs(site, self.batch, given, self.walker.task)[0])

    def stream(self, number: int, stream: torch.Tensor) -> None:
        for site in self.layer.sites[:1]:  # which knows the tokens that are not padding
            real, _ = real_outputs(site, self.batch, stream, self.walker.task)
            self.total += float(real.double().square().sum())
            self.tokens += len(real)

    @property
    def power(self) -> float:
        return max(self.total / max(self.tokens, 1), 1e-300)
