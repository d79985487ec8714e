"""Logits of a large vocabulary in blocks of tokens: the body of a language model runs once, its head on some tokens at
a time.

The model's forward computes the logits, with its body replaced by a function that returns the hidden states of these
tokens; so a cap, a scale or a bias of the head is applied. That this holds is checked on the last token of every batch.
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
from headprune.hooks.layer_calls import replace_forwards, returns
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import compared_outputs, evaluating, largest_difference
from headprune.hooks.stop_forward import StopForwardError

LIMIT = 1 << 28  # bytes of logits in float32 above which they are computed in blocks
BLOCK = 1 << 25  # bytes of logits in float32 of one block


class LogitsTask(Protocol):
    """The part of a task that is used here."""

    @property
    def name(self) -> str: ...
    def logits(self, output: Any) -> torch.Tensor: ...


Start = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]  # (logits, tokens) -> (root, gradient at it)


@dataclass(frozen=True)
class States:
    """The hidden states of a batch, from which logits are computed block by block on demand."""

    model: PreTrainedModel
    body: nn.Module
    inputs: Mapping[str, Any]
    output: Any
    shape: torch.Size  # of the logits

    @property
    def hidden(self) -> torch.Tensor:
        """The inputs of the head, [batch x tokens x width], with the graph of the body where gradients are enabled."""
        return self.output.last_hidden_state

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the shape of all logits, with the memory of a scalar."""
        return self.hidden.new_zeros(()).expand(self.shape)

    def windows(self) -> Iterator[slice]:
        """The blocks of tokens."""
        rows, tokens, classes = self.shape
        size = max(1, BLOCK // (rows * classes * 4))
        return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))

    @torch.no_grad()
    def blocks(self) -> Iterator[torch.Tensor]:
        """Logits [batch x some tokens x vocabulary], token after token."""
        for window in self.windows():
            yield self.part(window.start, window.stop)

    def part(self, first: int, end: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of these tokens, from `hidden` in place of their hidden states if it is there."""
        hidden_part = self.hidden[:, first:end] if hidden is None else hidden
        body_output = type(self.output)(**{**self.output, "last_hidden_state": hidden_part})
        with replace_forwards([(self.body, returns(body_output))]):
            return self.model(**self.inputs).logits

    def gradient(self, start: Start) -> torch.Tensor:
        """The gradient at the hidden states, block after block of logits, each differentiated as `start` says. A
        backward pass of the body continues from there."""
        gradients = torch.zeros_like(self.hidden.detach())
        for window in self.windows():
            hidden = self.hidden[:, window].detach().requires_grad_(True)
            with torch.enable_grad():
                root, gradient = start(self.part(window.start, window.stop, hidden), window)
            (gradients[:, window],) = torch.autograd.grad(root, hidden, gradient)
            del root, gradient
        return gradients


def forward(model: PreTrainedModel, task: LogitsTask, inputs: Mapping[str, Any]) -> Any:
    """The output of the model, or `States` where its logits are large and can be computed in blocks. Either way the
    body has run once, so hooks in it have seen one pass."""
    return _forward(model, inputs) if task.name == "causal-lm" else model(**inputs)


def comparable_outputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Outputs for a comparison with a model of the same head: in eval mode without gradients, and in place of large
    logits the hidden states that they are computed from, and the logits of the last token."""
    with torch.no_grad(), evaluating(model):
        output = _forward(model, to_device(batch, input_device(model)))
        if not isinstance(output, States):
            return compared_outputs(output)
        return [output.hidden, output.part(output.shape[1] - 1, output.shape[1])]


def _forward(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    body = _body(model, inputs) if _is_large(model, inputs) else None
    if body is None:
        return model(**inputs)
    ids, body_outputs, run = inputs["input_ids"], [], body.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        body_outputs.append(run(*args, **kwargs))
        return body_outputs[-1]

    with replace_forwards([(body, watch)]):
        last = model(**inputs, logits_to_keep=1).logits.detach()
    hidden = getattr(body_outputs[0], "last_hidden_state", None)
    if len(body_outputs) == 1 and isinstance(hidden, torch.Tensor) and hidden.shape[:-1] == ids.shape:
        states = States(model, body, inputs, body_outputs[0], torch.Size((*ids.shape, last.shape[-1])))
        if _same(states, last):
            return states
    replayed = iter(body_outputs)
    with replace_forwards([(body, lambda *args, **kwargs: next(replayed))]):
        return model(**inputs)


def logits_of(task: LogitsTask, output: Any) -> Any:
    """The logits in the result of `forward`, or `States` where they are computed in blocks."""
    return output if isinstance(output, States) else task.logits(output)


def few_logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a pass whose logits are not used: of one token only, where the model has that option."""
    return {**inputs, "logits_to_keep": 1} if takes_logits_to_keep(model) else dict(inputs)


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the forward has the option `logits_to_keep`."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def at_once(rows: int, tokens: int, classes: int) -> int:
    """The number of logits in memory at once, in blocks where they are large."""
    whole = rows * tokens * classes
    return whole if whole * 4 <= LIMIT else min(whole, rows * classes * max(1, BLOCK // (rows * classes * 4)))


def _is_large(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Whether all logits are computed and are large; with labels or `logits_to_keep` the forward does something
    else."""
    ids = inputs.get("input_ids")
    if not takes_logits_to_keep(model) or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return False
    classes = getattr(model.config.get_text_config(), "vocab_size", None) or 0
    return ids.numel() * int(classes) * 4 > LIMIT and not {"labels", "logits_to_keep"} & set(inputs)


def _body(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """The part of the model that computes hidden states, if its forward begins with that; nothing of it runs."""
    reached: list[nn.Module] = []

    def stop(module: nn.Module, args: Any) -> None:
        if module is not model:
            reached.append(module)
            raise StopForwardError

    handle = register_module_forward_pre_hook(stop)  # before hooks of the module, so that these do not run
    try:
        model(**inputs, logits_to_keep=1)
    except StopForwardError:
        pass
    finally:
        handle.remove()
    bodies = (model.base_model, model.get_decoder())  # some call the decoder inside of their base model
    return next((module for module in reached if any(module is body for body in bodies)), None)


@torch.no_grad()
def _same(states: States, last: torch.Tensor) -> bool:
    """Whether a block has the logits of the model for the last token; true where these are not finite."""
    block = states.part(states.shape[1] - 1, states.shape[1])
    if block.shape != last.shape:
        return False
    difference, allowed = largest_difference([last], [block])
    return difference <= allowed or not bool(torch.isfinite(last).all())
