"""Logits of a large vocabulary in blocks of tokens: the body of a language model runs once, its head on some tokens at
a time.

The model's own forward makes the logits, with the body standing in for itself and giving what it gave for these tokens;
so a cap, a scale or a bias of the head is the model's. That this is so is tried on the last token of every batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from headprune.batches import to_device
from headprune.hooks.calls import gives, standing_in
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating, largest_difference, numbers
from headprune.hooks.stop import StopForwardError

LIMIT = 1 << 28  # bytes of logits in float32 above which they are made in blocks
BLOCK = 1 << 25  # bytes of logits in float32 that are made together


class Predicts(Protocol):
    """What is needed to know of a task."""

    @property
    def name(self) -> str: ...
    def logits(self, output: Any) -> torch.Tensor: ...


Start = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]  # (logits, tokens) -> (root, gradient at it)


@dataclass(frozen=True)
class States:
    """What the body of a model gave for a batch: logits that are made when somebody looks at them."""

    model: PreTrainedModel
    body: nn.Module
    inputs: Mapping[str, Any]
    output: Any
    shape: torch.Size  # of the logits

    @property
    def hidden(self) -> torch.Tensor:
        """What the head is given, [batch x tokens x width], with the graph of the body where gradients are recorded."""
        return self.output.last_hidden_state

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad

    @property
    def like(self) -> torch.Tensor:
        """As large as all logits, and without memory of its own."""
        return self.hidden.new_zeros(()).expand(self.shape)

    def places(self) -> Iterator[slice]:
        """Tokens whose logits are made together."""
        rows, tokens, classes = self.shape
        size = max(1, BLOCK // (rows * classes * 4))
        return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))

    @torch.no_grad()
    def blocks(self) -> Iterator[torch.Tensor]:
        """Logits [batch x some tokens x vocabulary], token after token."""
        for own in self.places():
            yield self.part(own.start, own.stop)

    def part(self, first: int, end: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of these tokens, from hidden states that stand for theirs if there are any."""
        own = self.hidden[:, first:end] if hidden is None else hidden
        given = type(self.output)(**{**self.output, "last_hidden_state": own})
        with standing_in([(self.body, gives(given))]):
            return self.model(**self.inputs).logits

    def gradient(self, start: Start) -> torch.Tensor:
        """At the hidden states, of what `start` makes of each block of logits in its turn. A backward pass of the body
        goes on from there."""
        found = torch.zeros_like(self.hidden.detach())
        for own in self.places():
            hidden = self.hidden[:, own].detach().requires_grad_(True)
            with torch.enable_grad():
                root, gradient = start(self.part(own.start, own.stop, hidden), own)
            (found[:, own],) = torch.autograd.grad(root, hidden, gradient)
            del root, gradient
        return found


def forward(model: PreTrainedModel, task: Predicts, inputs: Mapping[str, Any]) -> Any:
    """The model's output, or `States` where its logits are large and can be made in blocks. Either way all that is
    inside the body has run once, so hooks there have seen one pass."""
    return _forward(model, inputs) if task.name == "causal-lm" else model(**inputs)


def compared(model: PreTrainedModel, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a model with other layers and the same head is compared by: its outputs in eval mode without gradients, or
    in place of large logits the hidden states that they are made from, and those of the last token."""
    with torch.no_grad(), evaluating(model):
        output = _forward(model, to_device(batch, input_device(model)))
        if not isinstance(output, States):
            return numbers(output)
        return [output.hidden, output.part(output.shape[1] - 1, output.shape[1])]


def _forward(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    body = _body(model, inputs) if _is_large(model, inputs) else None
    if body is None:
        return model(**inputs)
    ids, seen, run = inputs["input_ids"], [], body.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(run(*args, **kwargs))
        return seen[-1]

    with standing_in([(body, watch)]):
        last = model(**inputs, logits_to_keep=1).logits.detach()
    hidden = getattr(seen[0], "last_hidden_state", None)
    if len(seen) == 1 and isinstance(hidden, torch.Tensor) and hidden.shape[:-1] == ids.shape:
        found = States(model, body, inputs, seen[0], torch.Size((*ids.shape, last.shape[-1])))
        if _same(found, last):
            return found
    given = iter(seen)
    with standing_in([(body, lambda *args, **kwargs: next(given))]):
        return model(**inputs)


def logits_of(task: Predicts, output: Any) -> Any:
    """The logits of what `forward` gave, which are `States` where they are made in blocks."""
    return output if isinstance(output, States) else task.logits(output)


def few_logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a pass whose logits nobody looks at: where the model can, it makes those of one token."""
    return {**inputs, "logits_to_keep": 1} if makes_few(model) else dict(inputs)


def makes_few(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for logits of some tokens."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def at_once(rows: int, tokens: int, classes: int) -> int:
    """Of so many logits, those that are there together where they can be made in blocks."""
    whole = rows * tokens * classes
    return whole if whole * 4 <= LIMIT else min(whole, rows * classes * max(1, BLOCK // (rows * classes * 4)))


def _is_large(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Labels and wishes for some logits make a forward do more than give all of them."""
    ids = inputs.get("input_ids")
    if not makes_few(model) or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return False
    classes = getattr(model.config.get_text_config(), "vocab_size", None) or 0
    return ids.numel() * int(classes) * 4 > LIMIT and not {"labels", "logits_to_keep"} & set(inputs)


def _body(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """The part of the model that makes hidden states, if that is what its forward begins with; nothing of it runs."""
    reached: list[nn.Module] = []

    def stop(module: nn.Module, args: Any) -> None:
        if module is not model:
            reached.append(module)
            raise StopForwardError

    handle = register_module_forward_pre_hook(stop)  # before those of the module itself, so that nobody sees it
    try:
        model(**inputs, logits_to_keep=1)
    except StopForwardError:
        pass
    finally:
        handle.remove()
    bodies = (model.base_model, model.get_decoder())  # some call the decoder that is inside of their base
    return next((module for module in reached if any(module is body for body in bodies)), None)


@torch.no_grad()
def _same(found: States, last: torch.Tensor) -> bool:
    """Whether a block has the logits that the model itself gives for the last token; those that are not finite cannot
    tell."""
    alone = found.part(found.shape[1] - 1, found.shape[1])
    if alone.shape != last.shape:
        return False
    difference, allowed = largest_difference([last], [alone])
    return difference <= allowed or not bool(torch.isfinite(last).all())
