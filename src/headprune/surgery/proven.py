"""Nothing is removed by a table that has not been proven, on a small random twin, for this class and version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.units import AttentionSite, resolve
from headprune.units.measured import cache
from headprune.units.measured.proof import everywhere, fails, reloading_fails
from headprune.units.measured.verdict import NoTwinError, dense_class, dense_config, fresh_twin, twin_of
from headprune.units.small import small_config

NO_TWIN = "nothing could be proven, since "
NOT_STRUCTURE = ("pruned_heads", "headprune", "id2label", "label2id", "_name_or_path")
_proven: dict[tuple[type, str], str] = {}


def require_proof(model: PreTrainedModel, sites: Sequence[AttentionSite], *, verified: bool) -> None:
    """Raise unless removal is proven; where no twin can be built, being `verified` on a batch stands for the proof."""
    reason = unproven(model, sites)
    no_twin = reason.startswith(NO_TWIN)
    if reason and not (no_twin and verified):
        fix = "; pass a batch as verify= to have the removal checked on it instead" if no_twin else ""
        raise UnsupportedModelError(f"Heads of {type(model).__name__} cannot be removed: {reason}{fix}.")


def unproven(model: PreTrainedModel, sites: Sequence[AttentionSite]) -> str:
    """Empty where removal is proven exact for the class of this model, otherwise why not.

    What was measured has been proven by then; a table is proven here, once.
    """
    if all(site.recipe is not None for site in sites):
        return ""
    key = dense_class(model), _structure(model, sites)
    if key not in _proven:
        stored = cache.read(key[0], "table " + key[1])
        with torch.device("cpu"):
            _proven[key] = _proof(model) if stored is None else stored["reason"]
        if stored is None:
            cache.write(key[0], "table " + key[1], {"reason": _proven[key]})
    return _proven[key]


def _proof(model: PreTrainedModel) -> str:
    """Empty where all removals from a small twin are exact; otherwise why not."""
    kind, config = dense_class(model), dense_config(model.config)
    try:
        twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=2))
        small = twin.config
    except (NoTwinError, ValueError, TypeError, KeyError) as error:
        if sum(parameter.numel() for parameter in model.parameters()) > 50_000_000:
            return NO_TWIN + str(error)
        try:
            twin, runs = twin_of(kind, config)
            small = config
        except NoTwinError as again:
            return NO_TWIN + str(again)
    sites = resolve(twin)
    for pattern in everywhere(sites):
        reason = fails(twin, runs, sites, pattern)
        if reason:
            return f"on a small random model, {reason}"
    return reloading_fails(twin, lambda: fresh_twin(kind, small, twin.dtype), runs, sites)


def _structure(model: PreTrainedModel, sites: Sequence[AttentionSite]) -> str:
    """All settings but sizes, and how heads share keys: what decides which code runs."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in NOT_STRUCTURE}
        if isinstance(value, (list, tuple)):
            return sorted({str(item) for item in value if isinstance(item, (str, bool))})
        return value if isinstance(value, (str, bool)) or value is None else "number"

    settings = plain(
        {n: v for n, v in model.config.to_dict().items() if n not in ("id2label", "label2id", "_name_or_path")}
    )
    sharing = sorted({(site.path.count("."), site.group == 1, site.storage, bool(site.extras)) for site in sites})
    return json.dumps([settings, sharing, sorted({site.obstacle for site in sites})], sort_keys=True, default=str)
