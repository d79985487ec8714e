"""Which numbers the forward code of a module reads: tried until fewer heads give what they must."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headprune.discovery.influence import said
from headprune.hooks.attach import hooks
from headprune.hooks.attention_implementation import attention_implementation
from headprune.hooks.recorded_calls import Call, first_tensor
from headprune.units.cutting.plan import KV_COUNTS, QUERY_COUNTS, WIDTHS
from headprune.units.cutting.removal import slice_weights
from headprune.units.cutting.undo import Undo
from headprune.units.linear import is_plain, is_transposed
from headprune.units.members import Member
from headprune.units.spec import ForwardNeeds, Site

KNOWN = (*QUERY_COUNTS, *KV_COUNTS, *WIDTHS)
Numbers = tuple[tuple[str, int], ...]
# Numbers that have nothing to do with how many heads there are, whatever their value.
NEVER = re.compile(
    r"layer|head_dim|^head_size|attention_head_size|dim_head|d_head|d_kv|key_value_proj_dim|window|position|bucket|block|length|dilation|stride"
    r"|kernel|ratio|rank|drop|idx|index|hash|chunk|rotary|^training$"
)
MOST = 8  # names that are tried in every combination
# Relative to the largest output. Some code takes steps in float32 whatever the model is in: their rounding, 1e-7, grows
# a hundredfold at most on the way to the outputs. Heads that do not belong together change outputs by much more.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}


def forward_needs(model: nn.Module, site: Site, call: Call) -> ForwardNeeds | str:
    """What works for this site, or in words what happened instead."""
    module: Any = model.get_submodule(site.path)
    first = ""
    units = site.units()
    if len(units) > 1:
        patterns = [[m for unit in units[::2] for m in unit], [*units[-1]]]
        expected = [_silenced(model, site, call, members) for members in patterns]
        for attributes, config in _choices(module, site):
            made = replace(site.needs, attributes=attributes, config=config)
            said = _tried(model, replace(site, needs=made), call, patterns, expected)
            if not said:
                break
            first = first or said
        else:
            return first
    else:
        attributes, config = next(iter(_choices(module, site)))
        made = replace(site.needs, attributes=attributes, config=config)
    return replace(made, **_empty_form(model, replace(site, needs=made), call))


def _choices(module: Any, site: Site) -> Iterator[tuple[Numbers, Numbers]]:
    """Names of numbers that may have to follow the heads, the likely ones first, each choice once."""
    units = len(site.units())
    sizes = {site.original, units, site.original * site.width, *(axis.length for axis in site.axes)}
    numbers = {
        (f"{path}.{name}" if path else name): value
        for path, child in module.named_modules()
        if not is_plain(child)
        for name, value in child.__dict__.items()
        if type(value) is int and not NEVER.search(name) and value and value % units == 0
        if name in KNOWN or value in sizes or "group" in name
    }
    own = [name for name in numbers if "." not in name]
    config = getattr(module, "config", None)
    read = {
        name: value
        for name in (*QUERY_COUNTS, *KV_COUNTS)
        if name not in own and (value := _number(config, name)) and value % units == 0
    }
    queries = [name for name in own if name in (*QUERY_COUNTS, *WIDTHS)]
    known = [name for name in own if name in KNOWN]
    rest = [name for name in numbers if name not in queries][:MOST]
    # Code that was not run may read a count as well, so as many names as possible follow, the well-known ones first.
    every = ([*queries, *names] for size in range(len(rest), -1, -1) for names in itertools.combinations(rest, size))
    fewer = (list(names) for size in range(len(own), -1, -1) for names in itertools.combinations(own[:MOST], size))
    seen: set[tuple[frozenset[str], bool]] = set()
    for names in itertools.chain([known], every, fewer):
        for with_config in (True, False) if read else (False,):
            key = frozenset(names), with_config
            if key not in seen:
                seen.add(key)
                yield tuple((name, numbers[name]) for name in names), tuple(read.items()) if with_config else ()


def _number(config: Any, name: str) -> int:
    """A number in a config, 0 where it has none by that name, or one for every layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # a config whose layers differ refuses to give one number for all
        return 0
    return value if type(value) is int else 0


def _tried(
    model: nn.Module,
    site: Site,
    call: Call,
    patterns: Sequence[Sequence[Member]],
    expected: Sequence[list[torch.Tensor]],
) -> str:
    """Empty where removing gives what was expected; what happened otherwise."""
    for members, wanted in zip(patterns, expected, strict=True):
        undo = Undo(model)
        try:
            slice_weights(model, [replace(site, index=0)], [Member(0, member.index) for member in members])
            given = _outputs(model, site, call)
        except Exception as error:
            return f"its forward fails with fewer heads ({said(error)})"
        finally:
            undo()
        if not all(close(one, other) for one, other in zip(wanted, given, strict=False)) or len(given) < len(wanted):
            return "removing its heads did not give what silencing them gives"
    return ""


def close(wanted: torch.Tensor, given: torch.Tensor, loosened: float = 1.0) -> bool:
    """Equal but for rounding; what is not finite has to be so in both."""
    if wanted.shape != given.shape:
        return False
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(given)):
        return False
    one, other = wanted[finite], given[finite]
    if not one.numel():
        return True
    allowed = loosened * TOLERANCE.get(wanted.dtype, 1e-4) * max(1.0, float(one.abs().max()))
    return bool((one - other).abs().max() <= allowed)


def _output(model: nn.Module, site: Site, call: Call) -> torch.Tensor:
    """What the output map gives when the module is called."""
    module, output = model.get_submodule(site.path), model.get_submodule(site.o)
    seen: list[torch.Tensor] = []
    with torch.no_grad(), hooks([(output, lambda m, args, out: seen.append(out))]):
        result = call(module)
        if not site.o.startswith(site.path + "."):
            columns = first_tensor(result)
            assert columns is not None
            output(columns)
    return seen[-1]


def _outputs(model: nn.Module, site: Site, call: Call) -> list[torch.Tensor]:
    """The same as the model attends, and by the code that is written out: either may read other numbers."""
    usual = _output(model, site, call)
    try:
        with attention_implementation(model, lambda name: "eager"):
            return [usual, _output(model, site, call)]
    except Exception:  # a mask that was made for the usual way need not serve the other
        return [usual]


def _silenced(model: nn.Module, site: Site, call: Call, members: Sequence[Member]) -> list[torch.Tensor]:
    """The same with the columns of these members set to zero in the weights."""
    with silent_columns(model, [(site, members)]):
        return _outputs(model, site, call)


class silent_columns:  # noqa: N801 - reads as a statement
    """The columns of these members of each site are zero for the length of the block."""

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


def _empty_form(model: nn.Module, site: Site, call: Call) -> dict[str, Any]:
    """How the site is run when it has no heads left: not at all where what it gives is what its output map gives."""
    everything = [member for unit in site.units() for member in unit]
    wanted = _silenced(model, site, call, everything)
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
            made = replace(site, needs=replace(site.needs, empty="bypass", form=form))
            if not _tried(model, made, call, [everything], [wanted]):
                return {"empty": "bypass", "form": form}
    silent = replace(site, needs=replace(site.needs, empty="silent"))
    if not _tried(model, silent, call, [everything], [wanted]):
        return {"empty": "silent"}
    return {"empty": ""}


def _same(part: Any, target: torch.Tensor) -> bool:
    return isinstance(part, torch.Tensor) and part.shape == target.shape and bool(torch.equal(part, target))
