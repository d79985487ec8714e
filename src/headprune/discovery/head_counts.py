"""Determines by trial which integer attributes of a module have to change with its number of heads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headprune.discovery.influence import describe_error
from headprune.hooks.attach import hooks
from headprune.hooks.attention_implementation import attention_implementation
from headprune.hooks.module_calls import ModuleCall, first_tensor
from headprune.units.linear import is_plain, is_transposed
from headprune.units.members import Member
from headprune.units.slicing.plan import KV_COUNTS, QUERY_COUNTS, WIDTHS
from headprune.units.slicing.removal import slice_weights
from headprune.units.slicing.undo import Undo
from headprune.units.spec import ForwardNeeds, Site

COMMON_NAMES = (*QUERY_COUNTS, *KV_COUNTS, *WIDTHS)
Numbers = tuple[tuple[str, int], ...]
# Attributes that never depend on the number of heads, whatever their value.
UNRELATED = re.compile(
    r"layer|head_dim|^head_size|attention_head_size|dim_head|d_head|d_kv|key_value_proj_dim|window|position|bucket|block|length|dilation|stride"
    r"|kernel|ratio|rank|drop|idx|index|hash|chunk|rotary|^training$"
)
MAX_NAMES = 8  # attributes of which every combination is tried
# Relative to the largest output. Some code computes in float32 whatever the dtype of the model: its rounding error,
# 1e-7, grows a hundredfold at most on the way to the outputs. A wrong layout changes outputs by much more.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}


def forward_needs(model: nn.Module, site: Site, call: ModuleCall) -> ForwardNeeds | str:
    """The attributes to change when heads of this site are removed, or the reason why no choice of them works."""
    module: Any = model.get_submodule(site.path)
    first_failure = ""
    units = site.units()
    if len(units) > 1:
        patterns = [[m for unit in units[::2] for m in unit], [*units[-1]]]
        expected = [_silenced_outputs(model, site, call, members) for members in patterns]
        for attributes, config in _choices(module, site):
            needs = replace(site.needs, attributes=attributes, config=config)
            failure = _failure(model, replace(site, needs=needs), call, patterns, expected)
            if not failure:
                break
            first_failure = first_failure or failure
        else:
            return first_failure
    else:
        attributes, config = next(iter(_choices(module, site)))
        needs = replace(site.needs, attributes=attributes, config=config)
    return replace(needs, **_empty_form(model, replace(site, needs=needs), call))


def _choices(module: Any, site: Site) -> Iterator[tuple[Numbers, Numbers]]:
    """Choices of attributes (of the module and its config) to change with the heads, likely ones first, each once."""
    units = len(site.units())
    sizes = {site.original, units, site.original * site.width, *(axis.length for axis in site.axes)}
    numbers = {
        (f"{path}.{name}" if path else name): value
        for path, child in module.named_modules()
        if not is_plain(child)
        for name, value in child.__dict__.items()
        if type(value) is int and not UNRELATED.search(name) and value and value % units == 0
        if name in COMMON_NAMES or value in sizes or "group" in name
    }
    local_names = [name for name in numbers if "." not in name]
    config = getattr(module, "config", None)
    config_counts = {
        name: value
        for name in (*QUERY_COUNTS, *KV_COUNTS)
        if name not in local_names and (value := _number(config, name)) and value % units == 0
    }
    queries = [name for name in local_names if name in (*QUERY_COUNTS, *WIDTHS)]
    common = [name for name in local_names if name in COMMON_NAMES]
    optional = [name for name in numbers if name not in queries][:MAX_NAMES]
    # Code that did not run may read a count as well, so the largest choices come first.
    largest_first = (
        [*queries, *names] for size in range(len(optional), -1, -1) for names in itertools.combinations(optional, size)
    )
    subsets = (
        list(names)
        for size in range(len(local_names), -1, -1)
        for names in itertools.combinations(local_names[:MAX_NAMES], size)
    )
    seen: set[tuple[frozenset[str], bool]] = set()
    for names in itertools.chain([common], largest_first, subsets):
        for with_config in (True, False) if config_counts else (False,):
            key = frozenset(names), with_config
            if key not in seen:
                seen.add(key)
                yield (
                    tuple((name, numbers[name]) for name in names),
                    tuple(config_counts.items()) if with_config else (),
                )


def _number(config: Any, name: str) -> int:
    """An integer of a config; 0 where it has none of that name, or a value per layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # a heterogeneous config has no single value
        return 0
    return value if type(value) is int else 0


def _failure(
    model: nn.Module,
    site: Site,
    call: ModuleCall,
    patterns: Sequence[Sequence[Member]],
    expected: Sequence[list[torch.Tensor]],
) -> str:
    """Empty where the outputs after removal are as expected; the reason otherwise."""
    for members, target in zip(patterns, expected, strict=True):
        undo = Undo(model)
        try:
            slice_weights(model, [replace(site, index=0)], [Member(0, member.index) for member in members])
            outputs = _outputs(model, site, call)
        except Exception as error:
            return f"its forward fails with fewer heads ({describe_error(error)})"
        finally:
            undo()
        if not all(close(reference, output) for reference, output in zip(target, outputs, strict=False)) or len(
            outputs
        ) < len(target):
            return "removing its heads did not give what silencing them gives"
    return ""


def close(expected: torch.Tensor, actual: torch.Tensor, factor: float = 1.0) -> bool:
    """Equal up to rounding; entries that are not finite have to be at the same positions in both."""
    if expected.shape != actual.shape:
        return False
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return False
    reference, values = expected[finite], actual[finite]
    if not reference.numel():
        return True
    allowed = factor * TOLERANCE.get(expected.dtype, 1e-4) * max(1.0, float(reference.abs().max()))
    return bool((reference - values).abs().max() <= allowed)


def _output(model: nn.Module, site: Site, call: ModuleCall) -> torch.Tensor:
    """The output of the output map when the module is called."""
    module, output = model.get_submodule(site.path), model.get_submodule(site.o)
    outputs: list[torch.Tensor] = []
    with torch.no_grad(), hooks([(output, lambda m, args, out: outputs.append(out))]):
        result = call(module)
        if not site.o.startswith(site.path + "."):
            columns = first_tensor(result)
            assert columns is not None
            output(columns)
    return outputs[-1]


def _outputs(model: nn.Module, site: Site, call: ModuleCall) -> list[torch.Tensor]:
    """The outputs with the attention implementation of the model and with eager: they may read different attributes."""
    usual = _output(model, site, call)
    try:
        with attention_implementation(model, lambda name: "eager"):
            return [usual, _output(model, site, call)]
    except Exception:  # a mask made for one implementation need not fit eager
        return [usual]


def _silenced_outputs(model: nn.Module, site: Site, call: ModuleCall, members: Sequence[Member]) -> list[torch.Tensor]:
    """The same outputs with the columns of these members set to zero in the weights."""
    with silent_columns(model, [(site, members)]):
        return _outputs(model, site, call)


class silent_columns:  # noqa: N801 - reads as a statement
    """Inside the block, the columns of these members of each site are zero."""

    def __init__(self, model: nn.Module, chosen: Sequence[tuple[Site, Sequence[Member]]]) -> None:
        self.model, self.chosen = model, chosen
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        for site, members in self.chosen:
            output: Any = self.model.get_submodule(site.o)
            self.before.append((output.weight, output.weight.detach().clone()))
            columns = site.columns([site.position(member.index) for member in members])
            with torch.no_grad():
                if is_transposed(output):
                    output.weight[columns] = 0
                else:
                    output.weight[:, columns] = 0

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for weight, old in reversed(self.before):
                weight.copy_(old)


def _empty_form(model: nn.Module, site: Site, call: ModuleCall) -> dict[str, Any]:
    """How the site runs without heads: "bypass" skips the module, where its output is that of its output map."""
    everything = [member for unit in site.units() for member in unit]
    expected = _silenced_outputs(model, site, call, everything)
    with torch.no_grad():
        result = call(model.get_submodule(site.path))
    inside = site.o.startswith(site.path + ".")
    target = _output(model, site, call) if inside else first_tensor(result)
    if target is not None:
        is_tuple = type(result) in (tuple, list)
        parts = list(result) if is_tuple else [result]
        words = ["output" if _same(part, target) else "none" for part in parts]
        if words[0] == "output" and words.count("output") == 1 and (is_tuple or isinstance(result, torch.Tensor)):
            form = tuple(words) if is_tuple else None
            bypass = replace(site, needs=replace(site.needs, empty="bypass", form=form))
            if not _failure(model, bypass, call, [everything], [expected]):
                return {"empty": "bypass", "form": form}
    silent = replace(site, needs=replace(site.needs, empty="silent"))
    if not _failure(model, silent, call, [everything], [expected]):
        return {"empty": "silent"}
    return {"empty": ""}


def _same(part: Any, target: torch.Tensor) -> bool:
    return isinstance(part, torch.Tensor) and part.shape == target.shape and bool(torch.equal(part, target))
