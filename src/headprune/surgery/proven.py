"""Nothing is removed by a table that has not been proven, on a small random twin, for this class and version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.discovery.discover import (
    NoTwinError,
    fresh_twin,
    twin_of,
)
from headprune.discovery.proof import everywhere, fails, reloading_fails
from headprune.discovery.twin import small_config
from headprune.errors import UnsupportedModelError
from headprune.units import Kind, Member, Site, by_site, sites_of
from headprune.units.cutting.removal import remaining
from headprune.units.dense import NOT_STRUCTURE, dense_class, dense_config, quiet
from headprune.units.families import family_of

NO_TWIN = "nothing could be proven, since "
AS_IT_IS = 50_000_000  # parameters of a model whose twin may be as large as itself


@dataclass(frozen=True)
class Proof:
    """Why removals are not exact, and why emptying a site is not; empty where they are."""

    removing: str = ""
    emptying: str = ""


def require_proof(model: PreTrainedModel, sites: Sequence[Site], members: Sequence[Member], *, verified: bool) -> None:
    """Raise unless removing these members is proven; where no twin can be built, being `verified` on a batch stands for
    the proof."""
    proof = proof_for(model, sites)
    no_twin = proof.removing.startswith(NO_TWIN)
    if proof.removing and not (no_twin and verified):
        fix = "; pass a batch as verify= to have the removal checked on it instead" if no_twin else ""
        raise UnsupportedModelError(
            f"{_kinds(sites, members).capitalize()} of {type(model).__name__} cannot be removed: {proof.removing}{fix}."
        )
    if proof.emptying and any(not ids for ids in remaining(sites, members).values()):
        raise UnsupportedModelError(
            f"No site of {type(model).__name__} can lose all its {_kinds(sites, members)}: {proof.emptying}; keep one "
            "unit per site (min_per_site=1)."
        )


def _kinds(sites: Sequence[Site], members: Sequence[Member]) -> str:
    """What the members are, for people."""
    going = by_site(members)
    return " and ".join(dict.fromkeys(site.kind for site in sites if site.index in going))


def proof_for(model: PreTrainedModel, sites: Sequence[Site]) -> Proof:
    """Whether removal is exact for the class of this model. What was measured has been proven by then; a table is
    proven here, once."""
    if all(site.family == "measured" for site in sites):
        return Proof()
    kinds = tuple(dict.fromkeys(site.kind for site in sites))
    failed = Proof()

    def make() -> bool | None:
        nonlocal failed
        with torch.device("cpu"), quiet():
            failed = _proof(model, kinds)
        return True if failed == Proof() else None  # only what went well is remembered

    remembered(dense_class(model), "table " + _structure(model, sites), make)
    return failed


def _proof(model: PreTrainedModel, kinds: Sequence[Kind]) -> Proof:
    """Remove units from a small twin and look."""
    kind, config = dense_class(model), dense_config(model.config)
    try:
        small = small_config(config, keep_heads=False, depth=2)
        twin, runs = twin_of(kind, small)
    except Exception as error:  # whatever a config class or a model says to sizes it did not expect
        if sum(parameter.numel() for parameter in model.parameters()) > AS_IT_IS:
            return Proof(NO_TWIN + str(error))
        try:
            small = config
            twin, runs = twin_of(kind, config)
        except NoTwinError as again:
            return Proof(NO_TWIN + str(again))
    sites = sites_of(twin, kinds)
    some, *emptied = everywhere(sites)
    reason = fails(twin, runs, sites, some)
    if reason:
        return Proof(f"on a small random model, {reason}")
    for pattern in emptied:
        reason = fails(twin, runs, sites, pattern)
        if reason:
            return Proof(emptying=f"on a small random model, {reason}")
    return Proof(reloading_fails(twin, lambda: fresh_twin(kind, small, twin.dtype), runs, sites))


def _structure(model: PreTrainedModel, sites: Sequence[Site]) -> str:
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
    sharing = sorted({(site.path.count("."), site.group == 1, len(site.maps)) for site in sites if site.attention})
    entry = repr(family_of(model.config.model_type))  # anyone may register another
    return json.dumps(
        [settings, entry, sharing, sorted({(site.kind, site.obstacle) for site in sites})], sort_keys=True, default=str
    )
