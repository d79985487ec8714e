"""Reading gradients at head outputs and at projection outputs while a backward pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from headprune.signals.contract import gram_is_cheaper, gram_matrix, squared_block_norms
from headprune.signals.requests import (
    BlockNorms,
    GateGradients,
    GradientRequest,
    Request,
    ResidualGradients,
    WeightProducts,
)
from headprune.signals.residuals import Residuals
from headprune.units import AttentionSite, Projection
from headprune.units.spec import ROLES


class NotPerSampleError(Exception):
    """A projection sees inputs without a sample axis, so gradients cannot be told apart by sample."""


@dataclass
class _Call:
    """One application of a projection: its inputs and outputs, and in the backward pass the gradient at the outputs."""

    inputs: torch.Tensor
    outputs: torch.Tensor | None
    delta: torch.Tensor | None = None


@dataclass
class _Site:
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    grams: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    contracted: set[str] = field(default_factory=set)


class GradientMeter:
    """Reduces gradients to one number per sample and head as soon as they appear, so that none of them pile up."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[AttentionSite],
        requests: Sequence[GradientRequest],
        size: int,
        residuals: Residuals | None = None,
    ) -> None:
        self.model = model
        self.sites = sites
        self.requests = requests
        self.size = size
        self.residuals = residuals
        self.heads = max((site.original_heads for site in sites), default=0)
        self.needs_projections = any(isinstance(request, (BlockNorms, WeightProducts)) for request in requests)
        self.whole_batches = all(request.aggregation == "batch" for request in requests)
        self.needs_outputs = any(isinstance(request, (GateGradients, ResidualGradients)) for request in requests)
        self._states = {site.index: _Site() for site in sites}
        self._backward: tuple[str, str] | None = None
        self._answers: dict[Request, torch.Tensor] = {}

    # --- forward ---

    def output(self, site: AttentionSite, heads: torch.Tensor) -> None:
        if heads.shape[0] != self.size:
            raise NotPerSampleError
        values = heads.detach()

        def read(gradient: torch.Tensor) -> None:
            for kind in (GateGradients, ResidualGradients):
                request = self._current(kind)
                if request is not None:
                    own = values.float() if kind is GateGradients else self._residual(site, values)
                    products = (own * gradient.float()).flatten(1, -2).sum(1).unflatten(-1, (site.heads, -1)).sum(-1)
                    if request.objective == "logit-signs":  # what goes together is scored together
                        units = products.unflatten(-1, (-1, site.group)).sum(-1)
                        products = units.repeat_interleave(site.group, dim=-1)
                    self._add(request, site, products)

        heads.register_hook(read)

    def _residual(self, site: AttentionSite, values: torch.Tensor) -> torch.Tensor:
        if self.residuals is None:
            raise ValueError("Residual gradients need residual maps, which are fitted on the data first.")
        fitted = self.residuals.get(site.index)
        return torch.zeros_like(values, dtype=torch.float32) if fitted is None else fitted.of(values)

    def projection(self, site: AttentionSite, path: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        keep_outputs = any(isinstance(request, WeightProducts) for request in self.requests)
        call = _Call(self._tokens(inputs), self._tokens(outputs) if keep_outputs else None)
        calls = self._states[site.index].calls.setdefault(path, [])
        calls.append(call)

        def read(gradient: torch.Tensor) -> None:
            call.delta = self._tokens(gradient)
            # Tied sites and shared projections are applied several times: their gradient is the sum over all of them.
            if all(other.delta is not None for other in calls):
                self._contract(site, path)

        outputs.register_hook(read)

    def _tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, features]; where only whole batches are asked for, all tokens are one sample's."""
        if self.whole_batches:
            return tensor.detach().flatten(0, -2).unsqueeze(0)
        if tensor.shape[0] == self.size and tensor.dim() >= 3:
            return tensor.detach().flatten(1, -2)
        if tensor.dim() == 2 and tensor.shape[0] % self.size == 0:
            return tensor.detach().unflatten(0, (self.size, -1))
        raise NotPerSampleError

    # --- backward ---

    def start(self, backward: tuple[str, str]) -> None:
        self._backward = backward
        for state in self._states.values():
            state.contracted.clear()
            for calls in state.calls.values():
                for call in calls:
                    call.delta = None

    def finish(self) -> None:
        """Contract what some applications of a projection had no part in, and give heads without gradient a zero."""
        for site in self.sites:
            state = self._states[site.index]
            for path in state.calls:
                if path not in state.contracted:
                    self._contract(site, path)
        for request in self.requests:
            if request.backward == self._backward:
                self._answer(request)

    def answers(self) -> dict[Request, torch.Tensor]:
        """Per request [.. x batch x sites x heads], NaN at heads that are gone."""
        gone = torch.ones(len(self.sites), self.heads, dtype=torch.bool)
        for site in self.sites:
            gone[site.index, list(site.kept)] = False
        return {
            request: answer.masked_fill(gone.to(answer.device), torch.nan) for request, answer in self._answers.items()
        }

    def _current(self, kind: type[GradientRequest]) -> GradientRequest | None:
        return next((r for r in self.requests if isinstance(r, kind) and r.backward == self._backward), None)

    def _contract(self, site: AttentionSite, path: str) -> None:
        state = self._states[site.index]
        state.contracted.add(path)
        calls = [call for call in state.calls[path] if call.delta is not None]
        if not calls:
            return
        roles = [projection for projection in (site.q, site.k, site.v) if projection.module == path]
        request = self._current(BlockNorms)
        if request is not None:
            self._norms(request, site, roles, calls)
        request = self._current(WeightProducts)
        if request is not None:
            self._products(request, site, roles, calls)
        for call in calls:
            call.delta = None
        if state.contracted == set(state.calls):
            state.grams.clear()

    def _norms(
        self, request: GradientRequest, site: AttentionSite, roles: list[Projection], calls: list[_Call]
    ) -> None:
        inputs = _joined([call.inputs for call in calls])
        deltas = _joined([call.delta for call in calls if call.delta is not None])
        if request.aggregation == "batch":
            inputs, deltas = inputs.flatten(0, 1)[None], deltas.flatten(0, 1)[None]
        rows = sum(projection.heads * projection.width for projection in roles)
        gram = None
        if gram_is_cheaper(inputs.shape[1], inputs.shape[2], rows, 4 - len(roles)):
            gram = self._gram(site, calls, inputs)
        for projection in roles:
            own = projection.of(deltas).flatten(-2)
            norms = squared_block_norms(inputs, own, projection.heads, gram).sqrt()
            self._add(request, site, _by_query_head(site, projection, norms), ROLES.index(projection.role))

    def _gram(self, site: AttentionSite, calls: list[_Call], inputs: torch.Tensor) -> torch.Tensor:
        """The Gram matrix of the inputs, made once for q, k and v where they see the same."""
        grams = self._states[site.index].grams
        key = (inputs.shape[0], *(call.inputs.data_ptr() for call in calls))
        if key not in grams:
            grams.clear()
            grams[key] = gram_matrix(inputs)
        return grams[key]

    def _products(
        self, request: GradientRequest, site: AttentionSite, roles: list[Projection], calls: list[_Call]
    ) -> None:
        for call in calls:
            assert call.delta is not None
            assert call.outputs is not None
            for projection in roles:
                # <W, dW> = sum_t delta_t . (W x_t), and W x_t is the output without its bias.
                values = projection.of(call.outputs).float()
                bias: torch.Tensor | None = self.model.get_submodule(projection.module).bias  # type: ignore[assignment]
                values = values if bias is None else values - projection.of(bias).float()
                products = (values * projection.of(call.delta).float()).sum(dim=(1, 3))
                self._add(request, site, _by_query_head(site, projection, products))

    # --- answers ---

    def _answer(self, request: GradientRequest) -> torch.Tensor:
        if request not in self._answers:
            size = 1 if request.aggregation == "batch" else self.size
            lead = (3,) if isinstance(request, BlockNorms) else ()
            self._answers[request] = torch.zeros(*lead, size, len(self.sites), self.heads)
        return self._answers[request]

    def _add(self, request: GradientRequest, site: AttentionSite, values: torch.Tensor, role: int = 0) -> None:
        answer = self._answer(request)
        part = answer[role] if isinstance(request, BlockNorms) else answer
        part[:, site.index, list(site.kept)] += values.to(answer)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).float()


def _by_query_head(site: AttentionSite, projection: Projection, values: torch.Tensor) -> torch.Tensor:
    """Values per KV head become values per query head: each head takes its group's."""
    return values if projection.role == "q" else values.repeat_interleave(site.group, dim=-1)
