"""`inspect`: the attention and feed-forward layers of a model, and the most that removing units could save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from headprune.measure.costs import Flops, flops, head_parameters, parameters_by_module, total_parameters
from headprune.units import Site, survey
from headprune.units.resolve import neuron_sites


@dataclass(frozen=True)
class Inspection:
    model_type: str
    sites: list[Site]
    parameters: int
    modules: dict[str, int]
    head_parameters: int
    flops: Flops
    known_by: str  # "table" or "experiment"
    left: tuple[tuple[str, str], ...]  # attention that cannot be pruned: path and reason
    feed_forward: list[Site] = field(default_factory=list)
    neuron_parameters: int = 0

    @property
    def proof(self) -> str:
        """Whether and how removals are known to be exact, in a sentence."""
        if not self.sites:
            return "None of its attention can be pruned." if self.left else "It has no attention."
        if self.known_by == "table":
            return "Its layout was found in the table of families; what is removed is verified on the model itself."
        return (
            "Its layout was measured by experiment, and removing heads was proven exact on a small random model of its "
            "class."
        )

    def to_json(self) -> dict[str, Any]:
        fields = ("path", "kind", "place", "heads", "original_heads", "kv_heads", "head_dim", "applications")
        return {
            "model_type": self.model_type,
            "sites": [
                {**{name: getattr(site, name) for name in fields}, "obstacle": site.obstacle or None}
                for site in self.sites
            ],
            "feed_forward": [
                {
                    **{name: getattr(site, name) for name in ("path", "kind", "place", "applications")},
                    "neurons": site.size,
                    "original_neurons": site.original,
                    "obstacle": site.obstacle or None,
                }
                for site in self.feed_forward
            ],
            "parameters": {
                "total": self.parameters,
                "modules": self.modules,
                "heads": self.head_parameters,
                "neurons": self.neuron_parameters,
            },
            "known_by": self.known_by,
            "left_whole": [{"path": path, "reason": reason} for path, reason in self.left],
            "flops": {
                "tokens": self.flops.tokens,
                "total": self.flops.total,
                "heads": self.flops.heads,
                "neurons": self.flops.neurons,
            },
        }


def inspect(model: PreTrainedModel, *, tokens: int | None = None) -> Inspection:
    """Sites, parameters by module, and the share of parameters and FLOPs that heads and neurons hold.

    Reads shapes only, so a model on the meta device, without weights, will do.
    """
    survey_result = survey(model)
    sites = survey_result.sites
    feed_forward = neuron_sites(model, sites)
    return Inspection(
        model_type=model.config.model_type,
        sites=sites,
        parameters=total_parameters(model),
        modules=parameters_by_module(model),
        head_parameters=sum(head_parameters(model, site) for site in sites),
        flops=flops(model, [*sites, *feed_forward], tokens=tokens),
        known_by=survey_result.known_by,
        left=survey_result.left,
        feed_forward=feed_forward,
        neuron_parameters=sum(head_parameters(model, site) for site in feed_forward),
    )
