"""`inspect`: the attention and feed-forward layers of a model, and the most that removing units could save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from headprune.display import data_frame, html_table
from headprune.hooks.model_lock import exclusively
from headprune.measure.costs import Flops, flops, head_parameters, parameters_by_module, total_parameters
from headprune.units import Site, survey
from headprune.units.resolve import left_whole, neuron_sites


@dataclass(frozen=True, repr=False)
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

    def to_frame(self) -> Any:
        """A pandas frame with a line per site, those of attention first."""
        return data_frame(
            {
                "site": site.index,
                "path": site.path,
                "kind": site.kind,
                "left": len(site.kept),
                "original": site.original,
                "applications": site.applications,
            }
            for site in (*self.sites, *self.feed_forward)
        )

    def __repr__(self) -> str:
        units = "".join(f", {left} at {len(sites)} sites" for sites, left in self._sites_by_kind())
        return f"<Inspection: {self.model_type}, {self.parameters:,} parameters{units}>"

    def _repr_html_(self) -> str:
        """The units of each kind, and the most that removing them could save."""
        parameters = {"heads": self.head_parameters, "neurons": self.neuron_parameters}
        rows = [
            (
                left,
                f"{len(sites)}",
                f"{parameters[sites[0].kind] / self.parameters:.1%}",
                f"{self.flops.kinds.get(sites[0].kind, 0) / max(self.flops.total, 1):.1%}",
            )
            for sites, left in self._sites_by_kind()
        ]
        title = f"{self.model_type}: {self.parameters:,} parameters"
        headings = ("", "sites", "of all parameters", f"of the FLOPs of {self.flops.tokens} tokens")
        notes = [self.proof, *(f"Not pruned: {text}." for text in left_whole(self.left))]
        return html_table(title, headings, rows, notes)

    def _sites_by_kind(self) -> list[tuple[list[Site], str]]:
        """The sites of each kind that the model has, and the units left there: "10 of 12 heads"."""
        counted = []
        for sites in filter(None, (self.sites, self.feed_forward)):
            left, original = sum(len(site.kept) for site in sites), sum(site.original for site in sites)
            before = "" if left == original else f" of {original:,}"
            counted.append((sites, f"{left:,}{before} {sites[0].kind}"))
        return counted

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


@exclusively
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
