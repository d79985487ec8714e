"""Applications of the maps that produce members, as q, k and v do: their inputs, and in a backward pass the gradients
at their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headprune.hooks.attach import at_gradient
from headprune.signals.spec import GradientRequest, Meter, View
from headprune.units import Axis, Site


@dataclass
class Call:
    """One application of a projection: its inputs and outputs, and in the backward pass the gradient at the outputs."""

    inputs: torch.Tensor
    outputs: torch.Tensor | None
    delta: torch.Tensor | None = None


@dataclass
class _Site:
    calls: dict[str, list[Call]] = field(default_factory=dict)
    contracted: set[str] = field(default_factory=set)


class ProjectionMeter(Meter):
    """Waits until all applications of a projection have their gradient, then lets `contract` reduce them.

    Tied sites and shared projections are applied several times: their gradient is the sum over all of them.
    """

    keep_outputs = False

    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.states = {site.index: _Site() for site in view.sites}

    def projection(self, site: Site, path: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        call = Call(self._tokens(site, path, inputs), self._tokens(site, path, outputs) if self.keep_outputs else None)
        calls = self.states[site.index].calls.setdefault(path, [])
        calls.append(call)

        def read(gradient: torch.Tensor) -> None:
            if self.is_current:
                call.delta = self._tokens(site, path, gradient)
                if all(other.delta is not None for other in calls):
                    self._contract(site, path)

        at_gradient(outputs, read)

    def _tokens(self, site: Site, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, features]; for a gradient of the whole batch, all tokens are one sample's."""
        if self.request.aggregation == "batch":
            return tensor.detach().flatten(0, -2).unsqueeze(0)
        return self.view.per_sample(tensor, site, path)

    def finish(self) -> None:
        """Contract projections of which some application got no gradient."""
        for site in self.view.sites:
            state = self.states[site.index]
            for path in state.calls:
                if path not in state.contracted:
                    self._contract(site, path)

    def _contract(self, site: Site, path: str) -> None:
        state = self.states[site.index]
        state.contracted.add(path)
        calls = [call for call in state.calls[path] if call.delta is not None]
        if calls:
            roles = {role: axis for role, axis in site.roles.items() if axis.module == path}
            self.contract(site, roles, calls)
        for call in calls:
            call.delta = None
        if state.contracted == set(state.calls):
            self.done(site)

    def contract(self, site: Any, roles: Mapping[str, Axis], calls: list[Call]) -> None:
        raise NotImplementedError

    def done(self, site: Any) -> None:
        """All projections of the site have been contracted."""
