"""The tokens of one site after the other, front to back, where each site may be changed after its tokens were read.

The hidden states in front of the current layer are kept, so a site costs a pass through its layer up to the site. Where
a model cannot run layer by layer, every site costs a pass of the model up to the site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.hooks.layer_calls import NotLayerwiseError
from headprune.hooks.module_paths import layer_path
from headprune.layerwise.site_inputs import SiteTokens
from headprune.layerwise.walker import Walker
from headprune.tasks import Task, own_batches
from headprune.units import Site


class SitePasses:
    """Passes over the batches of this process. Sites requested in the order in which they run take passes through
    layers; otherwise, or where the model is not `walkable`, the whole model runs."""

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
            [each.batch for each in self.batches],
            self.task,
            first_samples=[each.first for each in self.batches],
            which=("pruned",),
            stacks=None if walkable else {},
        )

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        """The tokens of this site in the model as it is now, batch after batch, with all applications of each."""
        if self.batches:  # one of several processes may have none
            try:
                reached = self._walk_to(layer_path(site.path))
            except NotLayerwiseError:
                reached = False
            if not reached:
                self.walker = self._walker(walkable=False)
        return self.walker.at(site, streams=streams)

    def _walk_to(self, path: str) -> bool:
        """Whether the walker could go to this layer or, for a site outside of layers, between two stacks."""
        walker = self.walker
        while walker.current is None or walker.current.path != path:
            if walker.current is not None:
                walker.advance(walker.current, "pruned")
                walker.leave()
            if not walker.is_remaining(path):
                return walker.between_stacks and not walker.is_done(path)
            if not walker.enter():
                return False
        return True
