"""The slow, obvious truth about neurons: a gate, rows of the maps before it, and a column of the output map."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from headprune.units import all_sites
from oracles import Oracle


class NeuronOracle(Oracle):
    """The criteria of `Oracle` that neurons have, in tables of all sites; rows of attention are NaN."""

    def found_sites(self) -> list[Any]:
        return [
            site if site.kind == "neurons" else dataclasses.replace(site, kept=()) for site in all_sites(self.model)
        ]

    def weight_gradients(self, scalar: torch.Tensor) -> dict[str, torch.Tensor]:
        paths = sorted({path for site in self.sites if site.kept for path in (*site.maps, site.o)})
        weights = [self.modules[path].weight for path in paths]
        actual = torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        named = zip(paths, actual, strict=True)
        return {path: g.T if type(self.modules[path]).__name__ == "Conv1D" else g for path, g in named}

    def blocks(
        self, site: Any, position: int, weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """A neuron is row `position` of every map; of a fused one, of its upper and of its lower half."""
        rows = []
        for path in site.maps:
            weight = self.weight(path) if weights is None else weights[path]
            rows += [weight[place] for place in range(position, len(weight), len(site.kept))]
        output = self.weight(site.o) if weights is None else weights[site.o]
        nothing = torch.zeros(0, dtype=torch.float64)
        return {"q": torch.cat(rows), "k": nothing, "v": nothing, "o": output[:, position]}


def neuron_oracle(model: Any, batches: list[Any], **options: Any) -> NeuronOracle:
    assert any(site.kind == "neurons" for site in all_sites(model))
    return NeuronOracle(model, batches, **options)
