"""The tokens of one site after the other, front to back, while each site may change once it has been looked at.

The batches wait in front of the layer of the last site, so a site costs a pass as far as itself in that layer. Where
a model cannot be walked through layer by layer, every site costs a pass of the model as far as itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.hooks.calls import UnfollowableError
from headprune.hooks.paths import layer_path
from headprune.layerwise.site_tokens import SiteTokens
from headprune.layerwise.walker import Walker
from headprune.tasks import Task, own_batches
from headprune.units import Site


class SitePasses:
    """Passes over the batches of this process. Asked for sites in the order in which they run, it walks; a model that
    runs otherwise, or that is known not to be `walkable`, is run as a whole."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        *,
        walkable: bool = True,
    ) -> None:
        self.model, self.sites, self.task = model, sites, task
        self.batches = list(own_batches(batches))
        self.walker = self._walker(walkable)

    def _walker(self, walkable: bool) -> Walker:
        return Walker(
            self.model,
            self.sites,
            [own.batch for own in self.batches],
            self.task,
            first_samples=[own.first for own in self.batches],
            which=("pruned",),
            stacks=None if walkable else {},
        )

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        """The tokens of this site in the model as it is now, batch after batch, all applications after one another."""
        if self.batches:  # of several processes one may have none
            try:
                walked = self._walk_to(layer_path(site.path))
            except UnfollowableError:
                walked = False
            if not walked:
                self.walker = self._walker(walkable=False)
        return self.walker.at(site, streams=streams)

    def _walk_to(self, path: str) -> bool:
        """Whether the walker now stands at this layer or, for what is in no layer, between two stacks."""
        walker = self.walker
        while walker.current is None or walker.current.path != path:
            if walker.current is not None:
                walker.advance(walker.current, "pruned")
                walker.leave()
            if not walker.is_ahead(path):
                return walker.between_stacks and not walker.is_done(path)
            if not walker.enter():
                return False
        return True
