"""Tokens of a site: the inputs of its output map, and the gradients there, for all the data.

They are kept token by token, since the effect of a change on a sample is the sum over its tokens, with either sign,
which second moments do not contain. Sites are gathered in groups, so that they stay within a limit of memory.
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
from headprune.hooks.logit_blocks import States
from headprune.hooks.module_paths import layer_path
from headprune.hooks.offload import input_device
from headprune.hooks.site_activations import tracked_output
from headprune.signals.moments import FOLDS, Moments, real_outputs
from headprune.signals.objectives import content_key
from headprune.signals.spec import Backward, SiteMeter, SiteRequest, View
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
        """The same on the device that computes with it."""
        gradient = None if self.gradient is None else self.gradient.to(device)
        return replace(self, inputs=self.inputs.to(device), gradient=gradient)


@dataclass
class Tokens:
    """Real tokens of the data at one site. Those of other batches, or of other processes, are added with `+`."""

    batches: dict[int, list[Application]] = field(default_factory=dict)  # by the number of the batch's first sample
    streams: dict[int, torch.Tensor] = field(default_factory=dict)  # |x|^2 of samples, x the residual stream
    keys: dict[int, list[int]] = field(default_factory=dict)  # of samples, from their content
    samples: int = 0  # of these batches, those without a real token included
    device: str = "cpu"  # on which the model computes; tokens are stored in main memory

    def __len__(self) -> int:
        return sum(len(application.inputs) for application in self.applications)

    def __add__(self, other: Tokens) -> Tokens:
        batches, streams = {**self.batches, **other.batches}, {**self.streams, **other.streams}
        return Tokens(batches, streams, {**self.keys, **other.keys}, self.samples + other.samples, self.device)

    @property
    def applications(self) -> list[Application]:
        """In the order of the data."""
        return [application for first in sorted(self.batches) for application in self.batches[first]]

    def folds(self) -> torch.Tensor:
        """The fold of each sample: alternating in the order of keys, so that the order of the data does not matter."""
        keys = torch.tensor([key for first in sorted(self.keys) for key in self.keys[first]])
        return keys.argsort(stable=True).argsort() % FOLDS

    def moments(self) -> Moments:
        """Moments of the inputs; there must be at least one token."""
        result: Moments | None = None
        for application in self.applications:
            if len(application.inputs):
                if result is None:
                    result = Moments.about(
                        application.inputs[application.samples == application.samples[0]].double().mean(0)
                    )
                result.add(application.inputs.to(self.device), (application.samples % FOLDS).to(self.device))
        assert result is not None, "only padding"
        return replace(result, samples=self.samples)

    def per_sample(self, values: Callable[[Application], torch.Tensor], width: int) -> torch.Tensor:
        """Sums over the tokens of each sample of `values` of them, [samples x width]."""
        total = torch.zeros(self.samples, width, dtype=torch.float64)
        for application in self.applications:
            values_of_tokens = values(application.on(self.device)).double().cpu()
            total.scatter_add_(0, application.samples[:, None].expand_as(values_of_tokens), values_of_tokens)
        return total


@dataclass(frozen=True)
class TokenRequest(SiteRequest):
    """The tokens of sites; with gradients of the sum of logits with random signs, at the inputs of their output maps,
    at the outputs of these for several draws of signs, or at both. With `streams`, also the size of the residual stream
    after the layer, sample by sample."""

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
        """One request that covers both."""
        return replace(
            self,
            at_inputs=self.at_inputs or other.at_inputs,
            at_outputs=self.at_outputs or other.at_outputs,
            streams=self.streams or other.streams,
        )

    def bytes_per_token(self, model: PreTrainedModel, site: Site) -> int:
        output: Any = model.get_submodule(site.o)
        inputs = site.size * site.width * (2 if self.at_inputs else 1)
        outputs = DRAWS * out_features(output) if self.at_outputs else 0
        return site.applications * (inputs + outputs) * next(model.parameters()).dtype.itemsize

    def meter(self, view: View) -> SiteMeter:
        return _TokenMeter(self, view)


def draws_for(logits: torch.Tensor | States) -> int:
    """Two logits with signs that add up to 0 have only one sum."""
    return DRAWS if logits.shape[1:].numel() > 2 else 1


def groups_within(
    limit: int,
    model: PreTrainedModel,
    sites: Sequence[Site],
    requests: Sequence[SiteRequest],
    batches: Sequence[Mapping[str, Any]],
) -> list[list[Site]]:
    """Groups of sites whose tokens are kept at once; each group needs one pass over the data."""
    tokens = sum(
        batch["input_ids"].numel() if "input_ids" in batch else batch_size(batch) * PATCHES for batch in batches
    )
    result: list[list[Site]] = [[]]
    bytes_taken = 0
    for site in sites:
        if site.kept:
            size = tokens * sum(request.bytes_per_token(model, site) for request in requests)
            if result[-1] and bytes_taken + size > limit:
                result.append([])
                bytes_taken = 0
            result[-1].append(site)
            bytes_taken += size
    return result


class _TokenMeter(SiteMeter):
    """Hooks of output maps that keep their inputs, and record gradients as a backward pass reaches them."""

    request: TokenRequest
    gathered: dict[int, Tokens]

    def __init__(self, request: TokenRequest, view: View) -> None:
        super().__init__(request, view)
        device = str(input_device(view.model))
        device = "cpu" if device.startswith("mps") else device  # which has no float64
        samples = [view.task.select(view.batch, slice(row, row + 1)) for row in range(view.size)]
        keys = {view.first: [content_key(sample) for sample in samples]} if request.at_outputs else {}
        self.gathered.update({site.index: Tokens(keys=keys, samples=view.size, device=device) for site in self.sites})
        self.streams: dict[str, torch.Tensor | None] = {}  # by layer: |x|^2 of its output, [samples x tokens]

    @contextmanager
    def watching(self) -> Iterator[None]:
        model, paths = self.view.model, dict.fromkeys(layer_path(site.path) for site in self.view.sites)
        layers = [(model.get_submodule(path), self._measure_stream(path)) for path in paths]
        pairs = [(model.get_submodule(site.o), self._keep(site)) for site in self.sites]
        with hooks(pairs), hooks(layers if self.request.streams else []):
            yield

    def _measure_stream(self, path: str) -> Callable[..., None]:
        def measure(module: Any, args: Any, output: Any) -> None:
            stream = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(stream, torch.Tensor) and stream.dim() > 1:
                squares = widened(stream.detach()).square().sum(-1, keepdim=True)
                self.streams[path] = self.view.rows.split(path, squares).squeeze(-1)
            else:
                self.streams[path] = None

        return measure

    def _keep(self, site: Site) -> Callable[..., torch.Tensor]:
        request, view = self.request, self.view

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return real_outputs(site, view.batch, tensor, view.task)[0].cpu()

        def keep(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            counts: list[int] | None = None
            if request.streams or request.backward is not None:
                view.check_order(site, args[0])
                counts = view.rows.counts(site.o, args[0].shape)
            rows = real_outputs(site, view.batch, args[0], view.task, counts)[1].cpu()
            application = Application(view.number, real(args[0]), rows + view.first)
            self.gathered[site.index].batches.setdefault(view.first, []).append(application)

            # The hooks must not hold the tensors that they are on: such a cycle would keep the graph of the pass alive.
            def record_input_gradient(leaf: bool, gradient: torch.Tensor) -> None:
                if self.is_current and view.draw == 0:
                    application.gradient = real(
                        gradient.clone() if leaf else gradient
                    )  # backward passes add to that of a leaf

            def record_output_gradient(gradient: torch.Tensor) -> None:
                if self.is_current:
                    application.output_gradients.append(real(gradient))

            if request.at_inputs and torch.is_grad_enabled():
                at_gradient(args[0], functools.partial(record_input_gradient, args[0].is_leaf))
            if request.at_outputs and torch.is_grad_enabled():
                output = tracked_output(output)
                at_gradient(output, record_output_gradient)
            return output

        return keep

    def finish(self) -> None:
        """An output that no gradient has reached has gradient zero."""
        for site in self.sites if self.request.at_outputs else ():
            output: Any = self.view.model.get_submodule(site.o)
            for application in self.gathered[site.index].applications:
                if len(application.output_gradients) == self.view.draw:
                    application.output_gradients.append(
                        application.inputs.new_zeros(len(application.inputs), out_features(output))
                    )

    def after(self, targets: torch.Tensor | None) -> None:
        """The size of the residual stream; none where the output of some layer is not a hidden state."""
        sizes: dict[int, torch.Tensor] = {}
        for site in self.view.sites if self.request.streams else ():
            if layer_path(site.path) not in self.streams:  # it does not run on this batch, so that nothing is divided
                sizes[site.index] = torch.ones(self.view.size)
                continue
            squares = self.streams[layer_path(site.path)]
            if squares is None:
                return
            real = self.view.real(site, squares.shape[1])
            sizes[site.index] = (squares if real is None else squares * real.to(squares)).sum(1).cpu()
        for index, tokens in self.gathered.items():
            if index in sizes:
                tokens.streams[self.view.first] = sizes[index]
