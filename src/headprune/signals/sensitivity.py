"""What it costs when the output of a site changes: second moments of the objective's gradient there.

A change e of a site's output at one token changes the objective by <g, e>, so E <g, e>^2 = tr(M E[e e^T]) for changes
that are independent of the gradient, with M = E[g g^T]. Together with the moments of what the output map is given,
this tells what any change of the map would do, without running the model again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import frozen, hooks
from headprune.signals.moments import FOLDS, Moments, real_outputs
from headprune.signals.objectives import start_backward
from headprune.task import Labels, Task, batch_size
from headprune.units import Site


@dataclass
class Sensitivity:
    """Sums over the data for one site, all in float64."""

    moments: Moments  # of what the output map is given
    metric: torch.Tensor  # [out x out]: the sum over tokens of g g^T; empty where no gradient was asked for
    effects: list[torch.Tensor] = field(default_factory=list)  # per sample <g, y> over its tokens
    pulls: list[torch.Tensor] = field(default_factory=list)  # per sample the sum of g over its tokens

    def whole(self, weight: torch.Tensor, mean: torch.Tensor) -> float:
        """The mean over samples of the squared effect of everything that the map [out x in] adds beyond its mean."""
        if not self.effects:
            return 0.0
        change = torch.cat(self.effects) - torch.cat(self.pulls) @ (weight.double() @ mean)
        return float(change.square().mean())


def gather_sensitivity(
    model: PreTrainedModel,
    sites: Sequence[Site],
    batches: Iterable[Mapping[str, Any]],
    task: Task,
    *,
    objective: str | None = "logit-signs",
    labels: Labels = "given",
) -> dict[int, Sensitivity]:
    """From one forward and one backward pass over the data, or from the forward alone where no objective is named."""
    found: dict[int, Sensitivity] = {}
    first = 0
    wanted = [site for site in sites if site.kept]
    for raw in batches:
        batch = task.prepare(raw, next(model.parameters()).device)
        size = batch_size(batch)
        effects = {site.index: torch.zeros(size, dtype=torch.float64) for site in wanted}
        pulls: dict[int, torch.Tensor] = {}
        pairs = [
            (model.get_submodule(site.o), _watcher(site, batch, task, found, first, effects, pulls, objective))
            for site in wanted
        ]
        with evaluating(model), frozen(model), torch.set_grad_enabled(objective is not None), hooks(pairs):
            logits = task.logits(model(**task.inputs(batch)))
            if objective is not None:
                targets = task.targets(batch, logits.detach(), labels) if objective == "loss" else None
                root, gradient = start_backward(objective, "sample", task, logits, targets, batch)
                if root.requires_grad:
                    root.backward(gradient)
        for site in wanted:
            if site.index in pulls:
                found[site.index].effects.append(effects[site.index])
                found[site.index].pulls.append(pulls[site.index])
        first += size
    for known in found.values():
        known.moments = Moments(
            known.moments.shift, known.moments.total, known.moments.products, known.moments.counts, first
        )
    return found


def _watcher(
    site: Site,
    batch: Mapping[str, Any],
    task: Task,
    found: dict[int, Sensitivity],
    first: int,
    effects: dict[int, torch.Tensor],
    pulls: dict[int, torch.Tensor],
    objective: str | None,
) -> Any:
    """A hook of an output map that takes in what it is given, and later the gradient at what it gives."""

    def watch(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        tokens, rows = real_outputs(site, batch, args[0], task)
        if len(tokens):
            if site.index not in found:
                about = Moments.about(tokens[rows == rows[0]].double().mean(0).cpu())
                across = output.shape[-1] if objective is not None else 0
                found[site.index] = Sensitivity(about, torch.zeros(across, across, dtype=torch.float64))
            found[site.index].moments.add(tokens, (rows + first) % FOLDS)
        if objective is None:
            return output
        output = output if output.requires_grad else output.detach().requires_grad_(True)
        bias = None if module.bias is None else module.bias.detach()
        given = output.detach() if bias is None else output.detach() - bias

        def read(gradient: torch.Tensor) -> None:
            own, samples = real_outputs(site, batch, gradient, task)
            outputs, _ = real_outputs(site, batch, given, task)
            own, samples = own.double().cpu(), samples.cpu()
            found[site.index].metric += own.t() @ own
            products = (own * outputs.double().cpu()).sum(1)
            effects[site.index].index_add_(0, samples, products)
            known = pulls.setdefault(site.index, own.new_zeros(len(effects[site.index]), own.shape[1]))
            known.index_add_(0, samples, own)

        output.register_hook(read)
        return output

    return watch
