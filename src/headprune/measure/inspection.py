"""`inspect`: what attention a model has, and the most that removing all of it could save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from headprune.measure.costs import Flops, flops, head_parameters, parameters_by_module, total_parameters
from headprune.units import AttentionSite, resolve


@dataclass(frozen=True)
class Inspection:
    model_type: str
    sites: list[AttentionSite]
    parameters: int
    modules: dict[str, int]
    head_parameters: int
    flops: Flops

    def to_json(self) -> dict[str, Any]:
        fields = ("path", "kind", "place", "heads", "original_heads", "kv_heads", "head_dim", "applications")
        return {
            "model_type": self.model_type,
            "sites": [
                {**{name: getattr(site, name) for name in fields}, "obstacle": site.obstacle or None}
                for site in self.sites
            ],
            "parameters": {"total": self.parameters, "modules": self.modules, "heads": self.head_parameters},
            "flops": {"tokens": self.flops.tokens, "total": self.flops.total, "heads": self.flops.heads},
        }


def inspect(model: PreTrainedModel, *, tokens: int | None = None) -> Inspection:
    """Sites, parameters by module, and the share of parameters and FLOPs that attention heads hold.

    Reads shapes only, so a model on the meta device, without weights, serves as well.
    """
    sites = resolve(model)
    return Inspection(
        model_type=model.config.model_type,
        sites=sites,
        parameters=total_parameters(model),
        modules=parameters_by_module(model),
        head_parameters=sum(head_parameters(model, site) for site in sites),
        flops=flops(model, sites, tokens=tokens),
    )
