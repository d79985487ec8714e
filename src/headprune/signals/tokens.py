"""Tokens of a site: what its output map is given, and the gradients there, for all the data.

Kept token by token, since what a change does to a sample is the sum over its tokens, which pull together or against
each other; no second moments can tell that. Sites are gathered in groups, so that they stay within a limit of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.hooks.attach import at_gradient, hooks
from headprune.hooks.logits import States
from headprune.hooks.offload import input_device
from headprune.hooks.paths import layer_path
from headprune.hooks.watch import captured_outputs
from headprune.signals.moments import FOLDS, Moments, real_outputs
from headprune.signals.spec import Backward, NotPerSampleError, SiteMeter, SiteRequest, View, is_expert
from headprune.tasks import batch_size
from headprune.units import Site
from headprune.units.linear import out_features

TOKEN_BYTES = 1 << 32  # bytes of tokens that are kept at once
DRAWS = 2  # of random signs, where there are enough logits for them to differ
PATCHES = 256  # tokens of a sample that is no text, for estimates


@dataclass
class Application:
    """The real tokens of one batch at one application of a site, in the precision of the model."""

    batch: int  # its number
    inputs: torch.Tensor  # of the output map, [tokens x in]
    samples: torch.Tensor  # of each token, as a number in all the data
    gradient: torch.Tensor | None = None  # at the inputs; None where nothing depends on them
    output_gradients: list[torch.Tensor] = field(default_factory=list)  # per draw [tokens x out]

    def on(self, device: str) -> Application:
        """The same where it is computed with; nothing moves where that is the CPU."""
        gradient = None if self.gradient is None else self.gradient.to(device)
        return replace(self, inputs=self.inputs.to(device), gradient=gradient)


@dataclass
class Tokens:
    """Real tokens of the data at one site. Those of other batches, or of other processes, are added with `+`."""

    batches: dict[int, list[Application]] = field(default_factory=dict)  # by the number of the batch's first sample
    streams: dict[int, torch.Tensor] = field(default_factory=dict)  # |x|^2 of samples, x the residual stream
    samples: int = 0  # of these batches, those without a real token included
    device: str = "cpu"  # on which the model computes; tokens wait in the main memory

    def __len__(self) -> int:
        return sum(len(own.inputs) for own in self.applications)

    def __add__(self, other: Tokens) -> Tokens:
        batches, streams = {**self.batches, **other.batches}, {**self.streams, **other.streams}
        return Tokens(batches, streams, self.samples + other.samples, self.device)

    @property
    def applications(self) -> list[Application]:
        """In the order of the data."""
        return [own for first in sorted(self.batches) for own in self.batches[first]]

    def moments(self) -> Moments:
        """Of the inputs, of which there must be some."""
        result: Moments | None = None
        for own in self.applications:
            if len(own.inputs):
                if result is None:
                    result = Moments.about(own.inputs[own.samples == own.samples[0]].double().mean(0))
                result.add(own.inputs.to(self.device), (own.samples % FOLDS).to(self.device))
        assert result is not None, "nothing but padding has passed here"
        return replace(result, samples=self.samples)

    def per_sample(self, values: Callable[[Application], torch.Tensor], width: int) -> torch.Tensor:
        """Sums over the tokens of each sample of what is made of them, [samples x width]."""
        total = torch.zeros(self.samples, width, dtype=torch.float64)
        for own in self.applications:
            found = values(own.on(self.device)).double().cpu()
            total.scatter_add_(0, own.samples[:, None].expand_as(found), found)
        return total


@dataclass(frozen=True)
class TokenRequest(SiteRequest):
    """The tokens of sites; with gradients of the logits, added up with random signs, at the inputs of their output
    maps, at the outputs of these, for several draws of signs, or at both. With `streams`, also the size of the residual
    stream after the layer, sample by sample."""

    at_inputs: bool = False
    at_outputs: bool = False
    streams: bool = False

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("data",) if self.backward is None else ("gradients",)

    @property
    def backward(self) -> Backward | None:
        return ("logit-signs", "sample") if self.at_inputs or self.at_outputs else None

    @property
    def draws(self) -> int:
        return DRAWS if self.at_outputs else 1

    def __or__(self, other: TokenRequest) -> TokenRequest:
        """What serves both."""
        return replace(
            self,
            at_inputs=self.at_inputs or other.at_inputs,
            at_outputs=self.at_outputs or other.at_outputs,
            streams=self.streams or other.streams,
        )

    def bytes_per_token(self, model: PreTrainedModel, site: Site) -> int:
        output: Any = model.get_submodule(site.o)
        given = site.size * site.width * (2 if self.at_inputs else 1)
        gives = DRAWS * out_features(output) if self.at_outputs else 0
        return site.applications * (given + gives) * next(model.parameters()).dtype.itemsize

    def meter(self, view: View) -> SiteMeter:
        return _TokenMeter(self, view)


def draws_for(logits: torch.Tensor | States) -> int:
    """Of two logits, added up with signs that add up to 0, there is one sum only."""
    return DRAWS if logits.shape[1:].numel() > 2 else 1


def groups_within(
    limit: int,
    model: PreTrainedModel,
    sites: Sequence[Site],
    requests: Sequence[SiteRequest],
    batches: Sequence[Mapping[str, Any]],
) -> list[list[Site]]:
    """Sites whose tokens are kept at once: each further group takes a pass over the data of its own."""
    tokens = sum(
        batch["input_ids"].numel() if "input_ids" in batch else batch_size(batch) * PATCHES for batch in batches
    )
    result: list[list[Site]] = [[]]
    taken = 0
    for site in sites:
        if site.kept:
            size = tokens * sum(request.bytes_per_token(model, site) for request in requests)
            if result[-1] and taken + size > limit:
                result.append([])
                taken = 0
            result[-1].append(site)
            taken += size
    return result


class _TokenMeter(SiteMeter):
    """Hooks of output maps that keep what these are given, and have gradients noted as a backward pass reaches them."""

    request: TokenRequest
    gathered: dict[int, Tokens]

    def __init__(self, request: TokenRequest, view: View) -> None:
        super().__init__(request, view)
        device = str(input_device(view.model))
        device = "cpu" if device.startswith("mps") else device  # which has no float64
        self.gathered.update({site.index: Tokens(samples=view.size, device=device) for site in self.sites})
        self.layers: dict[str, Any] = {}  # what they give

    @contextmanager
    def watching(self) -> Iterator[None]:
        model, paths = self.view.model, dict.fromkeys(layer_path(site.path) for site in self.view.sites)
        layers = [(path, model.get_submodule(path)) for path in paths] if self.request.streams else []
        pairs = [(model.get_submodule(site.o), self._keep(site)) for site in self.sites]
        with hooks(pairs), captured_outputs(layers, self.layers):
            yield

    def _keep(self, site: Site) -> Callable[..., torch.Tensor]:
        request, view = self.request, self.view

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return real_outputs(site, view.batch, tensor, view.task)[0].cpu()

        def keep(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            told_apart = request.streams or request.backward is not None
            if told_apart and args[0].dim() == 2 and is_expert(site) and view.size > 1:
                raise NotPerSampleError  # tokens that were sent here are in no order of samples
            rows = real_outputs(site, view.batch, args[0], view.task)[1].cpu()
            own = Application(view.number, real(args[0]), rows + view.first)
            self.gathered[site.index].batches.setdefault(view.first, []).append(own)

            # The hooks must not hold the tensors that they are on: such a cycle would keep the graph of the pass alive.
            def note(leaf: bool, gradient: torch.Tensor) -> None:
                if self.is_current and view.draw == 0:
                    own.gradient = real(gradient.clone() if leaf else gradient)  # backward passes add to that of a leaf

            def note_output(leaf: bool, gradient: torch.Tensor) -> None:
                if self.is_current:
                    own.output_gradients.append(real(gradient.clone() if leaf else gradient))

            if request.at_inputs and torch.is_grad_enabled():
                at_gradient(args[0], functools.partial(note, args[0].is_leaf))
            if request.at_outputs and torch.is_grad_enabled():
                output = output if output.requires_grad else output.detach().requires_grad_(True)
                at_gradient(output, functools.partial(note_output, output.is_leaf))
            return output

        return keep

    def finish(self) -> None:
        """Nothing depends on an output that no gradient has reached."""
        for site in self.sites if self.request.at_outputs else ():
            output: Any = self.view.model.get_submodule(site.o)
            for own in self.gathered[site.index].applications:
                if len(own.output_gradients) == self.view.draw:
                    own.output_gradients.append(own.inputs.new_zeros(len(own.inputs), out_features(output)))

    def after(self, targets: torch.Tensor | None) -> None:
        """The size of the residual stream; of none where some layer gives something else."""
        sizes: dict[int, torch.Tensor] = {}
        rows = self.view.size * self.view.task.rows(self.view.batch)
        for site in self.view.sites if self.request.streams else ():
            stream = self.layers.get(layer_path(site.path))
            stream = stream[0] if isinstance(stream, (tuple, list)) else stream
            if not isinstance(stream, torch.Tensor) or stream.shape[0] != rows:
                return
            squares = widened(stream.detach()).square().sum(-1).reshape(self.view.size, -1)
            real = self.view.real(site, squares.shape[1])
            sizes[site.index] = (squares if real is None else squares * real.to(squares)).sum(1).cpu()
        for index, tokens in self.gathered.items():
            if index in sizes:
                tokens.streams[self.view.first] = sizes[index]
