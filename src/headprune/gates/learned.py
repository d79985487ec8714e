"""Gates that learn, installed on a model: a parameter per gate, drawn anew in every forward pass of the training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headprune.errors import GateError
from headprune.gates.change import Changes
from headprune.gates.config import GateConfig
from headprune.gates.hard_concrete import THRESHOLD
from headprune.gates.places import Place, places_of, without_adapters
from headprune.gates.target import target_of
from headprune.hooks.attach import HookedSite, at_gradient, attach_hook
from headprune.hooks.gates import InstalledGates
from headprune.hooks.offload import refuse_offloaded
from headprune.units import Member, Site, sites_of
from headprune.units.linear import refuse_quantized

NAME = "headprune_gates"  # of the module that is installed on a model
MEMORY = 0.95  # share of what a multiplier rests on that stays from step to step


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
    """

    sites: Sequence[Site]
    bias: nn.Parameter
    taken: torch.Tensor
    worth: torch.Tensor
    costs: torch.Tensor
    sizes: torch.Tensor  # members behind each gate
    sums: torch.Tensor  # what `Changes` has seen
    _gradient: torch.Tensor

    def __init__(
        self, model: nn.Module, config: GateConfig | None = None, *, steps: int | None = None, **options: Any
    ) -> None:
        config = GateConfig(**options) if config is None else dataclasses.replace(config, **options)
        plain = plain_model(model)
        refuse_quantized(plain, "gated")
        refuse_offloaded(plain, "trained with gates")
        if hasattr(plain, NAME):
            raise GateError("This model has learned gates already; remove() or detach() them first.")
        with without_adapters(plain):
            sites = sites_of(plain, config.kinds)
            places = places_of(sites, config.kinds, config.group)
            target = target_of(plain, sites, places, config)
        super().__init__(plain, [place.site for place in places])
        self.config, self.places, self.target, self.total = config, places, target, steps
        self._given: list[Any] = [model]
        self._of_site = {place.site.index: place for place in self.places}
        # The shift and the decision that a forward pass began with: what is computed again in its backward pass, for
        # gradient checkpointing, has to see the same.
        self._now: tuple[float, torch.Tensor | None] | None = None
        self._depth = 0  # of calls that are inside a forward pass
        self._forwards, self._arrived = 0, False  # passes since gradients came, and whether some have
        self._scale = 1.0  # what the loss of gates was multiplied by when its gradient came
        self.ended = False  # whether they are decided as at the end of the training, whenever it ends
        self.batch: Mapping[str, Any] = {}
        self.seen: Mapping[str, Any] | None = None
        self.observing = config.l0 is None  # whether gradients are looked at as they come
        self.noise: torch.Tensor | None = None
        device = next(plain.parameters()).device
        # log alpha, but for the shift of a target. Trainers leave what is called a bias out of weight decay, which
        # would pull gates towards half open.
        self.bias = nn.Parameter(torch.full((len(target.each),), float(self.config.start), device=device))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long, device=device))
        # Of a target: what open gates did for the task, and what they took of the budget, in the last steps.
        self.register_buffer("worth", torch.zeros(2, device=device))
        self.register_buffer("_gradient", torch.zeros(len(target.each), device=device), persistent=False)
        self.register_buffer("costs", torch.zeros(len(target.each), device=device))
        sizes = [len(ids) for place in places for ids in place.members]
        self.register_buffer("sizes", torch.tensor(sizes, device=device), persistent=False)
        for place in self.places:
            self.register_buffer(f"owners_{place.site.index}", place.owners().to(device), persistent=False)
        self.changes = Changes(self) if config.difference else None
        self.train(plain.training)
        self.attach()

    def __len__(self) -> int:
        return len(self.bias)

    # --- on the model ---

    def attach(self) -> LearnedGates:
        super().attach()
        self.model.add_module(NAME, self)
        # The outermost call draws; under an adapter the model's own `__call__` is left out, and that of its base runs.
        for module in {id(part): part for part in (self.model, getattr(self.model, "base_model", self.model))}.values():
            self._handles.append(attach_hook(module, self._before, before=True, with_kwargs=True))
            self._handles.append(attach_hook(module, self._after))
        if self.changes is not None:
            self._handles += self.changes.attach()
        return self

    def detach(self) -> None:
        super().detach()
        if getattr(self.model, NAME, None) is self:
            delattr(self.model, NAME)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Gates stay in float32 wherever a model goes: steps of a learning rate are lost in half of it."""
        floats = {name: value.detach().clone() for name, value in self._floats()}
        result = super()._apply(fn, recurse)
        for name, value in self._floats():
            if value.dtype != torch.float32:
                value.data = floats[name].to(value.device)
        return result

    def _floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return ((name, value) for name, value in own if value.is_floating_point())

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.batch = kwargs
        if module is self.model:
            self.seen = kwargs
            self._depth = 0  # a pass before may have ended with an error
        learning = self.training and torch.is_grad_enabled()
        if self._depth == 0 and learning:
            self._forwards = 1 if self._arrived else self._forwards + 1
            self._arrived = False
        self._depth += 1
        self._now = self.shift, None if self.training else self.open()
        if learning:
            self.draw()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def draw(self) -> None:
        """New noise, for all sites at once and outside of what gradient checkpointing computes twice."""
        self.noise = torch.rand_like(self.bias)

    # --- what they are ---

    @property
    def log_alpha(self) -> torch.Tensor:
        """[gates], with the shift that a target asks for."""
        return self.bias - self.shift

    @property
    def shift(self) -> float:
        """By how much all gates are less open than their biases say, to meet the target as it is now."""
        return 0.0 if self.config.l0 is not None else self.target.shift(self.bias, self._offset, self.ramp)

    @property
    def _offset(self) -> float:
        """A straight-through gate is open above its threshold, which log alpha 0 is at; others above 0."""
        return 0.0 if self.config.straight_through else self.config.distribution.offset

    def forward(self, site: HookedSite) -> torch.Tensor:
        place = self._of_site[site.index]
        values = self.values(place)
        if self.config.rescale:
            present = (values.detach() * self.sizes[place.gates]).sum()
            values = values * torch.where(present > 0, len(site.kept) / present.clamp_min(1e-6), 1.0)
        return values[self.get_buffer(f"owners_{site.index}")]

    def values(self, place: Place) -> torch.Tensor:
        """The gates of a site: drawn in training, decided in evaluation."""
        shift, is_open = self._now or (self.shift, None)
        log_alpha, distribution = self.bias[place.gates] - shift, self.config.distribution
        if self.training:
            if self.noise is None:
                self.draw()
            assert self.noise is not None
            self._refuse_another_noise()
            if log_alpha.requires_grad:
                at_gradient(log_alpha, functools.partial(self._observe, place))
            return distribution.draw(log_alpha, self.noise[place.gates], straight_through=self.config.straight_through)
        decided = (self.open() if is_open is None else is_open)[place.gates].to(log_alpha)
        if self.config.straight_through:
            return decided
        value = distribution.evaluated(log_alpha)
        # A target keeps the most open gates, however open: those that stay must not silence what is kept.
        return decided * (value if self.config.l0 is not None else value.clamp_min(THRESHOLD))

    def _refuse_another_noise(self) -> None:
        """Gradient checkpointing computes layers again when gradients come; only the last draw is known then."""
        if self._depth == 0 and self._forwards > 1:
            raise GateError(
                "Several forward passes before one backward pass cannot be computed again with the gates that each of "
                "them drew; turn gradient checkpointing off, or take one forward pass at a time."
            )

    def _observe(self, place: Place, gradient: torch.Tensor) -> None:
        self._arrived = True
        if self.observing:
            self._gradient[place.gates] += gradient

    def open(self) -> torch.Tensor:
        """Bool [gates]: those that would stay if the training ended now. With a target they are the most open ones that
        it allows; without, those above the threshold (straight-through) or above 0."""
        return self._decide().to(self.bias.device)

    def _decide(self) -> torch.Tensor:
        worth = self.bias.detach().float().cpu()
        protected = [place.gates for place in self.places if place.site.obstacle_to_emptying]
        if self.config.l0 is None:
            return self.target.affordable(worth, protected, self.ramp)
        above = self.config.distribution.evaluated(worth) > (THRESHOLD if self.config.straight_through else 0.0)
        for own in protected:
            above[own.start + int(worth[own].argmax())] = True
        return above

    def open_probability(self) -> torch.Tensor:
        """How likely each gate is to be open in a forward pass of the training."""
        return torch.sigmoid(self.log_alpha + self._offset)

    # --- what they cost ---

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
        """What to add to the loss of the task, once per step of the optimizer; every call counts as a step.

        It is the L0 loss with its weight, or the price of what is open under a target; and the squared changes that
        closing would bring, if they are asked for.
        """
        if not self.bias.requires_grad:
            raise GateError(
                "These gates are frozen, so they cannot learn; put an adapter on the model before the gates, or call "
                "gates.requires_grad_(True)."
            )
        if self.training and self.observing:
            self._learn_from_what_came()
        value = self.l0_loss() if self.config.l0 is not None else self._priced()
        if self.changes is not None:
            if self.training:
                self.changes.take()
            value = value + self.config.difference * ((1 - self.open_probability()) * self.costs).sum()
        if self.training:
            self.taken += 1
        if value.requires_grad and self.observing:
            at_gradient(value, self._see_scale)
        return value

    def _see_scale(self, gradient: torch.Tensor) -> None:
        self._scale = float(gradient) or 1.0

    @torch.no_grad()
    def _learn_from_what_came(self) -> None:
        """Gradients of the task since the last time. They were multiplied by what the loss of gates was, too: a share
        for accumulated batches, or the scale of half precision."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._gradient)
            self._gradient /= torch.distributed.get_world_size()
        self.learn_price(self._gradient / self._scale)
        self._gradient.zero_()

    def _priced(self) -> torch.Tensor:
        return self.multiplier * (self.target.each.to(self.bias) * self.open_probability()).sum()

    @property
    def multiplier(self) -> float:
        """What a unit of budget is worth to the task; 0 while there is enough of it."""
        done, taken = self.worth.tolist()
        return max(0.0, done / taken) if taken > 0 and self.shift > 0 else 0.0

    @torch.no_grad()
    def learn_price(self, gradient: torch.Tensor) -> None:
        """Take over what a gradient of the task's loss, with respect to the biases, says about the multiplier."""
        taken = self.target.slopes(self.open_probability()).sum()
        self.worth.mul_(MEMORY).add_(torch.stack([-gradient.sum(), taken]))

    def l0_loss(self) -> torch.Tensor:
        """The expected number of gates that are not 0, with the weight that it has now if there is one."""
        expected = self.config.distribution.open_probability(self.log_alpha).sum()
        return expected if self.config.l0 is None else self.config.l0 * self.ramp * expected

    def parameter_groups(self, learning_rate: float, **settings: Any) -> list[dict[str, Any]]:
        """Groups for an optimizer: the parameters of the model that train, and the gates with their own learning rate
        and without weight decay."""
        (given,) = self._given
        own = {id(parameter) for parameter in self.parameters()}
        others = [p for p in given.parameters() if p.requires_grad and id(p) not in own]
        rate = self.config.rate * learning_rate
        return [
            {"params": others, "lr": learning_rate, **settings},
            {"params": list(self.parameters()), "lr": rate, **settings, "weight_decay": 0.0},
        ]

    # --- what to say of them ---

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Numbers for a log: members that are expected to be left, those that would stay now, and the L0 loss."""
        return {
            "expected_units": round(float((self.open_probability() * self.sizes).sum()), 4),
            "open_units": int((self.open() * self.sizes).sum()),
            "l0_loss": float(self.l0_loss()),
        }

    def closed(self) -> list[Member]:
        """The members that leave with `remove`, in original ids. A target counts as it was asked for, also where the
        training ended before the warm-up did."""
        ended, self.ended = self.ended, True
        is_open = self.open().tolist()
        self.ended = ended
        return [
            member
            for place in self.places
            for number in range(len(place.members))
            if not is_open[place.first + number]
            for member in place.behind(number)
        ]

    # --- the end ---

    def remove(self, *, verify: Mapping[str, Any] | None = None) -> Any:
        """Take the gates off and what is closed out of the weights, in place; returns the model.

        What open gates multiply by goes into the output maps. The outputs on the batch `verify`, or on two samples of
        what the model saw last, are compared with those of the model with its gates; if they differ, everything is as
        it was, but that adapters are merged by then.
        """
        from headprune.gates.closing import close

        return close(self, verify)


def plain_model(model: Any) -> Any:
    """The model without what peft wraps it in."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
