"""Outputs of the dense model at its sites on the calibration data, the targets of repairs of the pruned model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import widened
from headprune.hooks.attach import at_gradient, hooks
from headprune.hooks.logit_blocks import few_logits, forward, logits_of
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.residual_stream import streams
from headprune.hooks.site_activations import frozen, tracked_output
from headprune.layerwise.activation_store import ActivationStore, MemoryLimit
from headprune.layerwise.check_walkable import is_walkable
from headprune.layerwise.site_passes import SitePasses
from headprune.repair.front_to_back import Target, repair_front_to_back
from headprune.repair.regression import Repair, RepairKind
from headprune.signals.moments import real_outputs
from headprune.signals.objectives import start_backward
from headprune.signals.sensitivity import token_weights
from headprune.signals.spec import is_expert
from headprune.tasks import Task, own_batches
from headprune.units import Site

TARGET_BYTES = 1 << 32  # bytes of targets that are kept in memory


@dataclass
class _Parts:
    """Outputs of one site in one batch, one entry per application."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    streams: list[torch.Tensor] = field(default_factory=list)
    squares: dict[int, torch.Tensor] = field(default_factory=dict)  # of the gradients, by application
    routed: bool = False

    @property
    def added(self) -> bool:
        """Whether every output is added to a residual stream of its shape."""
        shapes = [part.shape for part in self.streams]
        return shapes == [part.shape for part in self.outputs]


class TargetRecorder:
    """Records outputs of sites for real tokens, and the residual streams that they are added to; with gradients
    enabled, also the squared gradient at each token. With `kept=False` it records only which sites run, and in which
    order."""

    def __init__(
        self, task: Task, *, kept: bool = True, scratch: Path | None = None, limit: MemoryLimit | None = None
    ) -> None:
        self.task, self.kept, self.scratch, self.limit = task, kept, scratch, limit
        self.targets: dict[int, Target] = {}  # in the order in which sites run
        self._batch: Mapping[str, Any] | None = None
        self._parts: dict[int, _Parts] = {}

    @contextmanager
    def watching(self, model: PreTrainedModel, sites: Sequence[Site]) -> Iterator[None]:
        pairs = [(model.get_submodule(site.o), self._output_hook(site)) for site in sites]
        with hooks(pairs), streams(model, sites, self._see_stream):
            yield

    def begin(self, batch: Mapping[str, Any] | None) -> None:
        """Start of a batch; with None nothing is recorded."""
        self._batch, self._parts = batch, {}

    def end(self, number: int) -> None:
        """End of the batch, which has this number in all the data."""
        for index, parts in self._parts.items():
            if index not in self.targets:
                outputs, added = (
                    ActivationStore(self.scratch, f"{name}-{index}", self.limit) for name in ("output", "stream")
                )
                self.targets[index] = Target(outputs, added, [] if torch.is_grad_enabled() else None)
            target = self.targets[index]
            target.numbers.append(number)
            target.routed |= parts.routed
            target.applications = max(target.applications, len(parts.outputs))
            if self.kept:
                target.outputs.append(_joined(parts.outputs))
                if target.streams is not None and parts.added:
                    target.streams.append(_joined(parts.streams))
                else:
                    target.streams = None
            if target.weights is not None:
                # An application that the predictions do not depend on, such as the last of a branch, has no gradient.
                squares = [parts.squares.get(n, torch.zeros(len(part))) for n, part in enumerate(parts.outputs)]
                target.weights.append(_joined(squares))

    def _output_hook(self, site: Site) -> Any:
        def record(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            if self._batch is None:
                return output
            batch, parts = self._batch, self._parts.setdefault(site.index, _Parts())
            parts.routed |= is_expert(site) and output.dim() == 2
            if self.kept:
                # A copy, since the code of a model may add to it in place.
                parts.outputs.append(real_outputs(site, batch, output, self.task)[0].to("cpu", copy=True))
            if not torch.is_grad_enabled():
                return output
            output = tracked_output(output)
            application = len(parts.outputs) - 1

            def record_gradient(gradient: torch.Tensor) -> None:
                tokens, _ = real_outputs(site, batch, gradient, self.task)
                parts.squares[application] = widened(tokens).square().sum(1).cpu()

            at_gradient(output, record_gradient)
            return output

        return record

    def _see_stream(self, site: Site, stream: torch.Tensor) -> None:
        if self._batch is not None and self.kept:
            real, _ = real_outputs(site, self._batch, stream, self.task)
            self._parts[site.index].streams.append(real.to("cpu", copy=True))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class DenseTargets:
    """The targets of all sites, from one pass over the data: up to `memory` bytes of them in memory, the rest in a
    temporary folder.

    Each of several processes keeps those of its own batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        *,
        weighted: bool = True,
        memory: int = TARGET_BYTES,
    ) -> None:
        self.batches, self.task = batches, task
        self._folder = tempfile.TemporaryDirectory(prefix="headprune-targets-")  # removed with this object
        self.walkable = is_walkable(model, sites, batches, task)
        recorder = TargetRecorder(task, scratch=Path(self._folder.name), limit=MemoryLimit(memory))
        with distributed.fail_together(), evaluating(model), frozen(model), torch.set_grad_enabled(weighted):
            for number, _, raw in own_batches(batches, "running the dense model for repairs"):
                batch = task.prepare(raw, input_device(model))
                recorder.begin(batch)
                with recorder.watching(model, sites):
                    inputs = task.inputs(batch)
                    output = forward(model, task, inputs) if weighted else model(**few_logits(model, inputs))
                if weighted:
                    root, gradient = start_backward("logit-signs", "sample", task, logits_of(task, output), None, batch)
                    if root.requires_grad:
                        root.backward(gradient)
                recorder.end(number)
        self.targets = self._of_all_processes(recorder.targets, weighted)
        if weighted:
            for target in self.targets.values():
                target.weights = _weights(target.weights or [], target.numbers)

    def _of_all_processes(self, local: dict[int, Target], weighted: bool) -> dict[int, Target]:
        """All processes know the same sites in the same order, and do without streams where one of them has none."""
        about = {index: (target.streams is None, target.routed) for index, target in local.items()}
        whole: dict[int, tuple[bool, bool]] = {}
        for share in distributed.all_gather(about):
            for index, (bare, routed) in share.items():
                flags = whole.get(index, (False, False))
                whole[index] = flags[0] or bare, flags[1] or routed
        targets = {}
        for index, (bare, routed) in whole.items():
            nothing = Target(ActivationStore(), ActivationStore(), [] if weighted else None)
            targets[index] = local.get(index, nothing)
            targets[index].routed = routed
            targets[index].streams = None if bare else targets[index].streams
        return targets

    def repair(self, model: PreTrainedModel, sites: Sequence[Site], kind: RepairKind) -> list[Repair]:
        """Repair all sites of the model as it is now."""
        passes = SitePasses(model, sites, self.batches, self.task, walkable=self.walkable)
        return repair_front_to_back(model, sites, self.targets, passes, kind)


def _weights(squares: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    """From the squared gradients of this process's batches, whose mean is that over the batches of all processes."""
    local = dict(zip(numbers, [(part.double().sum(), len(part)) for part in squares], strict=True))
    sums = {number: part for share in distributed.all_gather(local) for number, part in share.items()}
    # Added up in the order of batches, whoever has them: a mean that differs in its last bit would show in the weights.
    total = sum(sums[number][0] for number in sorted(sums))
    mean = torch.as_tensor(total, dtype=torch.float64) / max(1, sum(count for _, count in sums.values()))
    return [token_weights(part, mean) for part in squares]
