"""Attention probabilities for callbacks, one site at a time, whatever attention implementation the model runs.

Most families compute attention through transformers' attention interface. There, a registered function calls the
model's own implementation for the output and, beside it and without gradients, the family's eager function for the
probabilities, for long texts in blocks of queries. Families with their own attention code pass their probabilities
through a dropout module, where a hook sees them, all at once. Either way the callback reduces them, and they are freed
before the next block or site.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headprune.errors import UnsupportedModelError
from headprune.hooks.attach import HookedSite, hooks
from headprune.hooks.attention_blocks import Attention, Rows
from headprune.hooks.attention_implementation import attention_implementation


class AttentionModule(HookedSite, Protocol):
    """The part of an attention site that is used here."""

    @property
    def attention(self) -> str:
        """ "self" or "cross"."""

    @property
    def stack(self) -> str:
        """ "encoder", "decoder", ..."""


AnyAttention = TypeVar("AnyAttention", bound=AttentionModule)
Callback = Callable[[AnyAttention, Rows], None]
PREFIX = "headprune_"
IMPLEMENTATIONS = ("eager", "sdpa")
_callbacks: dict[int, tuple[Any, Callable[[Any, Rows], None], bool]] = {}


@contextmanager
def probabilities(
    model: PreTrainedModel, sites: Sequence[AnyAttention], callback: Callback[AnyAttention], *, whole: bool = False
) -> Iterator[None]:
    """Call back with the attention probabilities of every site, application after application: in blocks of queries,
    in order, or each `whole`."""
    through_interface: list[tuple[AnyAttention, nn.Module]] = []
    through_dropout: list[tuple[AnyAttention, nn.Module]] = []
    for site in sites:
        if site.kept:
            module: Any = model.get_submodule(site.path)
            (through_interface if _family_eager(module) else through_dropout).append((site, module))
    pairs = [(_dropout(site, module), _dropout_hook(site, callback)) for site, module in through_dropout]
    with hooks(pairs, before=True):
        if not through_interface:
            yield
            return
        callbacks = {id(module): (site, callback, whole) for site, module in through_interface}
        with attention_implementation(model, _registered_name):
            _callbacks.update(callbacks)
            try:
                yield
            finally:
                for key in callbacks:
                    _callbacks.pop(key, None)


def _family_eager(module: nn.Module) -> Callable[..., Any] | None:
    """The eager attention function that the family defines beside its modules, if it goes through the interface."""
    namespace = sys.modules[getattr(module, "_base_class", type(module)).__module__]
    if not hasattr(namespace, "ALL_ATTENTION_FUNCTIONS"):
        return None
    return getattr(namespace, "eager_attention_forward", None)


def _registered_name(name: str | None) -> str:
    return PREFIX + (name if name in IMPLEMENTATIONS else "sdpa")


def _attention_with_callback(implementation: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        eager: Any = _family_eager(module)
        compute = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        registered = _callbacks.get(id(module))
        if registered is None:
            return compute(module, query, key, value, attention_mask, **kwargs)
        site, callback, whole = registered
        # Eager attention without gradients returns its output with the probabilities, so one run of it is enough. For
        # other implementations it runs beside them, on one column of the values.
        call = Attention(eager, module, query.detach(), key.detach(), value.detach(), attention_mask, kwargs)
        complete = implementation == "eager" and not torch.is_grad_enabled() and not call.implies_causal
        call = call if complete else replace(call, value=call.value[..., :1])
        outputs: list[torch.Tensor] = []
        with torch.no_grad():
            for output, rows in call.parts(whole=whole):
                callback(site, rows)
                if complete:
                    outputs.append(output)
                del output, rows
        if complete:
            return torch.cat(outputs, dim=1), None
        return compute(module, query, key, value, attention_mask, **kwargs)

    return attend


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(PREFIX + _name, _attention_with_callback(_name))
    AttentionMaskInterface.register(PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])


def _dropout(site: HookedSite, module: nn.Module) -> nn.Module:
    for name in ("attention_dropout", "dropout", "attn_dropout"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return child
    raise UnsupportedModelError(
        f"The attention probabilities of {site.path} ({type(module).__name__}) cannot be read: it neither uses "
        "transformers' attention interface nor passes them through a dropout module."
    )


def _dropout_hook(site: AnyAttention, callback: Callback[AnyAttention]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        weights = args[0].detach()
        if weights.dim() == 4:
            causal = site.stack == "decoder" and site.attention == "self"
            mask = weights.new_ones(weights.shape[-2:], dtype=torch.bool).tril()[None, None] if causal else None
            with torch.no_grad():
                callback(site, Rows(weights, mask, 0, weights.shape[-2]))

    return watch
