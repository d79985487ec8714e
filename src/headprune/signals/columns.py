"""Means and squares of every input column of output maps: all that some criteria ask of the data.

Full second moments of a feed-forward layer are the square of its width; these are twice its width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.logits import few_logits
from headprune.hooks.offload import input_device, stored
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import watched
from headprune.signals.moments import real_outputs
from headprune.tasks import Task, own_batches
from headprune.units import Site
from headprune.units.linear import is_transposed


@dataclass
class Columns:
    """Sums over real tokens about a fixed `shift`, which keeps a large mean with a small spread exact."""

    shift: torch.Tensor  # [width]
    total: torch.Tensor  # [width]
    squares: torch.Tensor  # [width]
    tokens: int = 0

    def add(self, values: torch.Tensor) -> None:
        centred = values.double().cpu() - self.shift
        self.total += centred.sum(0)
        self.squares += centred.square().sum(0)
        self.tokens += len(values)

    def with_more(self, other: Columns) -> Columns:
        """Of these tokens and of others, about the same point."""
        return Columns(self.shift, self.total + other.total, self.squares + other.squares, self.tokens + other.tokens)

    def about(self, shift: torch.Tensor) -> Columns:
        """The same sums about another point."""
        away = self.shift - shift
        squares = self.squares + 2 * away * self.total + self.tokens * away.square()
        return Columns(shift, self.total + self.tokens * away, squares, self.tokens)

    @property
    def variance(self) -> torch.Tensor:
        mean = self.total / self.tokens
        return (self.squares / self.tokens - mean.square()).clamp_min(0)

    @property
    def mean_square(self) -> torch.Tensor:
        return self.variance + (self.shift + self.total / self.tokens).square()


def add_columns(found: dict[int, Columns], site: Site, given: torch.Tensor) -> None:
    """Take in means and squares of every column, of real tokens [tokens x columns]."""
    if len(given):
        if site.index not in found:
            shift = given.double().mean(0).cpu()
            found[site.index] = Columns(shift, torch.zeros_like(shift), torch.zeros_like(shift))
        found[site.index].add(given)


def gather_columns(
    model: PreTrainedModel, sites: Sequence[Site], batches: Iterable[Mapping[str, Any]], task: Task
) -> dict[int, Columns]:
    """By site, from one forward pass; padding is left out, applications of a tied site are pooled. Several processes
    share the batches, and all get the sums over all of them."""
    found: dict[int, Columns] = {}
    with distributed.fail_together():
        for _, _, raw in own_batches(batches):
            batch = task.prepare(raw, input_device(model))

            def see(site: Site, outputs: torch.Tensor, batch: Mapping[str, Any] = batch) -> None:
                add_columns(found, site, real_outputs(site, batch, outputs, task)[0])

            with torch.no_grad(), evaluating(model), watched(model, sites, output=see):
                model(**few_logits(model, task.inputs(batch)))
    result: dict[int, Columns] = {}
    for part in distributed.all_gather(found):
        for index, own in part.items():
            known = result.get(index)
            moved = own if known is None else own.about(known.shift)
            result[index] = moved if known is None else known.with_more(moved)
    return result


def output_weight(model: PreTrainedModel, site: Site) -> torch.Tensor:
    """The output map of a site, [out x in], in float64."""
    output: Any = model.get_submodule(site.o)
    weight: torch.Tensor = stored(output).detach().double().cpu()
    return weight.t() if is_transposed(output) else weight
