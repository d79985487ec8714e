"""Layers that a removal does not reach, with their graphs: what is scored again does not go through them again.

A unit that leaves changes its layer and what comes after it. The layers before it give what they gave, and a backward
pass may go through what they have saved for it once more; so do the moments that are fitted to what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from headprune import ranks
from headprune.hooks.outputs import evaluating
from headprune.hooks.recall import Calls, Held, Recall, remembering
from headprune.signals.spec import Fit
from headprune.units import Site

ROOM = 1 << 30  # bytes of graphs that are kept between two passes


@dataclass
class Graphs:
    """What is kept of batches that are scored again and again while units leave a model."""

    room: int = ROOM
    _known: dict[int, Calls] = field(default_factory=dict)  # by the batch's number
    _fit: Fit | None = None  # to all that the last pass saw

    def start(self, model: PreTrainedModel, sites: Sequence[Site]) -> GraphPass:
        """A pass over the batches begins. No hook may be on the model yet."""
        known, self._known = self._known, {}
        before, self._fit = self._fit, None  # a pass that does not come to its end leaves none
        layers = remembering(model, sites)
        with evaluating(model):
            held = Held(layers)
        return GraphPass(self, model, layers, held, known, before, self.room)


@dataclass
class GraphPass:
    """One pass over the batches."""

    graphs: Graphs
    model: PreTrainedModel
    layers: Sequence[tuple[str, nn.Module]]
    held: Held
    known: dict[int, Calls]
    before: Fit | None
    room: int
    computed: set[int] = field(default_factory=set)  # sites in layers that did not answer from memory everywhere

    def recall(self, number: int, listen: Callable[..., None]) -> Recall:
        """Of the batch with this number."""
        return Recall(self.known.pop(number, {}), self.room, self.held, listen)

    def keep(self, number: int, recall: Recall) -> None:
        """The batch has gone through."""
        self.graphs._known[number] = recall.calls
        self.room -= recall.bytes
        self.computed |= {site.index for site, *_ in recall.fresh}

    def forget(self, sites: Sequence[Site]) -> None:
        """A batch has gone through without memory."""
        self.computed |= {site.index for site in sites}

    def known_fit(self) -> Fit:
        """What was fitted to sites that gave the same in every batch, here and in all other processes."""
        computed = set().union(*ranks.gathered(self.computed))
        return Fit({}) if self.before is None else self.before.without(computed)

    def finish(self, fit: Fit | None) -> bool:
        """Whether all layers are what they were when it began. If one is not, it has changed itself, and what was
        answered from memory may be wrong."""
        with evaluating(self.model):
            intact = all(ranks.gathered(self.held.intact()))
        if intact:
            self.graphs._fit = fit
        else:
            self.graphs._known.clear()
        return intact
