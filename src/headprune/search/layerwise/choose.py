"""Chooses the units of one site to remove, by criteria that need only the inputs of the site and its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from headprune.criteria import Criterion
from headprune.criteria.column_criteria import ColumnCriterion
from headprune.criteria.elimination import Elimination
from headprune.criteria.elimination_math import eliminate
from headprune.criteria.scoring_pass import finite, only
from headprune.errors import NonFiniteError, ScheduleError
from headprune.layerwise.site_inputs import SiteInputs
from headprune.search.selection import ranked
from headprune.signals.column_statistics import Columns, add_columns, output_weight
from headprune.signals.moments import Gathering
from headprune.units import Member, Site, kept_mask, nan_scores

WIDE = 2048  # columns beyond which sums are in float32: in float64 they would be larger than the layer


def precision_for(site: Site) -> torch.dtype:
    """The precision of sums over the columns of a site."""
    return torch.float64 if site.size * site.width <= WIDE else torch.float32


def check_local(criterion: Criterion) -> None:
    """Refuse a criterion that needs a backward pass or the whole model."""
    column = isinstance(criterion, ColumnCriterion)
    if not criterion.all_requests or column or (isinstance(criterion, Elimination) and criterion.metric == "output"):
        return
    raise ScheduleError(
        f"The layer-wise schedule has one layer at a time and no backward pass, which {criterion} needs; use "
        "elimination(metric=output), fluctuation, wanda or magnitude, or --schedule rounds."
    )


def choose_units(
    criterion: Criterion,
    model: PreTrainedModel,
    sites: Sequence[Site],
    site: Site,
    inputs: SiteInputs,
    count: int,
) -> list[Member]:
    """The members of `count` units, least important first, on the current inputs of the site."""
    if count <= 0:
        return []
    if count >= len(site.units()):
        return [member for unit in site.units() for member in unit]
    if isinstance(criterion, Elimination):
        return _by_elimination(criterion, model, site, inputs, count)
    if isinstance(criterion, ColumnCriterion):
        sums: dict[int, Columns] = {}
        for tokens in inputs.at(site):
            add_columns(sums, site, tokens.columns)
        scores = nan_scores(sites)
        # Without sums there was nothing but padding.
        site_scores = criterion.score_site(model, site, sums[site.index]) if sums else 0.0
        scores[site.index, list(site.kept)] = site_scores
    else:
        scores = criterion.from_weights(model, only(sites, [site]))
    sites_here = only(sites, [site])
    scores = finite(criterion, scores, kept_mask(sites_here), sites_here)
    return [member for _, unit in ranked(scores, site)[:count] for member in unit]


def _by_elimination(
    criterion: Elimination, model: PreTrainedModel, site: Site, inputs: SiteInputs, count: int
) -> list[Member]:
    """Backward elimination on the second moments of the inputs of the site."""
    units = site.units()
    for precision in dict.fromkeys((precision_for(site), torch.float64)):
        try:
            order = _elimination_order(criterion, model, site, inputs, count, precision)
        except torch.linalg.LinAlgError:  # sums in float32 may not be positive definite
            if precision == torch.float64:
                raise
            continue
        return [member for unit in order for member in units[unit]]
    raise AssertionError("float64 is tried last")


def _elimination_order(
    criterion: Elimination, model: PreTrainedModel, site: Site, inputs: SiteInputs, count: int, precision: torch.dtype
) -> list[int]:
    """The numbers of the units that are removed first."""
    columns = torch.tensor(site.columns(range(site.size)))
    weight = output_weight(model, site)[:, columns].to(precision)
    width = site.width * site.group
    order: list[int] = []
    metric = torch.eye(len(weight), dtype=precision)
    for units, _, _ in eliminate(
        weight, _second_moments(model, site, inputs, precision), metric, width, criterion.ridge
    ):
        order += units
        if len(order) >= count:
            break
    return order[:count]


def _second_moments(model: PreTrainedModel, site: Site, inputs: SiteInputs, precision: torch.dtype) -> torch.Tensor:
    """E[z z^T], member after member, centred where the output map has a bias that can absorb the mean."""
    gathering = Gathering(precision, folds=1)
    for tokens in inputs.at(site):
        gathering.add(site.index, site.split(tokens.columns).flatten(-2), tokens.samples)
    moments = gathering.moments().get(site.index)
    if moments is None:  # nothing but padding
        return torch.zeros(site.size * site.width, site.size * site.width, dtype=precision)
    centred = getattr(model.get_submodule(site.o), "bias", None) is not None
    second_moments = moments.covariance() if centred else moments.second()
    if not torch.isfinite(second_moments).all():
        raise NonFiniteError(
            f"The inputs of site {site.index} ({site.path}) are not finite; check the data and the precision."
        )
    return second_moments
