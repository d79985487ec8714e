"""Self-attention attribution (Hao et al. 2021): integrated gradients of the label's probability along scaled attention.

Attr = A * mean_k dF/dA at (k/m) A, with the attention of one site replaced and the others unchanged. The output of
a head is Z = A V, so the replacement is (k/m) A V and dF/dA = (dF/dZ) V^T: no probabilities are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.errors import DataError, UnsupportedModelError
from headprune.hooks.attach import hooks
from headprune.hooks.attention_blocks import Rows
from headprune.hooks.attention_probabilities import probabilities
from headprune.hooks.logit_blocks import few_logits, forward, logits_of
from headprune.hooks.site_activations import site_callbacks
from headprune.signals.entropy import real_entries
from headprune.signals.objectives import start_backward
from headprune.signals.spec import Meter, Request, View
from headprune.units import Site


@dataclass(frozen=True)
class Attribution(Request):
    """Largest self-attention attribution of each sample (Hao et al. 2021), integrated in `steps` steps per site."""

    needs: ClassVar[tuple[str, ...]] = ("gradients", "attention probabilities")
    steps: int = 20

    @property
    def needs_labels(self) -> bool:
        return True

    def meter(self, view: View) -> Meter:
        return _AttributionMeter(self, view)


class _AttributionMeter(Meter):
    """Runs further passes after the shared one: `steps` for every site."""

    def __init__(self, request: Attribution, view: View) -> None:
        super().__init__(request, view)
        self.largest = view.blank()

    def rows(self, site: Site, rows: Rows) -> None:
        # Before the passes of `after`, since samples that cannot be separated have to run one at a time.
        self.view.rows.per_sample(site.o, len(rows.probabilities))

    def after(self, targets: torch.Tensor | None) -> None:
        if self.view.task.rows(self.view.batch) > 1:
            raise UnsupportedModelError(
                f"Attribution does not support the task {self.view.task.name!r}; use his or gnorm."
            )
        if targets is None or targets.is_floating_point():
            raise DataError('Attribution needs a label per sample; add "labels", or use labels="self".')
        with torch.enable_grad():
            for site in self.view.sites:
                if site.kept and site.attention:
                    values = _site_attribution(self.view, site, self.request.steps, targets)
                    self.largest[:, site.index, list(site.kept)] = values.to(self.largest)

    def answer(self) -> torch.Tensor:
        return self.largest


def _site_attribution(view: View, site: Site, steps: int, targets: torch.Tensor) -> torch.Tensor:
    model, task = view.model, view.task
    inputs = task.inputs(view.batch)
    maps: list[tuple[torch.Tensor, torch.Tensor]] = []
    with (
        torch.no_grad(),
        probabilities(
            model,
            [site],
            lambda _, rows: maps.append((rows.probabilities, _counted(site, view, rows))),
            whole=True,
            check=True,
        ),
    ):
        model(**few_logits(model, inputs))
    if not maps:  # the site does not run on this batch
        return torch.zeros(view.size, site.size)
    sums = [torch.zeros_like(widened(weights)) for weights, _ in maps]
    for step in range(1, steps + 1):
        # Later applications of a tied site have other values than in the unchanged run; those of this run are used.
        values: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        with (
            site_callbacks(model, [site], projection=_collector(model, site, values)),
            hooks(
                [(model.get_submodule(site.o), _replacement(site, step / steps, maps, values, outputs))],
                before=True,
                first=True,
            ),
        ):
            logits = logits_of(task, forward(model, task, inputs))
        root, start = start_backward("label-probability", "sample", task, logits, targets, view.batch)
        for application, gradient in enumerate(torch.autograd.grad(root, outputs, start)):
            heads = widened(gradient).unflatten(-1, (site.heads, -1)).transpose(1, 2)
            scaled = widened(values[application]).detach()
            sums[application] += heads @ scaled.transpose(-1, -2) / steps
    best: torch.Tensor | None = None
    for (weights, counted), mean in zip(maps, sums, strict=True):
        attribution = widened(weights) * mean
        largest = attribution.masked_fill(~counted, -torch.inf).flatten(2).max(-1).values
        largest = largest.unflatten(0, (view.size, -1)).amax(1)  # of several windows of an image
        best = largest if best is None else torch.maximum(best, largest)
    assert best is not None
    return best


def _collector(
    model: PreTrainedModel, site: Site, values: list[torch.Tensor]
) -> Callable[[Site, str, torch.Tensor, torch.Tensor], None]:
    def collect(_: Site, path: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if path == site.roles["v"].module:
            values.append(_by_head(model, site, outputs))

    return collect


def _replacement(
    site: Site,
    scale: float,
    maps: Sequence[tuple[torch.Tensor, torch.Tensor]],
    values: Sequence[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Callable[..., Any]:
    """A pre-hook of the output projection that replaces its input by the scaled attention of the unchanged run."""

    def replace(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        weights, _ = maps[len(outputs)]
        heads = (scale * weights).to(args[0].dtype) @ values[len(outputs)]
        outputs.append(heads.transpose(1, 2).reshape(args[0].shape))
        return (outputs[-1], *args[1:])

    return replace


def _by_head(model: PreTrainedModel, site: Site, projected: torch.Tensor) -> torch.Tensor:
    """Values [batch, query heads, keys, width] from the output of the value projection, and the learned
    values of heads."""
    values = site.roles["v"].split(projected).transpose(1, 2).repeat_interleave(site.group, dim=1)
    if not site.memory:
        return values
    module: Any = model.get_submodule(site.path)
    learned = module.memory()[1].to(values)
    return torch.cat([values, learned.expand(len(values), -1, -1, -1)], dim=2)


def _counted(site: Site, view: View, rows: Rows) -> torch.Tensor:
    real, valid = real_entries(site, view, rows)
    return valid & real.unsqueeze(-1)
