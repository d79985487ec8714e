"""What passes at a site, and what it costs when it changes: inputs of output maps, and gradients at what they give.

Kept token by token, since what a change does to a sample is the sum over its tokens, which pull together or against
each other; no second moments can tell that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import widened
from headprune.hooks.attach import hooks
from headprune.hooks.logits import States, few_logits, forward, logits_of
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import frozen
from headprune.signals.moments import real_outputs
from headprune.signals.objectives import start_backward
from headprune.tasks import Task, own_batches
from headprune.units import Site

DRAWS = 2  # of random signs, where there are enough logits for them to differ
FLOOR = 0.1  # weight of a token that nothing depends on, relative to one that is sensitive on average


@dataclass
class Sensitivity:
    """Real tokens of all the data at one site."""

    inputs: torch.Tensor  # [tokens x in]
    gradients: list[torch.Tensor]  # per draw [tokens x out]; none where no gradient was asked for
    samples: torch.Tensor  # [tokens]: the sample of each

    @property
    def weights(self) -> torch.Tensor:
        """How much each token counts."""
        if not self.gradients:
            return self.inputs.new_ones(len(self.inputs))
        return token_weights(sum(own.square().sum(1) for own in self.gradients))  # type: ignore[arg-type]

    def metric(self, across: int) -> torch.Tensor:
        """E[g g^T], by which errors of the output are measured; as they are where there is no gradient."""
        if not self.gradients:
            return torch.eye(across, dtype=torch.float64)
        products = sum(own.t() @ own for own in self.gradients)
        return products.double() / max(len(self.inputs) * len(self.gradients), 1)  # type: ignore[union-attr]

    def effect(self, change: torch.Tensor) -> float:
        """The mean over samples of the squared effect on the logits, when the outputs change so, [tokens x out]."""
        count = int(self.samples.max()) + 1 if len(self.samples) else 1
        total = 0.0
        for own in self.gradients:
            pulled = torch.zeros(count, dtype=torch.float64).index_add_(
                0, self.samples, (own * change).sum(1, dtype=torch.float64)
            )
            total += float(pulled.square().sum())
        return total / max(len(self.gradients), 1) / count


def token_weights(squares: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens by how much the logits depend on them, from squared gradients and their mean over all tokens;
    by the root, so that a few do not drown all others."""
    mean = squares.double().mean() if mean is None else mean
    if not (torch.isfinite(mean) and mean > 0):
        return torch.ones_like(squares)
    return ((squares.double() / mean).sqrt() + FLOOR).to(squares)


@dataclass
class _Parts:
    """What passed at one site in one batch."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)  # per draw


def gather_sensitivity(
    model: PreTrainedModel,
    sites: Sequence[Site],
    batches: Iterable[Mapping[str, Any]],
    task: Task,
    *,
    gradients: bool = True,
) -> dict[int, Sensitivity]:
    """From one forward pass over the data and, with gradients, a backward pass for each draw of signs. Several
    processes share the batches, and each gets all tokens of the sites that are its own (`own_sites`)."""
    found: dict[int, dict[int, _Parts]] = {}  # by site and batch
    wanted = [site for site in sites if site.kept]
    with distributed.fail_together():
        for number, first, raw in own_batches(batches):
            batch = task.prepare(raw, input_device(model))
            outputs: dict[int, list[torch.Tensor]] = {}
            seen: dict[int, _Parts] = {}
            pairs = [(model.get_submodule(s.o), _watcher(s, batch, task, seen, first, outputs)) for s in wanted]
            with evaluating(model), frozen(model), torch.set_grad_enabled(gradients), hooks(pairs):
                if gradients:
                    logits = logits_of(task, forward(model, task, task.inputs(batch)))
                    if logits.requires_grad:
                        _backward(logits, task, batch, wanted, outputs, seen)
                else:
                    model(**few_logits(model, task.inputs(batch)))
            for index, own in seen.items():
                found.setdefault(index, {})[number] = own
    whole = {}
    for site, process in zip(wanted, _owners(wanted), strict=True):
        shares = distributed.gather_to(found.pop(site.index, {}), process)
        parts = {number: one for share in shares or () for number, one in share.items()}
        if parts:
            whole[site.index] = _joined([parts[number] for number in sorted(parts)])
    return whole


def own_sites(sites: Sequence[Site]) -> list[Site]:
    """The sites that this process scores, of those whose tokens were gathered together."""
    wanted = [site for site in sites if site.kept]
    return [site for site, process in zip(wanted, _owners(wanted), strict=True) if process == distributed.rank()]


def _owners(sites: Sequence[Site]) -> list[int]:
    return distributed.shares([float(site.size * site.width) ** 2 for site in sites])


def _joined(parts: Sequence[_Parts]) -> Sensitivity:
    return Sensitivity(
        torch.cat([inputs for own in parts for inputs in own.inputs]),
        [torch.cat([own.gradients[draw] for own in parts]) for draw in range(len(parts[0].gradients))],
        torch.cat([samples for own in parts for samples in own.samples]),
    )


def draws_for(logits: torch.Tensor | States) -> int:
    """Of two logits, added up with signs that add up to 0, there is one sum only."""
    return DRAWS if logits.shape[1:].numel() > 2 else 1


def _backward(
    logits: torch.Tensor | States,
    task: Task,
    batch: Mapping[str, Any],
    sites: Sequence[Site],
    outputs: Mapping[int, Sequence[torch.Tensor]],
    found: Mapping[int, _Parts],
) -> None:
    draws = draws_for(logits)
    seen = [site for site in sites if site.index in outputs]
    tensors = [output for site in seen for output in outputs[site.index]]
    for draw in range(draws):
        root, start = start_backward("logit-signs", "sample", task, logits, None, batch, draw=draw)
        gradients = iter(torch.autograd.grad(root, tensors, start, retain_graph=draw + 1 < draws, allow_unused=True))
        for site in seen:
            own = [
                real_outputs(site, batch, torch.zeros_like(output) if (g := next(gradients)) is None else g, task)[0]
                for output in outputs[site.index]
            ]
            found[site.index].gradients.append(widened(torch.cat(own)).cpu())


def _watcher(
    site: Site,
    batch: Mapping[str, Any],
    task: Task,
    found: dict[int, _Parts],
    first: int,
    outputs: dict[int, list[torch.Tensor]],
) -> Any:
    """A hook of an output map that keeps what it is given, and what it gives for the backward pass to reach."""

    def watch(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        tokens, rows = real_outputs(site, batch, args[0], task)
        parts = found.setdefault(site.index, _Parts())
        parts.inputs.append(widened(tokens).cpu())
        parts.samples.append(rows.cpu() + first)
        if torch.is_grad_enabled():
            output = output if output.requires_grad else output.detach().requires_grad_(True)
            outputs.setdefault(site.index, []).append(output)
        return output

    return watch
