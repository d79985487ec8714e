"""Budgets of time: a table of what layers take decides, and the clock has the last word."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.examples import default_tokens
from headprune.measure.inputs import made_up
from headprune.measure.latency import LatencyTable, latency_table
from headprune.measure.timing import Timed, own_clock, turns, using_threads
from headprune.search.budget import Prices, units
from headprune.units import Site

REPEATS = 15


class Stopwatch:
    """The dense model kept beside, to be timed against what becomes of it on inputs of one shape."""

    def __init__(self, model: PreTrainedModel, batch_size: int, length: int | None, threads: int | None) -> None:
        self.dense = copy.deepcopy(model)
        self.batch_size, self.length, self.threads = batch_size, length or default_tokens(model), threads
        self.table: LatencyTable = distributed.on_main(
            lambda: latency_table(model, batch_size=batch_size, length=length, threads=threads)
        )
        # Layers that are timed one by one do not add up to a model exactly: what the clock said of the last model
        # that was measured, relative to what the table says of it.
        self.factor = 1.0

    def prices(self, sites: Sequence[Site]) -> Prices:
        curves = {site: curve for curve in self.table.curves for site in curve.sites}

        def of(site: Site, count: int) -> float:
            return curves[site.index].at(max(count, curves[site.index].counts[0])) if site.index in curves else 0.0

        return Prices(self.table.dense, self.table.rest, of)

    def share(self, model: PreTrainedModel, sites: Sequence[Site]) -> float:
        """The time of this model relative to the dense one, both measured now, taking turns."""
        measured = distributed.on_main(lambda: self._measured(model))  # by the first process, while the others wait
        known = {site for curve in self.table.curves for site in curve.sites}
        counts = {site.index: units(site) for site in sites if site.index in known}
        estimated = self.table.estimate(counts) / self.table.dense
        self.factor = measured / estimated
        return measured

    def _measured(self, model: PreTrainedModel) -> float:
        inputs = made_up(self.dense, self.batch_size, self.length)
        with using_threads(self.threads) as used, evaluating(model), evaluating(self.dense):
            clock = own_clock(used, input_device(model))
            runs = {"dense": Timed(self.dense, (), inputs), "pruned": Timed(model, (), inputs)}
            taken = {name: min(times) for name, times in turns(runs, REPEATS, clock=clock).items()}
        return taken["pruned"] / taken["dense"]
