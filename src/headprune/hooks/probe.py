"""Looking at attention probabilities, one site at a time, whatever attention implementation the model runs.

Most families compute attention through transformers' attention interface. There, a registered function calls the
model's own implementation for the output and, beside it and without gradients, the family's eager function for the
probabilities. Families with their own attention code pass their probabilities through a dropout module, where a hook
sees them. Either way a map is reduced by the callback and dropped before the next site runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headprune.errors import UnsupportedModelError
from headprune.hooks.watch import hooks
from headprune.units import AttentionSite
from headprune.units.attending import attending

# callback(site, probabilities [batch, heads, queries, keys], mask): `mask` is the additive float or bool mask that the
# model used, or None where it masked nothing
Callback = Callable[[AttentionSite, torch.Tensor, torch.Tensor | None], None]
PREFIX = "headprune_"
IMPLEMENTATIONS = ("eager", "sdpa")
_watching: dict[int, tuple[AttentionSite, Callback]] = {}


@contextmanager
def probabilities(model: PreTrainedModel, sites: Sequence[AttentionSite], callback: Callback) -> Iterator[None]:
    """Call back with the attention probabilities of every site, application after application."""
    through_interface: list[tuple[AttentionSite, nn.Module]] = []
    own_code: list[tuple[AttentionSite, nn.Module]] = []
    for site in sites:
        if site.kept:
            module: Any = model.get_submodule(site.path)
            (through_interface if _family_eager(module) else own_code).append((site, module))
    pairs = [(_dropout(site, module), _dropout_hook(site, callback)) for site, module in own_code]
    with hooks(pairs, before=True):
        if not through_interface:
            yield
            return
        mine = {id(module): (site, callback) for site, module in through_interface}
        with attending(model, _watching_name):
            _watching.update(mine)
            try:
                yield
            finally:
                for key in mine:
                    _watching.pop(key, None)


def _family_eager(module: nn.Module) -> Callable[..., Any] | None:
    """The eager attention function that the family defines beside its modules, if it goes through the interface."""
    home = sys.modules[getattr(module, "_base_class", type(module)).__module__]
    if not hasattr(home, "ALL_ATTENTION_FUNCTIONS"):
        return None
    return getattr(home, "eager_attention_forward", None)


def _watching_name(name: str | None) -> str:
    return PREFIX + (name if name in IMPLEMENTATIONS else "sdpa")


def _watching_attention(implementation: str) -> Callable[..., Any]:
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
        watched = _watching.get(id(module))
        if watched is not None:
            site, callback = watched
            mask = _explicit_mask(module, query, key, attention_mask, kwargs.get("is_causal"))
            with torch.no_grad():
                # One column of the values is enough: only the probabilities are wanted here.
                _, weights = eager(
                    module, query.detach(), key.detach(), value.detach()[..., :1], _additive(mask, query), **kwargs
                )
                callback(site, weights, mask)
                del weights
        return compute(module, query, key, value, attention_mask, **kwargs)

    return attend


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(PREFIX + _name, _watching_attention(_name))
    AttentionMaskInterface.register(PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])


def _explicit_mask(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool | None
) -> torch.Tensor | None:
    """The mask as a tensor where the implementation would only be told that attention is causal."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is not None:
        return mask[..., : key.shape[-2]]
    if causal and query.shape[2] > 1:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    return None


def _additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    # Many families take the softmax in float32: what is less than its least number would be minus infinity there, and
    # a row of padding, which may look at nothing, not a number.
    least = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, least)


def _dropout(site: AttentionSite, module: nn.Module) -> nn.Module:
    for name in ("attention_dropout", "dropout", "attn_dropout"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return child
    raise UnsupportedModelError(
        f"The attention probabilities of {site.path} ({type(module).__name__}) cannot be seen: it neither uses "
        "transformers' attention interface nor passes them through a dropout module."
    )


def _dropout_hook(site: AttentionSite, callback: Callback) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        weights = args[0].detach()
        if weights.dim() == 4:
            causal = site.stack == "decoder" and site.attention == "self"
            mask = weights.new_ones(weights.shape[-2:], dtype=torch.bool).tril()[None, None] if causal else None
            with torch.no_grad():
                callback(site, weights, mask)

    return watch
