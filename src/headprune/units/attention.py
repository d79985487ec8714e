"""The attention sites of a model by the table of families: every module with the projections of its family."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.module_paths import absolute, submodule
from headprune.units.families import Family, Layout
from headprune.units.linear import in_features, is_plain, is_transposed, out_features, refuse_computed
from headprune.units.quirks import is_empty
from headprune.units.slicing.plan import KV_COUNTS, QUERY_COUNTS, WIDTHS
from headprune.units.slicing.record import removed_members
from headprune.units.spec import ROLES, Axis, Blocks, ForwardNeeds, Role, Site

HOW_TO_REGISTER = (
    "register it with headprune.register_family(name, model_types=[...], layouts=[headprune.Layout(suffix, q=..., "
    "k=..., v=..., o=...)])"
)


def attention_sites(model: PreTrainedModel, family: Family) -> list[Site]:
    """The sites in order of execution; some of their heads may have been removed."""
    modules_with_layouts = _matching_modules(model, family)
    if not modules_with_layouts:
        raise UnsupportedModelError(
            f"No attention was found in model type {model.config.model_type!r}, which should look like family "
            f"{family.name!r}; {HOW_TO_REGISTER}."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    uses = Counter(map(id, modules.values()))
    removed = removed_members(model, "heads")
    sites = []
    for index, (path, layout) in enumerate(modules_with_layouts):
        applications = max(uses[id(modules[path])], applications_of(model, family))
        stack = stack_of(model, path, family)
        common = {"index": index, "path": path, "stack": stack, "family": family.name, "applications": applications}
        sites.append(_read(modules, path, layout, family, removed.get(index, []), common))
    return sites


def _matching_modules(model: PreTrainedModel, family: Family) -> list[tuple[str, Layout]]:
    matches = []
    for path, module in model.named_modules():
        for layout in family.layouts:
            named = path == layout.suffix or path.endswith("." + layout.suffix)
            if named and (is_empty(module) or submodule(module, layout.q) is not None):
                matches.append((path, layout))
    return sorted(matches, key=lambda site: [word not in site[0] for word in family.towers])


def applications_of(model: PreTrainedModel, family: Family | None) -> int:
    """How often a forward pass runs a layer whose weights are shared, where the modules do not show it."""
    if family is None or family.applications is None:
        return 1
    times, groups = (getattr(model.config, name) for name in family.applications)
    return times // groups


def _read(
    modules: Mapping[str, nn.Module],
    path: str,
    layout: Layout,
    family: Family,
    removed: list[int],
    common: dict[str, Any],
) -> Site:
    module: Any = modules[path]
    output = absolute(path, layout.o)
    common |= {"kind": "heads", "attention": layout.attention, "o": output}
    memory = tuple(absolute(path, name) for name in layout.tensors)
    if is_empty(module):
        # The module records its deleted maps, as a portable checkpoint starts from the dense class again.
        deleted, group, original = module.headprune_empty["deleted"], module.headprune_empty["group"], len(removed)
        width = _head_dim(module, path, family, 0)
        return Site(
            **common,
            width=width,
            group=group,
            kept=(),
            original=original,
            maps=tuple(name for name in deleted if name not in memory),
            needs=_needs(module, family, original, group, width, tuple(name for name in deleted if name in memory)),
        )
    names: dict[Role, str] = {role: absolute(path, getattr(layout, role)) for role in ROLES}
    linears: dict[str, Any] = {name: _linear(modules, path, name) for name in (*names.values(), output)}
    width = _head_dim(module, path, family, out_features(linears[names["q"]]))
    heads = in_features(linears[output]) // width
    producers = _producers(names, linears, heads, width, layout.interleaved, path)
    kv_heads = len(producers["k"].units)
    if kv_heads == 0 or heads % kv_heads:
        raise UnsupportedModelError(
            f"Stopped at {path} ({type(module).__name__}): {heads} query heads do not share {kv_heads} KV heads "
            f"evenly; {HOW_TO_REGISTER}."
        )
    group, original = heads // kv_heads, heads + len(removed)
    refuse_bad_record(common["index"], path, removed, original)
    columns = Blocks.contiguous(kv_heads, group * width)
    rows: dict[str, Blocks] = {name: _units(name, names, producers, kv_heads) for name in names.values()}
    for relatives, units in ((layout.like_q, columns), (layout.like_k, Blocks.contiguous(kv_heads, width))):
        names_like = (absolute(path, relative) for relative in relatives)
        rows.update({name: units for name in names_like if name in modules})
    axes = [axis for name, units in rows.items() for axis in _rows_of(name, modules[name], units)]
    axes += [Axis(name, 0, heads, Blocks.contiguous(kv_heads, group)) for name in memory]
    axes.append(Axis(f"{output}.weight", int(not is_transposed(linears[output])), heads * width, columns))
    return Site(
        **common,
        width=width,
        group=group,
        kept=tuple(head for head in range(original) if head not in removed),
        original=original,
        axes=tuple(axes),
        maps=tuple(rows),
        producers=producers,
        needs=_needs(module, family, original, group, width, memory),
        memory=memory,
        obstacle=_obstacle(module, layout, family, width, heads, kv_heads),
    )


def _needs(module: Any, family: Family, heads: int, group: int, width: int, delete: tuple[str, ...]) -> ForwardNeeds:
    """The head counts and widths that the module and its config state, by the names that families have for them."""
    dense = {
        **dict.fromkeys(QUERY_COUNTS, heads),
        **dict.fromkeys(KV_COUNTS, heads // group),
        **dict.fromkeys(WIDTHS, heads * width),
    }
    config = getattr(module, "config", None)
    attributes = module.__dict__
    return ForwardNeeds(
        attributes=tuple((name, number) for name, number in dense.items() if name in attributes),
        # Phi-3 reads its head count from the config at every call.
        config=tuple((name, n) for name, n in dense.items() if name not in attributes and hasattr(config, name)),
        empty="bypass",
        quirk=family.quirk,
        delete=delete,
    )


def stack_of(model: Any, path: str, family: Family | None) -> Any:
    """Which part of the model a path belongs to."""
    if not isinstance(model, PreTrainedModel):
        return "encoder"
    for word in ("vision", "text", "decoder", "encoder"):
        if word == "encoder" and family is None:
            break
        if word in path or (word in ("vision", "text") and word in model.config.model_type):
            # BERT's encoder stack is a decoder when its config says so.
            return "decoder" if word == "encoder" and model.config.__dict__.get("is_decoder") else word
    if family is not None:
        return family.stack
    if hasattr(model.config, "patch_size"):
        return "vision"
    return "decoder" if getattr(model.get_submodule(path), "is_causal", False) else "encoder"


def refuse_bad_record(index: int, path: str, removed: Sequence[int], original: int) -> None:
    if any(not 0 <= head < original for head in removed):
        raise UnsupportedModelError(
            f"config.pruned_heads lists head {max(removed)} for site {index} ({path}), which had {original} heads; the "
            "record does not match the weights."
        )


def _linear(modules: Mapping[str, nn.Module], path: str, name: str) -> nn.Module:
    module = modules.get(name)
    if module is not None and is_plain(module):
        return module
    if module is not None:
        refuse_computed(module, name)
    what = "is missing" if module is None else f"is a {type(module).__name__}"
    fix = "; merge the adapter or dequantise the model first" if module is not None else f"; {HOW_TO_REGISTER}"
    raise UnsupportedModelError(f"Stopped at {path}: its projection {name} {what}, not a Linear or Conv1D{fix}.")


def _head_dim(module: nn.Module, path: str, family: Family, rows: int) -> int:
    width = getattr(module, family.head_dim, None)
    if not isinstance(width, int) or width < 1 or rows % width:
        raise UnsupportedModelError(
            f"Stopped at {path} ({type(module).__name__}): the width of its heads could not be read; {HOW_TO_REGISTER} "
            "and name the attribute with head_dim=."
        )
    return width


def _producers(
    names: dict[Role, str], linears: dict[str, Any], heads: int, width: int, interleaved: bool, path: str
) -> dict[str, Axis]:
    """The rows of queries by head, and of keys and values by KV head."""
    result: dict[str, Axis] = {}
    for name in dict.fromkeys(names.values()):
        roles = [role for role in ROLES if names[role] == name]
        length = out_features(linears[name])
        slots, rest = divmod(length, width)
        kv_roles = len([role for role in roles if role != "q"])
        kv_heads, uneven = divmod(slots - (heads if "q" in roles else 0), kv_roles) if kv_roles else (0, slots - heads)
        if rest or uneven or (interleaved and kv_roles and kv_heads != heads):
            raise UnsupportedModelError(
                f"Stopped at {path}: {name} has {length} rows, which are not whole heads of width "
                f"{width} for {heads} query heads; {HOW_TO_REGISTER}."
            )
        offset, stride = 0, len(roles) * width if interleaved else width
        for role in roles:
            count = heads if role == "q" else kv_heads
            units = Blocks(count, ((offset, stride, width),))
            result[role] = Axis(f"{name}.weight", int(is_transposed(linears[name])), length, units)
            offset += width if interleaved else count * width
    if len(result["v"].units) != len(result["k"].units):
        raise UnsupportedModelError(f"Stopped at {path}: its keys and values have different head counts.")
    return {role: result[role] for role in ROLES}


def _units(name: str, names: dict[Role, str], producers: dict[str, Axis], units: int) -> Blocks:
    """All rows of each unit in a map, whatever their roles."""
    parts = []
    for role in ROLES:
        blocks = producers[role].units
        if names[role] == name and isinstance(blocks, Blocks):
            ((offset, stride, width),) = blocks.parts
            share = len(blocks) // units  # query heads of a unit are adjacent
            parts.append((offset, stride * share, width * share))
    return Blocks(units, tuple(parts))


def _rows_of(name: str, module: Any, units: Blocks) -> Iterator[Axis]:
    length = out_features(module)
    yield Axis(f"{name}.weight", int(is_transposed(module)), length, units)
    if module.bias is not None:
        yield Axis(f"{name}.bias", 0, length, units)


def _norms(module: nn.Module) -> tuple[str, ...]:
    """Normalisations of queries, keys or values; removal is exact where they are computed within each head."""
    role = re.compile(r"(^|_)(q|k|v|query|key|value)(_|$)")
    return tuple(name for name, _ in module.named_children() if "norm" in name.lower() and role.search(name.lower()))


def _obstacle(module: Any, layout: Layout, family: Family, width: int, heads: int, kv_heads: int) -> str:
    """Why heads cannot be removed exactly here, as the end of a sentence; empty where they can."""
    for name in _norms(module):
        if any(parameter.numel() != width for parameter in getattr(module, name).parameters()):
            return f"{name} normalises across heads, so every head depends on all the others"
    for name, parameter in module.named_parameters(recurse=False):
        if name not in layout.tensors and (heads in parameter.shape or kv_heads in parameter.shape):
            return f"its parameter {name} has a head axis that headprune does not know"
    if not family.quirk:
        for name, child in module.named_children():
            if isinstance(child, nn.Embedding) and child.embedding_dim == heads:
                return f"its table {name} has a head axis that headprune does not know"
    if getattr(module, "pretraining_tp", 1) > 1 and getattr(module, "slow_but_exact", False):
        return "slow_but_exact splits its output projection by tensor-parallel rank; set config.slow_but_exact = False"
    return ""
