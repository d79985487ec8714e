"""What a model needs beyond sliced weights so that its own forward code runs with fewer heads.

This file, torch_attention.py and placeholders.py depend on torch alone: `headprune.save(..., portable=True)` ships them
inside the checkpoint, so that the pruned model loads where headprune is not installed. Everything here works from a
plan, a list of plain dictionaries with one entry per changed site, which `headprune.units.slicing.plan` makes and a
checkpoint stores:

    path, o          the module of the site, and its output projection
    tensors          path -> shape

for a feed-forward layer:

    kind             "neurons"
    nothing          for a layer without neurons: the maps that are removed

and for attention:

    cross            whether it is cross attention
    attributes       numbers that the forward code reads from the module
    config           numbers that the forward code reads from the module's config
    kept, original   original ids of the heads that are left, and how many there were
    group            heads that are removed together
    quirk            the mixin of its class, a key of QUIRKS
    select, shown    arguments with a head axis, [name, axis], and the heads that are selected there
    delete           for a site without heads: the projections and parameters that are deleted
    silent, zeros    a site without heads that still runs: on one unit of zeros, path -> rows of its maps
    form             the outputs of the module, "output" or "none" for each; None for a single tensor
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from headprune.hooks.torch_attention import expose
from headprune.units.placeholders import ConfigView, Nothing, Zeros, mark_containers, only_bias, reshape

CACHE_ARGUMENTS = ("past_key_values", "layer_past", "past_key_value")


# A mixin's `super()` is an attention module of some family, which the type checker cannot know.
_AttentionModule: Any = object


class PrunedSite(_AttentionModule):
    """A mixin for attention modules whose forward cannot run with fewer heads as it is."""

    _base_class: type
    _mixin: type
    _arguments: tuple[str, ...]
    headprune_kept: list[int]

    def _argument(self, args: tuple, kwargs: dict, name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self._arguments.index(name) if name in self._arguments else len(args)
        return args[position] if position < len(args) else None

    def _replace(self, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
        position = self._arguments.index(name)
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def _select_kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The heads that are left here, from [batch, all heads, ...]."""
        return tensor.index_select(1, torch.tensor(self.headprune_kept, device=tensor.device))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created dynamically, so pickle and copy need a function that creates it again.
        return _new_pruned, (self._mixin, self._base_class), self.__dict__


def _new_pruned(mixin: type, base: type) -> Any:
    kind: Any = pruned_class(mixin, base)
    return kind.__new__(kind)


@functools.cache
def pruned_class(mixin: type, base: Any) -> type:
    """The subclass of `base` with this mixin; created once, so that types can be compared."""
    arguments = tuple(inspect.signature(base.forward).parameters)[1:]
    members = {"_base_class": base, "_mixin": mixin, "_arguments": arguments, "__module__": base.__module__}
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), members)


# --- sites with some heads left, where an input of the forward has a head axis --------------------------------------


class BiasedSite(PrunedSite):
    """The model passes every site one position bias [batch, all heads, query, key] (MPNet)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bias = self._argument(args, kwargs, "position_bias")
        if bias is not None:
            args, kwargs = self._replace(args, kwargs, "position_bias", self._select_kept(bias))
        return super().forward(*args, **kwargs)


class AlibiSite(PrunedSite):
    """The model passes every site one alibi tensor [batch x all heads, 1, key] (BLOOM)."""

    headprune_original: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        alibi = self._argument(args, kwargs, "alibi")
        bias = self._select_kept(alibi.unflatten(0, (-1, self.headprune_original))).flatten(0, 1)
        args, kwargs = self._replace(args, kwargs, "alibi", bias)
        return super().forward(*args, **kwargs)


class SelectingSite(PrunedSite):
    """The module takes tensors with all heads, on axes that were discovered."""

    headprune_select: list[list[Any]]
    headprune_shown: list[int]
    headprune_original: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, axis in self.headprune_select:
            if isinstance(name, int):
                args = (*args[:name], self._shown(args[name], axis), *args[name + 1 :]) if name < len(args) else args
            elif kwargs.get(name) is not None:
                kwargs = {**kwargs, name: self._shown(kwargs[name], axis)}
        return super().forward(*args, **kwargs)

    def _shown(self, tensor: Any, axis: int) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= axis or tensor.shape[axis] % self.headprune_original:
            return tensor
        index = torch.tensor(self.headprune_shown, device=tensor.device)
        if tensor.shape[axis] == self.headprune_original:
            return tensor.index_select(axis, index)
        by_head = tensor.unflatten(axis, (-1, self.headprune_original))
        return by_head.index_select(axis + 1, index).flatten(axis, axis + 1)


class T5Site(PrunedSite):
    """The first site of a T5 stack computes a position bias for all heads, and all sites pass it on.

    So the table of that first site keeps all heads, whichever are removed there, and the bias that is passed on has
    all.
    """

    def compute_bias(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._select_kept(super().compute_bias(*args, **kwargs))

    def _full_bias(self, queries: int, keys: int, seen: Any) -> torch.Tensor | None:
        if not self.has_relative_attention_bias:
            return None
        return super().compute_bias(queries, keys, past_seen_tokens=seen)

    def _seen_tokens(self, args: tuple, kwargs: dict) -> Any:
        cache = self._argument(args, kwargs, "past_key_values")
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        # A static cache counts in place, so the number is copied before the cache is updated.
        return seen.clone() if isinstance(seen, torch.Tensor) else seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        full = self._argument(args, kwargs, "position_bias")
        if full is not None:
            args, kwargs = self._replace(args, kwargs, "position_bias", self._select_kept(full))
            output, _, *rest = super().forward(*args, **kwargs)
        else:
            seen = self._seen_tokens(args, kwargs)
            output, bias, *rest = super().forward(*args, **kwargs)
            full = self._full_bias(bias.shape[-2], bias.shape[-1], seen)
        return (output, full, *rest)


# --- sites with no heads left ---------------------------------------------------------------------------------------


class EmptySite(PrunedSite):
    """A site without heads computes nothing: it returns the bias of its output projection, if it has one."""

    headprune_empty: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["hidden_states"]
        self._count_tokens(inputs, args, kwargs)
        output = inputs[..., :0]
        inside = self.headprune_empty["o"]  # empty where the projection belongs to the parent (BERT)
        if inside:
            output = self.get_submodule(inside)(output)
        return self._finish(output, inputs, args, kwargs)

    def _count_tokens(self, inputs: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """Keep the KV cache of this layer as long as the others': a model may read the length of any layer."""
        cache = next((c for name in CACHE_ARGUMENTS if (c := self._argument(args, kwargs, name)) is not None), None)
        if cache is None:
            return None
        if self.headprune_empty["cross"]:
            self._mark_cross(cache, args, kwargs)
            return None
        cache = getattr(cache, "self_attention_cache", cache)
        mark = inputs[..., :1].unsqueeze(1)
        return cache.update(mark, mark, self._layer)[0]

    @property
    def _layer(self) -> int:
        return self.layer_idx if hasattr(self, "layer_idx") else self.layer_id

    def _mark_cross(self, cache: Any, args: tuple, kwargs: dict) -> None:
        """The same for the KV cache of cross attention, which is filled once: some models read the keys of all
        layers."""
        updated = getattr(cache, "is_updated", {})
        states = self._argument(args, kwargs, "key_value_states")
        states = self._argument(args, kwargs, "encoder_hidden_states") if states is None else states
        if states is not None and hasattr(cache, "cross_attention_cache") and not updated.get(self._layer):
            mark = states[..., :1].unsqueeze(1)
            cache.cross_attention_cache.update(mark, mark, self._layer)
            updated[self._layer] = True

    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        return output, None


def is_empty(module: nn.Module) -> bool:
    """Whether this is a site without heads. A portable checkpoint has its own copy of these classes, so an attribute
    decides and not the class."""
    return hasattr(module, "headprune_empty")


class EmptyGpt2(EmptySite):
    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        return self.resid_dropout(output), None


class EmptyModernBert(EmptySite):
    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        return self.out_drop(output), None


class EmptyAlbert(EmptySite):
    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        return self.LayerNorm(inputs + self.output_dropout(output)), None


class EmptyBloom(EmptySite):
    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        dropped = nn.functional.dropout(output, self.hidden_dropout, self.training)
        return self._argument(args, kwargs, "residual") + dropped, None


class EmptyMeasured(EmptySite):
    """Its outputs have the structure that was observed in the dense module."""

    headprune_form: list[str] | None

    def _finish(self, output: torch.Tensor, inputs: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        if self.headprune_form is None:
            return output
        return tuple(output if part == "output" else None for part in self.headprune_form)


class EmptyT5(EmptySite, T5Site):
    """The first site computes the position bias of the others also without heads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["hidden_states"]
        full = self._argument(args, kwargs, "position_bias")
        seen = self._seen_tokens(args, kwargs)
        cached = self._count_tokens(inputs, args, kwargs)
        if full is None:
            full = self._full_bias(inputs.shape[1], inputs.shape[1] if cached is None else cached.shape[-2], seen)
        return self.o(inputs), full, None


# quirk -> (behaviour with some heads left or None where slicing is enough, behaviour with none left)
QUIRKS: dict[str, tuple[type | None, type]] = {
    "": (None, EmptySite),
    "albert": (None, EmptyAlbert),
    "bloom": (AlibiSite, EmptyBloom),
    "gpt2": (None, EmptyGpt2),
    "measured": (None, EmptyMeasured),
    "modernbert": (None, EmptyModernBert),
    "mpnet": (BiasedSite, EmptySite),
    "selecting": (SelectingSite, EmptyMeasured),
    "t5": (T5Site, EmptyT5),
}


def restructure(model: nn.Module, plan: list[dict[str, Any]]) -> None:
    """Give every site of the plan its final structure. Weights that have their final shape already are kept; others are
    replaced by empty ones, for a loader to fill."""
    expose(model)
    for entry in plan:
        if entry.get("kind") == "neurons":
            _feed_forward(model, entry)
            continue
        site: Any = model.get_submodule(entry["path"])
        some_left, none_left = QUIRKS[entry["quirk"]]
        silent = entry.get("silent", False)
        mixin = some_left if entry["kept"] or silent else none_left
        if mixin is not None:
            site.__class__ = pruned_class(mixin, getattr(site, "_base_class", site.__class__))
        site.headprune_kept = list(entry["kept"])
        site.headprune_original = entry["original"]
        site.headprune_select, site.headprune_shown = entry.get("select", []), entry.get("shown", [])
        site.headprune_form = entry.get("form")
        for name, value in entry["attributes"].items():
            owner, _, attribute = name.rpartition(".")
            setattr(site.get_submodule(owner), attribute, value)
        if entry["config"]:
            base = site.config._base if isinstance(site.config, ConfigView) else site.config
            site.config = ConfigView(base, dict(entry["config"]))
        for path, shape in entry["tensors"].items():
            reshape(model, path, shape)
        for path, rows in entry.get("zeros", {}).items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Zeros(rows))
        if not entry["kept"]:
            _empty(model, site, entry)


def _feed_forward(model: nn.Module, entry: dict[str, Any]) -> None:
    """A layer with fewer neurons needs only smaller tensors; one without any computes nothing."""
    for path, shape in entry["tensors"].items():
        reshape(model, path, shape)
    if not entry["nothing"]:
        return
    for path in entry["nothing"]:
        parent, _, name = path.rpartition(".")
        if not isinstance(getattr(model.get_submodule(parent), name), Nothing):
            setattr(model.get_submodule(parent), name, Nothing())
    only_bias(model, entry["o"])
    for path in (*entry["nothing"], entry["o"]):  # a family's weight initialiser expects projections
        parent, _, _ = path.rpartition(".")
        model.get_submodule(parent)._is_hf_initialized = True  # type: ignore[assignment]
        mark_containers(model, path)


def _empty(model: nn.Module, site: Any, entry: dict[str, Any]) -> None:
    inside = entry["o"].removeprefix(entry["path"] + ".") if entry["o"].startswith(entry["path"] + ".") else ""
    deleted = {"deleted": list(entry["delete"])}
    site.headprune_empty = {"o": inside, "cross": entry["cross"], "group": entry["group"], **deleted}
    # A family's weight initialiser expects projections; but buffers that no checkpoint has are its to fill.
    unsaved = dict(site.named_buffers(recurse=False)).keys() - site.state_dict().keys()
    site._is_hf_initialized = not (entry.get("silent") and unsaved)
    mark_containers(model, entry["path"])
    for path in entry["delete"]:
        parent, _, name = path.rpartition(".")
        if hasattr(model.get_submodule(parent), name):
            delattr(model.get_submodule(parent), name)
    only_bias(model, entry["o"])
