"""Measured time for budgets of speed: prices from a table of the times of layers, corrected by timing the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.dummy_inputs import default_tokens, dummy_batch
from headprune.measure.latency import LatencyTable, latency_table
from headprune.measure.timing import TimedCall, choose_clock, time_in_turns, using_threads
from headprune.search.budget import Prices, units
from headprune.units import Site

REPEATS = 15


class Stopwatch:
    """Times the pruned model against a copy of the dense one, on dummy inputs of one shape."""

    def __init__(self, model: PreTrainedModel, batch_size: int, length: int | None, threads: int | None) -> None:
        self.dense = copy.deepcopy(model)
        self.batch_size, self.length, self.threads = batch_size, length or default_tokens(model), threads
        self.table: LatencyTable = distributed.on_main(
            lambda: latency_table(model, batch_size=batch_size, length=length, threads=threads)
        )
        # Times of single layers do not add up exactly to that of a model: the measured time of the last model relative
        # to its time by the table.
        self.factor = 1.0

    def prices(self, sites: Sequence[Site]) -> Prices:
        curves = {site: curve for curve in self.table.curves for site in curve.sites}

        def of(site: Site, count: int) -> float:
            return curves[site.index].at(max(count, curves[site.index].counts[0])) if site.index in curves else 0.0

        return Prices(self.table.dense, self.table.rest, of)

    def share(self, model: PreTrainedModel, sites: Sequence[Site]) -> float:
        """The time of this model relative to the dense one, measured in turns."""
        measured = distributed.on_main(lambda: self._measure(model))  # in the main process, while the others wait
        timed_sites = {site for curve in self.table.curves for site in curve.sites}
        counts = {site.index: units(site) for site in sites if site.index in timed_sites}
        estimated = self.table.estimate(counts) / self.table.dense
        self.factor = measured / estimated
        return measured

    def _measure(self, model: PreTrainedModel) -> float:
        inputs = dummy_batch(self.dense, self.batch_size, self.length)
        with using_threads(self.threads) as used, evaluating(model), evaluating(self.dense):
            clock = choose_clock(used, input_device(model))
            runs = {"dense": TimedCall(self.dense, (), inputs), "pruned": TimedCall(model, (), inputs)}
            times = time_in_turns(runs, REPEATS, clock=clock, phase="timing the model")
            seconds = {name: min(values) for name, values in times.items()}
        return seconds["pruned"] / seconds["dense"]
