"""Attention probabilities for callbacks, one site at a time, while the model computes what it computes without them.

Most families ask transformers' attention interface for the function of their attention implementation. There the
function is wrapped: eager attention returns its probabilities; beside any other function the family's eager function
computes them without gradients, for long texts in blocks of queries. Modules with attention code of their own run with
eager attention and return their probabilities, as for `output_attentions`. Either way the callback reduces them, and
they are freed before the next block or site.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.attach import HookedSite, hooks
from headprune.hooks.attention_blocks import Attention, Rows, allowed_keys
from headprune.hooks.attention_implementation import attention_implementation, configs_of, implementation_name
from headprune.hooks.outputs import largest_difference
from headprune.hooks.torch_attention import original_class

AnyAttention = TypeVar("AnyAttention", bound=HookedSite)
Callback = Callable[[AnyAttention, Rows], None]
# Arguments with which a module returns the probabilities of every head.
RETURN_PROBABILITIES = {"output_attentions": True, "need_weights": True, "average_attn_weights": False}
EAGER = "load the model with attn_implementation='eager', or "
ONE_IMAGE = "give batches of one image, or "


class Interface(Protocol):
    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output [batch, queries, heads, width], probabilities where it has them)."""


@dataclass
class _Probe:
    """What is read at a site."""

    site: HookedSite
    module: nn.Module
    implementation: str | None
    callback: Callable[[Any, Rows], None]
    whole: bool
    check: bool
    applications: int = field(default=0, init=False)  # of its output projection
    maps: int = field(default=0, init=False)  # whose last block was shown
    requested: bool = field(default=False, init=False)  # whether the module returns them for the probe alone

    def show(self, rows: Rows) -> None:
        shape = tuple(rows.probabilities.shape)
        if len(shape) != 4 or shape[1] != len(self.site.kept):
            self.refuse(f"they have the shape {list(shape)}, without an axis of its {len(self.site.kept)} heads")
        with torch.no_grad():
            self.callback(self.site, rows)
        self.maps += rows.first + shape[-2] == rows.queries

    def refuse(self, reason: str, advice: str = "") -> NoReturn:
        raise UnsupportedModelError(
            f"The attention probabilities of {self.site.path} ({type(self.module).__name__}, attention implementation "
            f"{self.implementation!r}) cannot be read: {reason}; {advice}use a criterion that needs none, such as "
            "gnorm."
        )


@contextmanager
def probabilities(
    model: PreTrainedModel,
    sites: Sequence[AnyAttention],
    callback: Callback[AnyAttention],
    *,
    whole: bool = False,
    check: bool = False,
) -> Iterator[None]:
    """Call back with the attention probabilities of every site, application after application: in blocks of queries,
    in order, or each `whole`. A site that ran without showing them is refused. With `check`, the output that follows
    from the probabilities is compared with that of the model's attention function."""
    implementation = implementation_name(model)
    probes = [
        _Probe(site, model.get_submodule(site.path), implementation, callback, whole, check)
        for site in sites
        if site.kept
    ]
    through_interface: dict[int, _Probe] = {}
    own_code: list[_Probe] = []
    for probe in probes:
        callers = [module for module in probe.module.modules() if "get_interface" in _names(type(module).__mro__)]
        through_interface.update((id(module), probe) for module in callers)
        if not callers:
            own_code.append(probe)
    for probe in own_code:
        _refuse_without_eager(probe)
        _refuse_half_precision(probe)
    with ExitStack() as stack:
        modules = nn.ModuleList([probe.module for probe in own_code])
        stack.enter_context(attention_implementation(modules, lambda name: name and "eager"))
        stack.enter_context(hooks([(model.get_submodule(p.site.o), _counter(p)) for p in probes], before=True))
        stack.enter_context(
            hooks([(p.module, _request_probabilities(p)) for p in own_code], before=True, with_kwargs=True)
        )
        stack.enter_context(hooks([(p.module, _returned_probabilities(p)) for p in own_code]))
        stack.enter_context(_wrapped_interface(through_interface))
        yield
    for probe in probes:
        if probe.maps > probe.applications:
            probe.refuse(
                f"it computes {probe.maps} maps in {probe.applications} calls, as of several images", ONE_IMAGE
            )
        if probe.maps < probe.applications:
            probe.refuse("it does not return them", "" if implementation == "eager" else EAGER)


def _refuse_without_eager(probe: _Probe) -> None:
    """Some code takes its attention function out of transformers' table by name, which has no eager one."""
    if any("ALL_ATTENTION_FUNCTIONS" in _names(type(module).__mro__) for module in probe.module.modules()):
        probe.refuse("its code has no eager attention")


def _refuse_half_precision(probe: _Probe) -> None:
    """Some code of modules is another model with eager attention. Outputs are compared for that, but half precision
    allows differences that are as large."""
    changed = any(config._attn_implementation not in (None, "eager") for config in configs_of(probe.module))
    half = any(weight.dtype in (torch.float16, torch.bfloat16) for weight in probe.module.parameters())
    if changed and half:
        probe.refuse(
            "only eager attention returns them, and in half precision its outputs cannot be told from those of another "
            "model",
            f"{EAGER}in float32, or ",
        )


def refuse_changed_outputs(
    model: PreTrainedModel, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> None:
    """Raise if the outputs while probabilities were read are not those without, up to rounding."""
    difference, allowed = largest_difference(_rounded(expected), _rounded(actual))
    if not difference <= allowed:
        name = implementation_name(model)
        raise UnsupportedModelError(
            f"While its attention probabilities are read, the outputs of {type(model).__name__} (attention "
            f"implementation {name!r}) differ by up to {difference:.3g} (allowed: {allowed:.3g}), so they are those of "
            f"another model; {'' if name == 'eager' else EAGER}use a criterion that needs none, such as gnorm."
        )


def _rounded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In float32 at most: in models of float64, too, eager attention computes the softmax in float32."""
    return [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]


def _counter(probe: _Probe) -> Callable[..., None]:
    def count(module: nn.Module, args: Any) -> None:
        probe.applications += 1

    return count


# --- transformers' attention interface ---

_probes: dict[int, _Probe] = {}  # by the id of the module that calls the interface
_lock = threading.Lock()
_get_interface = AttentionInterface.get_interface


@functools.cache
def _names(classes: tuple[type, ...]) -> frozenset[str]:
    """The names that the code of these classes uses; with `get_interface` it asks for an attention function."""
    functions = [value for kind in classes for value in vars(kind).values() if inspect.isfunction(value)]
    return frozenset(name for function in functions for name in inspect.unwrap(function).__code__.co_names)


@contextmanager
def _wrapped_interface(probes: Mapping[int, _Probe]) -> Iterator[None]:
    """Within the block, the functions that these modules get from the interface show their probabilities.

    The implementation keeps its name in the configs, since models compare it with "eager" or "sdpa" to decide how to
    compute their attention.
    """
    with _lock:
        _probes.update(probes)
        AttentionInterface.get_interface = _get_wrapped
    try:
        yield
    finally:
        with _lock:
            for key in probes:
                _probes.pop(key, None)
            if not _probes:
                AttentionInterface.get_interface = _get_interface


def _get_wrapped(interface: AttentionInterface, name: str, eager: Interface) -> Interface:
    return functools.partial(_attend, _get_interface(interface, name, eager), eager)


def _attend(
    compute: Interface,
    eager: Interface,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    probe = _probes.get(id(module))
    if probe is None:
        return compute(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4):
        probe.refuse("its masks have another form than those of eager attention", EAGER)
    call = Attention(
        eager, module, query.detach(), key.detach(), value.detach(), attention_mask, kwargs, compute is eager
    )
    if call.is_eager and (torch.is_grad_enabled() or not call.in_blocks(whole=probe.whole)):
        output, weights = compute(module, query, key, value, attention_mask, **kwargs)
        if weights is not None:
            probe.show(Rows(weights.detach(), call.block_mask(0, call.queries), 0, call.queries))
        return output, weights
    if call.is_eager:
        outputs: list[torch.Tensor] = []
        for output, rows in call.parts(whole=probe.whole):
            probe.show(rows)
            outputs.append(output)
            del output, rows
        return torch.cat(outputs, dim=1), None
    result = compute(module, query, key, value, attention_mask, **kwargs)
    if not probe.check:  # one column of the values is enough
        call = replace(call, value=call.value[..., :1])
    with torch.no_grad():
        for output, rows in call.parts(whole=probe.whole):
            if probe.check:
                _check_output(probe, rows, result[0].detach(), output)
            probe.show(rows)
            del output, rows
    return result


def _check_output(probe: _Probe, rows: Rows, computed: torch.Tensor, eager: torch.Tensor) -> None:
    """Refuse probabilities of eager attention where the model's function computes another output of these queries."""
    computed = computed[:, rows.first : rows.first + eager.shape[1]]
    if rows.mask is not None:  # where a query may attend to nothing, which are rows of padding, functions differ
        attends = allowed_keys(rows.mask).any(-1).transpose(1, 2).unsqueeze(-1)
        computed, eager = (output.masked_fill(~attends, 0) for output in (computed, eager))
    difference, allowed = largest_difference(_rounded([computed]), _rounded([eager]))
    if difference > allowed:
        probe.refuse(
            f"with those of its eager attention its output differs by up to {difference:.3g} (allowed: {allowed:.3g})",
            EAGER,
        )


# --- attention code of a module's own ---


def _request_probabilities(probe: _Probe) -> Callable[..., Any]:
    """A pre-hook that asks a module to return its probabilities, if it has an argument for that."""
    kind: Any = original_class(probe.module)
    names = list(inspect.signature(kind.forward).parameters)[1:]  # without self
    positions = {name: names.index(name) for name in RETURN_PROBABILITIES if name in names}

    def request(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        probe.requested = False
        for name, position in positions.items():
            value = RETURN_PROBABILITIES[name]
            passed = args[position] if position < len(args) else kwargs.get(name)
            probe.requested |= passed != value
            if position < len(args):
                args = (*args[:position], value, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return args, kwargs

    return request


def _returned_probabilities(probe: _Probe) -> Callable[..., Any]:
    """A hook that shows the probabilities among the outputs of a module, and frees them if only it requested them."""

    def watch(module: nn.Module, args: Any, output: Any) -> Any:
        parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
        maps = [part for part in parts if _are_probabilities(part)]
        if len(maps) != 1:
            return None
        weights = maps[0].detach()
        # They come without their mask: a key that no head attends to is taken as masked.
        probe.show(Rows(weights, (weights != 0).any(1, keepdim=True), 0, weights.shape[-2]))
        if not probe.requested or type(output) is not tuple:
            return None
        return tuple(None if part is maps[0] else part for part in output)

    return watch


def _are_probabilities(part: Any) -> bool:
    """Whether it has a number of at least 0 for every query and key, with a sum of at most 1 over the keys."""
    if not isinstance(part, torch.Tensor) or part.dim() != 4 or not part.is_floating_point():
        return False
    # Also in models of float64, some compute the softmax in float32.
    rounding = 2 * part.shape[-1] * max(torch.finfo(part.dtype).eps, torch.finfo(torch.float32).eps)
    sums = part.sum(-1, dtype=torch.float32)
    return bool((part >= 0).all()) and bool(0 < sums.max() <= 1 + rounding)
