"""Layers that a removal does not reach, with their graphs: what is scored again does not go through them again.

A unit that leaves changes its layer and what comes after it. The layers before it give what they gave, and a backward
pass may go through what they have saved for it once more; so do the moments that are fitted to what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.outputs import evaluating
from headprune.hooks.recall import Calls, Held, Recall, remembering
from headprune.hooks.unread import Read
from headprune.signals.spec import Fit
from headprune.units import Site
from headprune.units.offload import is_offloaded
from headprune.units.paths import layer_path

ROOM = 1 << 30  # bytes of graphs that are kept between two passes


@dataclass
class Graphs:
    """What is kept of batches that are scored again and again while units leave a model.

    A layer answers only if what it is given comes from layers that do, or has no graph: what a decoder is told by an
    encoder has gone through a norm of its own, so a decoder runs again.
    """

    room: int = ROOM
    _known: dict[int, Calls] = field(default_factory=dict)  # by the batch's number
    _fit: Fit | None = None  # to all that the last pass saw
    _asked: Hashable = None  # what the last pass was for
    _useless: bool = False  # since layers of this model change when they run

    def start(self, model: PreTrainedModel, sites: Sequence[Site], asked: Hashable) -> GraphPass | None:
        """A pass over the batches begins, if it makes sense to keep anything. No hook may be on the model yet. What was
        kept for another pass, by what is `asked`, does not serve this one."""
        if self._useless or is_offloaded(model):
            return None
        if asked != self._asked:
            self.forget()
        self._asked = asked
        known, self._known = self._known, {}
        before, self._fit = self._fit, None  # a pass that does not come to its end leaves none
        layers = remembering(model, sites)
        with evaluating(model):
            held = Held(layers)
        return GraphPass(self, model, sites, layers, held, known, before, self.room)

    def forget(self) -> None:
        """Give the memory back."""
        self._known, self._fit = {}, None


@dataclass
class GraphPass:
    """One pass over the batches."""

    graphs: Graphs
    model: PreTrainedModel
    sites: Sequence[Site]
    layers: Sequence[tuple[str, nn.Module]]
    held: Held
    known: dict[int, Calls]
    before: Fit | None
    room: int
    ran: set[str] = field(default_factory=set)  # paths of layers that did not answer from memory in some batch

    @contextmanager
    def remembering(self, number: int, listen: Callable[..., None], read: Read | None) -> Iterator[Recall]:
        """Layers answer from memory, for the batch with this number. What is read of the last one alone is no layer's
        whole output."""
        recall = Recall(self.known.pop(number, {}), self.room, self.held, listen)
        with recall.of([(path, layer) for path, layer in self.layers if read is None or path != read.layer]):
            yield recall
        self.graphs._known[number] = recall.calls
        self.room -= recall.bytes
        self.ran |= recall.ran if read is None else {*recall.ran, read.layer}

    def forget(self) -> None:
        """A batch goes through without memory."""
        self.ran |= {path for path, _ in self.layers}

    def give_up(self) -> None:
        """It ends before its end, and what it has not come to is for the next one."""
        self.graphs._known = {**self.known, **self.graphs._known}

    def known_fit(self) -> Fit:
        """What was fitted to sites in layers that answered from memory in every batch, here and in all processes."""
        ran = set().union(*distributed.all_gather(self.ran))
        intact = {path for path, _ in self.layers} - ran
        same = {site.index for site in self.sites if site.kept and layer_path(site.path) in intact}
        return Fit({}) if self.before is None else self.before.only(same)

    def finish(self, fit: Fit | None) -> bool:
        """Whether all layers are what they were when it began. If one is not, it has changed itself, and what was
        answered from memory may be wrong."""
        with evaluating(self.model):
            intact = all(distributed.all_gather(self.held.intact()))
        if intact:
            self.graphs._fit = fit
        else:
            self.graphs.forget()
            self.graphs._useless = True
        return intact
