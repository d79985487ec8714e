"""What a dense model does on the calibration data, for repairs of what becomes of it.

Kept for every site and every real token: what the site gives, the residual stream that this is added to (if it simply
is), and how much the logits depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import widened
from headprune.hooks.attach import at_gradient, hooks
from headprune.hooks.logits import few_logits, forward, logits_of
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.streams import streams
from headprune.hooks.watch import frozen
from headprune.repair.passes import Passes
from headprune.repair.solve import Compensation, Repair
from headprune.repair.sweep import Target, sweep
from headprune.signals.moments import real_outputs
from headprune.signals.objectives import start_backward
from headprune.signals.sensitivity import token_weights
from headprune.signals.spec import is_expert
from headprune.tasks import Task, own_batches
from headprune.units import Site


class DenseOutputs:
    """The targets of all sites, from one pass over the data; repairs of later models count theirs in `forwards`.

    Of several processes, each keeps those of its own batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        *,
        weighted: bool = True,
    ) -> None:
        self.batches, self.task = batches, task
        self.targets: dict[int, Target] = {}  # in the order in which sites run
        self.forwards = 3.0 if weighted else 1.0  # passes over the data so far; a backward pass counts as two
        with distributed.fail_together():
            for number, _, batch in own_batches(batches):
                self._take_in(model, sites, number, task.prepare(batch, input_device(model)), weighted)
        self._agree(weighted)
        if weighted:
            for target in self.targets.values():
                target.weights = _weights(target.weights or [], target.numbers)

    def _agree(self, weighted: bool) -> None:
        """All processes know the same sites in the same order, and do without streams where one of them has none."""
        about = {index: (target.streams is None, target.routed) for index, target in self.targets.items()}
        whole: dict[int, tuple[bool, bool]] = {}
        for share in distributed.all_gather(about):
            for index, (bare, routed) in share.items():
                known = whole.get(index, (False, False))
                whole[index] = known[0] or bare, known[1] or routed
        targets = {index: self.targets.get(index, Target([], [], [] if weighted else None)) for index in whole}
        for index, (bare, routed) in whole.items():
            targets[index].routed = routed
            targets[index].streams = None if bare else targets[index].streams
        self.targets = targets

    def _take_in(
        self, model: PreTrainedModel, sites: Sequence[Site], number: int, batch: Mapping[str, Any], weighted: bool
    ) -> None:
        given: dict[int, list[torch.Tensor]] = {}
        streaming: dict[int, list[torch.Tensor]] = {}
        pulls: dict[int, list[torch.Tensor]] = {}
        flat: dict[int, list[bool]] = {}  # whether tokens come without an axis of samples, as those of experts do

        def keep(site: Site) -> Any:
            def note(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
                if weighted and not output.requires_grad:
                    output = output.detach().requires_grad_(True)
                flat.setdefault(site.index, []).append(output.dim() == 2)
                given.setdefault(site.index, []).append(real_outputs(site, batch, output, self.task)[0].cpu())
                if weighted:
                    at_gradient(output, lambda gradient: _note_pull(pulls, site, batch, gradient, self.task))
                return output

            return note

        def see(site: Site, stream: torch.Tensor) -> None:
            streaming.setdefault(site.index, []).append(real_outputs(site, batch, stream, self.task)[0].cpu())

        with ExitStack() as stack:
            for context in (evaluating(model), frozen(model), torch.set_grad_enabled(weighted)):
                stack.enter_context(context)
            stack.enter_context(hooks([(model.get_submodule(site.o), keep(site)) for site in sites]))
            with streams(model, sites, see):
                inputs = self.task.inputs(batch)
                output = forward(model, self.task, inputs) if weighted else model(**few_logits(model, inputs))
            if weighted:
                logits = logits_of(self.task, output)
                root, gradient = start_backward("logit-signs", "sample", self.task, logits, None, batch)
                if root.requires_grad:
                    root.backward(gradient)
        for index, parts in given.items():
            routed = is_expert(sites[index]) and any(flat[index])
            both = streaming.get(index, [])
            whole = len(both) == len(parts) and all(a.shape == b.shape for a, b in zip(parts, both, strict=True))
            target = self.targets.setdefault(index, Target([], [] if whole else None, [] if weighted else None))
            target.numbers.append(number)
            target.outputs.append(torch.cat(parts))
            target.routed |= routed
            if target.streams is not None and whole:
                target.streams.append(torch.cat(both))
            else:
                target.streams = None
            if target.weights is not None:
                count = len(target.outputs[-1])
                own = torch.cat(pulls[index][::-1]) if index in pulls else torch.zeros(count)
                target.weights.append(own)

    def repair(self, model: PreTrainedModel, sites: Sequence[Site], compensate: Compensation) -> list[Repair]:
        """Repair all sites of the model as it is now."""
        passes = Passes(model, sites, self.batches, self.task)
        repairs = sweep(model, sites, self.targets, passes, compensate)
        self.forwards += passes.forwards
        return repairs


def _note_pull(
    pulls: dict[int, list[torch.Tensor]], site: Site, batch: Mapping[str, Any], gradient: torch.Tensor, task: Task
) -> None:
    own, _ = real_outputs(site, batch, gradient, task)
    pulls.setdefault(site.index, []).append(widened(own).square().sum(1).cpu())


def _weights(squares: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    """From the squared gradients of this process's batches, whose mean is that over the batches of all processes."""
    own = dict(zip(numbers, [(own.double().sum(), len(own)) for own in squares], strict=True))
    sums = {number: part for share in distributed.all_gather(own) for number, part in share.items()}
    # Added up in the order of batches, whoever has them: a mean that differs in its last bit would show in the weights.
    total = sum(sums[number][0] for number in sorted(sums))
    mean = torch.as_tensor(total, dtype=torch.float64) / max(1, sum(count for _, count in sums.values()))
    return [token_weights(part, mean) for part in squares]
