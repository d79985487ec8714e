"""Sums of criteria that are fitted to all the data before they score, over one shard of it or several.

The moments of a site are 16 bytes for each pair of its columns: 1.9 GB at 11,008 neurons. So neurons are gone over in
groups of feed-forward layers under a limit, each with two passes over the data of its own, and what is held at once is
a small multiple of the limit or of the widest layer, whichever is more. Attention, and all that fits in, takes two
passes in all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.criteria.registry import Criterion
from headprune.criteria.scoring_pass import Pass, Sums, summed
from headprune.errors import CriterionError
from headprune.signals.moments import FOLDS, Moments, added, gather
from headprune.signals.spec import Fit
from headprune.tasks import Labels, Task, batch_size
from headprune.units import Kind, Site, kept_mask, sites_of

LIMIT = 2**31  # bytes of the moments of feed-forward layers that are gathered in one pass


def only(sites: Sequence[Site], wanted: Sequence[Site]) -> list[Site]:
    """All sites, so that tables keep their rows; those that are not wanted look as if nothing were left there."""
    there = {site.index for site in wanted}
    return [site if site.index in there else dataclasses.replace(site, kept=()) for site in sites]


def asked_sites(model: PreTrainedModel, kinds: Sequence[Kind]) -> list[Site]:
    sites = list(sites_of(model, kinds))
    return only(sites, [site for site in sites if site.kind in kinds])


def can_wait(criteria: Iterable[Criterion]) -> bool:
    """Whether what these are fitted to may come after the pass that scores them, so that there is no pass before."""
    asked = {request for one in criteria for request in one.requests() if request.fitted}
    return len(asked) == 1 and all(request.waits for request in asked)  # of several, each would keep all it saw


def groups(sites: Sequence[Site]) -> list[list[Site]]:
    """The sites whose moments are gathered in one pass: attention always, feed-forward layers up to the limit."""
    result: list[list[Site]] = [[site for site in sites if site.kept and site.kind == "heads"]]
    taken = 0
    for site in sites:
        if site.kept and site.kind != "heads":
            size = FOLDS * (site.size * site.width) ** 2 * 8
            if taken and taken + size > LIMIT:
                result.append([])
                taken = 0
            result[-1].append(site)
            taken += size
    return result


@dataclass(frozen=True)
class Shard:
    """Some of the data, and all that it takes to go over it again for another fit: that of more data than these."""

    model: PreTrainedModel
    batches: Sequence[Mapping[str, Any]]
    criteria: Mapping[str, Criterion]  # the fitted ones
    task: Task
    labels: Labels
    kinds: tuple[Kind, ...]
    kept: torch.Tensor

    def sites(self) -> list[Site]:
        sites = asked_sites(self.model, self.kinds)
        if not torch.equal(kept_mask(sites), self.kept):
            raise CriterionError(
                "The model has lost heads since it was scored, so these scores cannot be merged any more."
            )
        return sites

    @property
    def samples(self) -> int:
        return sum(batch_size(batch) for batch in self.batches)

    def sums(self, sites: Sequence[Site], fit: Fit) -> Sums:
        again = Pass(self.model, sites, dict(self.criteria), self.task, self.labels, fit)
        again.over(self.batches)
        return again.sums


def fitted_sums(shards: Sequence[Shard], moments: Mapping[int, Moments] | None = None) -> Sums:
    """The sums over all shards, fitted to all of them together: to their `moments` where these are known."""
    total: Sums = {}
    sites = shards[0].sites()
    parts = groups(sites) if moments is None else [[site for site in sites if site.kept]]
    for part in parts:
        fit = Fit(_gathered(shards, part) if moments is None else moments)
        own = only(sites, part)
        rows = kept_mask(own).any(-1, keepdim=True)
        for name, sums in summed([shard.sums(own, fit) for shard in shards]).items():
            known = total.setdefault(name, sums)
            total[name] = {key: torch.where(rows, value, known[key]) for key, value in sums.items()}
    return total


def _gathered(shards: Sequence[Shard], sites: Sequence[Site]) -> dict[int, Moments]:
    first, *others = shards
    found = gather(first.model, sites, first.batches, first.task)
    samples = first.samples
    for shard in others:
        found = added(found, gather(shard.model, sites, shard.batches, shard.task), samples)
        samples += shard.samples
    return found
