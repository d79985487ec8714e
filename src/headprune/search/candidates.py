"""The sites that a run may prune: those that its calibration data reaches, or those that its config names."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from headprune.errors import DataError, ScheduleError, UnsupportedModelError
from headprune.search.config import PruneConfig
from headprune.signals.reached_sites import named_sites, unreached_sites
from headprune.tasks import Task
from headprune.units import Site, sites_of, survey

UNREACHED = "no calibration sample reaches it"
NOT_NAMED = "it is not among the sites to prune"
FIX = "give data that does, or name the sites to prune with --sites, sites= in Python"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """Which sites stay whole in a run, and why: by their numbers, whatever else is removed from the model."""

    obstacles: Mapping[int, str] = field(default_factory=dict)
    unreached: Mapping[int, str] = field(default_factory=dict)  # of these, what the data does not reach: their paths

    def among(self, sites: Sequence[Site]) -> list[Site]:
        """The sites, with an obstacle at those that stay whole."""
        return [replace(site, obstacle=site.obstacle or self.obstacles.get(site.index, "")) for site in sites]


def sites_and_candidates(
    model: PreTrainedModel, config: PruneConfig, batches: Iterable[Mapping[str, Any]], task: Task
) -> tuple[Sequence[Site], Candidates]:
    """The sites of the dense model, and which of them a run may prune; warns of those that stay whole, and raises where
    nothing can be removed."""
    surveyed = survey(model)
    if surveyed.left and "heads" in config.units:
        reasons = "; ".join(surveyed.left_whole())
        log.warning("Some attention modules are not pruned, as their heads cannot be removed exactly: %s.", reasons)
    sites = sites_of(model, config.units)
    check_named_sites(config, sites)
    pruned = [site for site in sites if site.kind in config.units]
    unreached = {site.index for site in unreached_sites(model, pruned, batches, task)}
    candidates = candidates_of(config, sites, unreached)
    _refuse_no_candidates(candidates.among(sites), config)
    warn_unreached([sites[index] for index in candidates.unreached])
    return sites, candidates


def candidates_of(config: PruneConfig, sites: Sequence[Site], unreached: Collection[int]) -> Candidates:
    """The candidates where no sample reaches these sites. Such a site has no score, so it stays whole; if it is named
    as one to prune, a criterion that needs data is refused."""
    missing = [site for site in sites if site.index in unreached]
    if config.sites is None:
        obstacles = {site.index: UNREACHED for site in missing}
    else:
        named = [site for site in missing if site.index in config.sites]
        if named and config.criterion.all_requests:
            raise DataError(
                f"No calibration sample reaches {named_sites(named)}, so {config.criterion} has no score there; give "
                "data that does, or use a criterion of the weights, such as magnitude."
            )
        obstacles = {site.index: NOT_NAMED for site in sites if site.index not in config.sites}
        missing = []
    return Candidates(obstacles, {site.index: site.path for site in missing})


def check_named_sites(config: PruneConfig, sites: Sequence[Site]) -> None:
    """Refuse numbers of sites that the model does not have, or that have no units of the kinds to prune."""
    for index in config.sites or ():
        if index >= len(sites):
            raise ScheduleError(f"There is no site {index}: the model has sites 0 to {len(sites) - 1}.")
        if sites[index].kind not in config.units:
            raise ScheduleError(
                f"Site {index} ({sites[index].path}) has {sites[index].kind}, and {', '.join(config.units)} are "
                f"pruned; leave it out, or prune {sites[index].kind} too (--units heads,neurons)."
            )


def _refuse_no_candidates(sites: Sequence[Site], config: PruneConfig) -> None:
    """Raise where no unit can be removed; `sites` are those with obstacles."""
    present = [site for site in sites if site.kept and site.kind in config.units and site.obstacle != NOT_NAMED]
    if not present or not all(site.obstacle for site in present):
        return
    first = present[0]
    if first.obstacle == UNREACHED:
        raise DataError(
            f"No calibration sample reaches {named_sites(present)}, so there is nothing to prune; give data that does."
        )
    raise UnsupportedModelError(
        f"No {first.word} of this model can be removed exactly: at {first.path}, {first.obstacle}."
    )


def training_candidates(
    model: PreTrainedModel, sites: Sequence[Site], batches: Iterable[Mapping[str, Any]], task: Task
) -> Candidates:
    """The candidates of gates that learn on these batches; raises where there are none."""
    possible = [site for site in sites if site.kept and not site.obstacle]
    missing = unreached_sites(model, possible, batches, task)
    if missing and len(missing) == len(possible):
        raise DataError(
            f"No training sample reaches {named_sites(missing)}, so there is nothing to prune; train on data that does."
        )
    warn_unreached(missing, "training", "train on data that does")
    obstacles = {site.index: "no training sample reaches it" for site in missing}
    return Candidates(obstacles, {site.index: site.path for site in missing})


def warn_unreached(sites: Sequence[Site], samples: str = "calibration", fix: str = FIX) -> None:
    """Name the sites that no sample reaches."""
    if sites:
        log.warning("No %s sample reaches %s, so nothing is removed there; %s.", samples, named_sites(sites), fix)
