"""Learned gates on a model: a parameter per gate; their values are sampled in every forward pass of the training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headprune.errors import GateError
from headprune.hooks.attach import HookedSite, at_gradient, attach_hook
from headprune.hooks.gates import InstalledGates
from headprune.hooks.model_lock import exclusive_method
from headprune.hooks.offload import refuse_offloaded
from headprune.training.gate_budget import gate_target
from headprune.training.gate_config import GateConfig
from headprune.training.gate_layout import SiteGates, gate_layout, without_adapters
from headprune.training.gate_reach import ReachedGates
from headprune.training.hard_concrete import THRESHOLD
from headprune.training.unit_output_change import OutputChanges
from headprune.units import Member, Site, sites_of
from headprune.units.linear import refuse_quantized

NAME = "headprune_gates"  # of the module that is installed on a model
DECAY = 0.95  # per step, of the running sums of the multiplier


class LearnedGates(InstalledGates):
    """Hard-concrete gates on the heads of a model, its groups of neurons, or both, which learn what can be closed.

        gates = headprune.LearnedGates(model, keep=0.5, steps=1000)
        optimizer = torch.optim.AdamW(gates.parameter_groups(5e-5))
        ...
            loss = model(**batch).loss + gates.loss()
        ...
        model = gates.remove(verify=batch)

    Options are the fields of `GateConfig`. `steps` is how long the training is, in calls of `loss`, which a warm-up
    goes by; call it once per step of the optimizer. From the start the gates are a part of the model: its
    `parameters()`, its `state_dict()`, its `train()` and `eval()` include them, and so do whatever saves, restores or
    distributes it. In evaluation nothing is drawn: gates are open or closed as they would be if the training ended now.
    Gates of a site that no training sample has reached stay open; `sites`, where given, are those of the model, and one
    with an obstacle gets no gates.
    """

    sites: Sequence[Site]
    bias: nn.Parameter
    taken: torch.Tensor
    worth: torch.Tensor
    costs: torch.Tensor
    reached: torch.Tensor  # bool [gates]: of sites that ran in the training
    sizes: torch.Tensor  # members behind each gate
    sums: torch.Tensor  # of `OutputChanges`, since the last step
    _gradient: torch.Tensor

    @exclusive_method
    def __init__(
        self,
        model: nn.Module,
        config: GateConfig | None = None,
        *,
        steps: int | None = None,
        sites: Sequence[Site] | None = None,
        **options: Any,
    ) -> None:
        config = GateConfig(**options) if config is None else dataclasses.replace(config, **options)
        plain = plain_model(model)
        refuse_quantized(plain, "gated")
        refuse_offloaded(plain, "trained with gates")
        if hasattr(plain, NAME):
            raise GateError("This model has learned gates already; remove() or detach() them first.")
        with without_adapters(plain):
            sites = sites_of(plain, config.kinds) if sites is None else sites
            layout = gate_layout(sites, config.kinds, config.group)
            target = gate_target(plain, sites, layout, config)
        super().__init__(plain, [site_gates.site for site_gates in layout])
        self.config, self.layout, self.target, self.total = config, layout, target, steps
        self._outer: list[Any] = [model]  # with its adapters; in a list, so that it is no submodule
        self._by_site = {site_gates.site.index: site_gates for site_gates in layout}
        # The shift and the decision at the start of a forward pass: what gradient checkpointing computes again in the
        # backward pass has to see the same.
        self._now: tuple[float, torch.Tensor | None] | None = None
        self._depth = 0  # of calls that are inside a forward pass
        self._forwards, self._arrived = (
            0,
            False,
        )  # forward passes since the last backward pass, and whether there was one
        self._scale = 1.0  # of the gradient of the gates' loss: accumulation, half precision
        self.ended = False  # decide as at the end of the training, also before it
        self.batch: Mapping[str, Any] = {}
        self.last_inputs: Mapping[str, Any] | None = None
        self.observing = config.l0 is None  # whether the multiplier is learned from gradients
        self.noise: torch.Tensor | None = None
        device = next(plain.parameters()).device
        # log alpha, but for the shift of a target. Trainers leave what is called a bias out of weight decay, which
        # would pull gates towards half open.
        self.bias = nn.Parameter(torch.full((len(target.each),), float(self.config.start), device=device))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long, device=device))
        # For a target, running sums over steps: the gain of open gates for the task, and their price.
        self.register_buffer("worth", torch.zeros(2, device=device))
        self.register_buffer("_gradient", torch.zeros(len(target.each), device=device), persistent=False)
        self.register_buffer("costs", torch.zeros(len(target.each), device=device))
        self.reach = ReachedGates(self)
        sizes = [len(ids) for site_gates in layout for ids in site_gates.members]
        self.register_buffer("sizes", torch.tensor(sizes, device=device), persistent=False)
        for site_gates in layout:
            indices = site_gates.gate_indices().to(device)
            self.register_buffer(f"indices_{site_gates.site.index}", indices, persistent=False)
        self.changes = OutputChanges(self) if config.difference else None
        self.train(plain.training)
        self.attach()

    def __len__(self) -> int:
        return len(self.bias)

    # --- on the model ---

    @exclusive_method
    def attach(self) -> LearnedGates:
        super().attach()
        self.model.add_module(NAME, self)
        # The outermost call samples; an adapter does not call the model itself but its base model.
        for module in {id(part): part for part in (self.model, getattr(self.model, "base_model", self.model))}.values():
            self._handles.append(attach_hook(module, self._before, before=True, with_kwargs=True))
            self._handles.append(attach_hook(module, self._after))
        if self.changes is not None:
            self._handles += self.changes.attach()
        return self

    @exclusive_method
    def detach(self) -> None:
        super().detach()
        if getattr(self.model, NAME, None) is self:
            delattr(self.model, NAME)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep gates in float32 whatever dtype the model is cast to: half precision would lose the steps."""
        floats = {name: value.detach().clone() for name, value in self._floats()}
        result = super()._apply(fn, recurse)
        for name, value in self._floats():
            if value.dtype != torch.float32:
                value.data = floats[name].to(value.device)
        return result

    def _floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return ((name, value) for name, value in tensors if value.is_floating_point())

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.batch = kwargs
        if module is self.model:
            self.last_inputs = kwargs
            self._depth = 0  # a pass before may have ended with an error
        learning = self.training and torch.is_grad_enabled()
        if self._depth == 0:
            if learning:
                self._forwards = 1 if self._arrived else self._forwards + 1
                self._arrived = False
            self.reach.training = learning
        self._depth += 1
        self._now = self.shift, None if self.training else self.open()
        if learning:
            self.draw()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def draw(self) -> None:
        """Sample noise for all sites at once, outside of what gradient checkpointing computes twice."""
        self.noise = torch.rand_like(self.bias)

    # --- values ---

    @property
    def log_alpha(self) -> torch.Tensor:
        """[gates], with the shift for the target."""
        return self.bias - self.shift

    @property
    def shift(self) -> float:
        """What is subtracted from all biases, so that the expected price meets the target of this step."""
        return 0.0 if self.config.l0 is not None else self.reach.target().shift(self.bias, self._offset, self.ramp)

    @property
    def _offset(self) -> float:
        """A straight-through gate is open above its threshold, which log alpha 0 is at; others above 0."""
        return 0.0 if self.config.straight_through else self.config.distribution.offset

    def forward(self, site: HookedSite) -> torch.Tensor:
        site_gates = self._by_site[site.index]
        self.reach.see(site.index)
        values = self.values(site_gates)
        if self.config.rescale:
            present = (values.detach() * self.sizes[site_gates.gates]).sum()
            values = values * torch.where(present > 0, len(site.kept) / present.clamp_min(1e-6), 1.0)
        return values[self.get_buffer(f"indices_{site.index}")]

    def values(self, site_gates: SiteGates) -> torch.Tensor:
        """The gates of a site: sampled in training, decided in evaluation."""
        shift, is_open = self._now or (self.shift, None)
        log_alpha, distribution = self.bias[site_gates.gates] - shift, self.config.distribution
        if self.training:
            if self.noise is None:
                self.draw()
            assert self.noise is not None
            self._refuse_another_noise()
            if log_alpha.requires_grad:
                at_gradient(log_alpha, functools.partial(self._observe, site_gates))
            noise = self.noise[site_gates.gates]
            return distribution.draw(log_alpha, noise, straight_through=self.config.straight_through)
        if bool(self.reach.unreached()[site_gates.first]):
            return torch.ones_like(log_alpha)
        decided = (self.open() if is_open is None else is_open)[site_gates.gates].to(log_alpha)
        if self.config.straight_through:
            return decided
        value = distribution.evaluated(log_alpha)
        # A target keeps the most open gates, however little that is: a gate that stays must not silence its members.
        return decided * (value if self.config.l0 is not None else value.clamp_min(THRESHOLD))

    def _refuse_another_noise(self) -> None:
        """Gradient checkpointing computes layers again when gradients come; only the last noise is kept for that."""
        if self._depth == 0 and self._forwards > 1:
            raise GateError(
                "Several forward passes before one backward pass cannot be computed again with the gates that each of "
                "them drew; turn gradient checkpointing off, or take one forward pass at a time."
            )

    def _observe(self, site_gates: SiteGates, gradient: torch.Tensor) -> None:
        self._arrived = True
        if self.observing:
            self._gradient[site_gates.gates] += gradient

    def open(self) -> torch.Tensor:
        """Bool [gates]: those that would stay if the training ended now. With a target they are the most open ones that
        it allows; without, those above the threshold (straight-through) or above 0."""
        return self._decide().to(self.bias.device)

    def _decide(self) -> torch.Tensor:
        worth = self.bias.detach().float().cpu()
        protected = [part.gates for part in self.layout if part.site.obstacle_to_emptying]
        unreached = self.reach.unreached().cpu()
        if self.config.l0 is None:
            return self.reach.target().affordable(worth, protected, self.ramp) | unreached
        above = self.config.distribution.evaluated(worth) > (THRESHOLD if self.config.straight_through else 0.0)
        for gates in protected:
            above[gates.start + int(worth[gates].argmax())] = True
        return above | unreached

    def open_probability(self) -> torch.Tensor:
        """How likely each gate is to be open in a forward pass of the training."""
        return torch.sigmoid(self.log_alpha + self._offset).masked_fill(self.reach.unreached(), 1.0)

    # --- losses ---

    @property
    def ramp(self) -> float:
        """How much of the warm-up is over, 0 to 1."""
        if self.config.warmup == 0 or self.ended:
            return 1.0
        if self.total is None:
            if not self.training:
                return 0.0  # nothing has been learnt yet
            raise GateError(
                "A warm-up needs to know how long the training is; give steps=... to LearnedGates, or warmup=0."
            )
        return min(1.0, int(self.taken) / max(1.0, self.config.warmup * self.total))

    def loss(self) -> torch.Tensor:
        """The term to add to the loss of the task, once per step of the optimizer; every call counts as a step.

        The L0 loss with its weight, or under a target the multiplier times the expected price; with `difference` also
        the squared changes of the outputs without each unit.
        """
        if not self.bias.requires_grad:
            raise GateError(
                "These gates are frozen, so they cannot learn; put an adapter on the model before the gates, or call "
                "gates.requires_grad_(True)."
            )
        if self.training:
            self.reach.update()
            if self.observing:
                self._learn_multiplier()
        value = self.l0_loss() if self.config.l0 is not None else self._priced()
        if self.changes is not None:
            if self.training:
                self.changes.update()
            value = value + self.config.difference * ((1 - self.open_probability()) * self.costs).sum()
        if self.training:
            self.taken += 1
        if value.requires_grad and self.observing:
            at_gradient(value, self._note_scale)
        return value

    def _note_scale(self, gradient: torch.Tensor) -> None:
        self._scale = float(gradient) or 1.0

    @torch.no_grad()
    def _learn_multiplier(self) -> None:
        """Use the task's gradients since the last step. They have the same scale as the gradient of the gates' loss: a
        share for accumulated batches, or the scale of half precision."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._gradient)
            self._gradient /= torch.distributed.get_world_size()
        self.learn_price(self._gradient / self._scale)
        self._gradient.zero_()

    def _priced(self) -> torch.Tensor:
        return self.multiplier * (self.reach.target().each.to(self.bias) * self.open_probability()).sum()

    @property
    def multiplier(self) -> float:
        """The Lagrange multiplier: the gain for the task per unit of budget; 0 while the target is met without it."""
        gain, price = self.worth.tolist()
        return max(0.0, gain / price) if price > 0 and self.shift > 0 else 0.0

    @torch.no_grad()
    def learn_price(self, gradient: torch.Tensor) -> None:
        """Update the multiplier by a gradient of the task's loss with respect to the biases."""
        price = self.reach.target().slopes(self.open_probability()).sum()
        self.worth.mul_(DECAY).add_(torch.stack([-gradient.sum(), price]))

    def l0_loss(self) -> torch.Tensor:
        """The expected number of gates that are not 0, with the weight that it has now if there is one."""
        expected = self.config.distribution.open_probability(self.log_alpha)
        expected = expected.masked_fill(self.reach.unreached(), 1.0).sum()
        return expected if self.config.l0 is None else self.config.l0 * self.ramp * expected

    def parameter_groups(self, learning_rate: float, **settings: Any) -> list[dict[str, Any]]:
        """Groups for an optimizer: the parameters of the model that train, and the gates with their own learning rate
        and without weight decay."""
        (model,) = self._outer
        gates = {id(parameter) for parameter in self.parameters()}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in gates]
        rate = self.config.rate * learning_rate
        return [
            {"params": others, "lr": learning_rate, **settings},
            {"params": list(self.parameters()), "lr": rate, **settings, "weight_decay": 0.0},
        ]

    # --- reports ---

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Numbers for a log: members that are expected to be left, those that would stay now, and the L0 loss."""
        return {
            "expected_units": round(float((self.open_probability() * self.sizes).sum()), 4),
            "open_units": int((self.open() * self.sizes).sum()),
            "l0_loss": float(self.l0_loss()),
        }

    def closed(self) -> list[Member]:
        """The members that leave with `remove`, in original ids. The full target applies, also where the
        training ended before the warm-up did."""
        ended, self.ended = self.ended, True
        is_open = self.open().tolist()
        self.ended = ended
        return [
            member
            for site_gates in self.layout
            for gate in range(len(site_gates.members))
            if not is_open[site_gates.first + gate]
            for member in site_gates.members_of(gate)
        ]

    # --- removal ---

    @exclusive_method
    def remove(self, *, verify: Mapping[str, Any] | None = None) -> Any:
        """Detach the gates and remove the closed members from the weights, in place; returns the model.

        The values of open gates are multiplied into the output projections. The outputs on the batch `verify`, or on
        two samples of the last batch, are compared with those of the gated model; if they differ, the removal is undone
        and an error raised, but adapters stay merged.
        """
        from headprune.training.gate_removal import remove_gates

        return remove_gates(self, verify)


def plain_model(model: Any) -> Any:
    """The model without what peft wraps it in."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
