"""Which units of one site leave: by criteria that ask for nothing but what the site is given, and its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from headprune.criteria import Criterion
from headprune.criteria.columns import ColumnCriterion
from headprune.criteria.elimination import Elimination
from headprune.criteria.elimination_math import eliminate
from headprune.criteria.scoring_pass import finite, only
from headprune.errors import NonFiniteError, ScheduleError
from headprune.layerwise.site_tokens import SiteInputs
from headprune.search.selection import ranked
from headprune.signals.columns import Columns, add_columns, output_weight
from headprune.signals.moments import Gathering
from headprune.units import Member, Site, kept_mask, nan_scores

WIDE = 2048  # columns beyond which sums are kept in float32: in float64 they would be larger than the layer


def precision_for(site: Site) -> torch.dtype:
    """The precision of sums over the columns of a site."""
    return torch.float64 if site.size * site.width <= WIDE else torch.float32


def check_local(criterion: Criterion) -> None:
    """Refuse a criterion that needs a backward pass or the whole model."""
    column = isinstance(criterion, ColumnCriterion)
    if not criterion.asks or column or (isinstance(criterion, Elimination) and criterion.metric == "output"):
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
    """The members of so many units, least important first, on what reaches the site now."""
    if count <= 0:
        return []
    if count >= len(site.units()):
        return [member for unit in site.units() for member in unit]
    if isinstance(criterion, Elimination):
        return _eliminated(criterion, model, site, inputs, count)
    if isinstance(criterion, ColumnCriterion):
        found: dict[int, Columns] = {}
        for seen in inputs.at(site):
            add_columns(found, site, seen.columns)
        scores = nan_scores(sites)
        own = criterion.score_site(model, site, found[site.index]) if found else 0.0  # nothing but padding comes here
        scores[site.index, list(site.kept)] = own
    else:
        scores = criterion.from_weights(model, only(sites, [site]))
    here = only(sites, [site])
    scores = finite(criterion, scores, kept_mask(here), here)
    return [member for _, unit in ranked(scores, site)[:count] for member in unit]


def _eliminated(
    criterion: Elimination, model: PreTrainedModel, site: Site, inputs: SiteInputs, count: int
) -> list[Member]:
    """Backward elimination on the second moments of what the site is given."""
    units = site.units()
    for kind in dict.fromkeys((precision_for(site), torch.float64)):
        try:
            gone = _order(criterion, model, site, inputs, count, kind)
        except torch.linalg.LinAlgError:  # sums in float32 may say that something is less than nothing
            if kind == torch.float64:
                raise
            continue
        return [member for unit in gone for member in units[unit]]
    raise AssertionError("float64 is tried last")


def _order(
    criterion: Elimination, model: PreTrainedModel, site: Site, inputs: SiteInputs, count: int, kind: torch.dtype
) -> list[int]:
    """The numbers of the units that leave first."""
    order = torch.tensor(site.columns(range(site.size)))
    weight = output_weight(model, site)[:, order].to(kind)
    width = site.width * site.group
    gone: list[int] = []
    metric = torch.eye(len(weight), dtype=kind)
    for units, _, _ in eliminate(weight, _spread(model, site, inputs, kind), metric, width, criterion.ridge):
        gone += units
        if len(gone) >= count:
            break
    return gone[:count]


def _spread(model: PreTrainedModel, site: Site, inputs: SiteInputs, precision: torch.dtype) -> torch.Tensor:
    """E[z z^T], member after member, about the mean where the output map has a bias that can take it."""
    gathering = Gathering(precision)
    for tokens in inputs.at(site):
        gathering.add(site.index, site.split(tokens.columns).flatten(-2), tokens.samples)
    moments = gathering.moments().get(site.index)
    if moments is None:  # nothing but padding
        return torch.zeros(site.size * site.width, site.size * site.width, dtype=precision)
    centred = getattr(model.get_submodule(site.o), "bias", None) is not None
    spread = moments.covariance() if centred else moments.second()
    if not torch.isfinite(spread).all():
        raise NonFiniteError(
            f"What site {site.index} ({site.path}) is given is not finite; check the data and the precision."
        )
    return spread
