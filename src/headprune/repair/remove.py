"""`remove`: removes units from the weights, and refits the output projections of their sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.batches import rows_of
from headprune.cache import remembered
from headprune.errors import DataError, HeadSelectionError, UnsupportedModelError, warn_renamed
from headprune.hooks.logit_blocks import comparable_outputs
from headprune.hooks.offload import is_offloaded
from headprune.measure.dummy_inputs import dummy_batch
from headprune.repair.apply import apply_repairs, check_repair, plan_repairs
from headprune.repair.regression import BUDGETS_ONLY, Repair, RepairKind
from headprune.signals.moments import Moments
from headprune.surgery.check import check_removable
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task, task_of
from headprune.units import Member, Site, all_sites, as_members, resolve
from headprune.units.cutting.removal import remaining
from headprune.units.dense_model import dense_class, structure_of
from headprune.units.families import family_of
from headprune.units.linear import refuse_quantized

SAMPLES, TOKENS = 2, 8  # of dummy inputs to verify on


def remove(
    model: PreTrainedModel,
    heads: Iterable[tuple[int, int]] = (),
    *,
    neurons: Iterable[tuple[int, int]] = (),
    verify: Mapping[str, Any] | None = None,
    repair: RepairKind = "none",
    batches: Iterable[Mapping[str, Any]] | None = None,
    compensate: RepairKind | None = None,
) -> PreTrainedModel:
    """Remove heads, neurons or both from the weights, in place, and return the model.

    `heads` are (site, head) pairs in original ids, `neurons` (site, neuron) pairs; sites are numbered as `inspect`
    shows them, feed-forward layers after attention. The outputs on the batch `verify` are compared with those of the
    gated model; if they differ, the removal is undone and `EquivalenceError` says by how much. Without one that is
    done once for a class and config of the table of families, on two samples of `batches` or dummy inputs.
    With `repair="lstsq"` the output projection of the remaining heads is refitted by least squares on the calibration
    `batches`; with "mean" its bias absorbs the mean of what was removed; `compensate` is the former name of `repair`.
    Parameters are replaced by smaller ones, so make an optimizer after this and not before.
    """
    if compensate is not None:
        warn_renamed("compensate", "repair")
        repair = compensate
    refuse_quantized(model, "pruned")
    chosen_heads, chosen_neurons = as_members(heads), as_members(neurons, "neuron")
    sites = _checked_sites(model, chosen_heads, chosen_neurons)
    if check_repair(repair) in BUDGETS_ONLY:
        raise DataError(f"repair={repair!r} goes with a budget of prune; use 'lstsq', 'mean' or 'none' here.")
    if repair != "none" and batches is None:
        raise DataError(f"repair={repair!r} needs calibration data; give it as batches=[...].")
    chosen = [*chosen_heads, *chosen_neurons]

    def remove_now(batch: Mapping[str, Any] | None) -> bool:
        remove_from_sites(model, sites, chosen, verify=batch, repair=repair, batches=batches or ())
        return True

    kept = remaining(sites, chosen)
    if verify is None and _needs_verification(model, [sites[index] for index in kept]):
        batch = next(iter(batches), None) if isinstance(batches, Sequence) else None
        _verified_once(model, sites, kept, batch, remove_now)
    else:
        remove_now(verify)
    return model


def _checked_sites(model: PreTrainedModel, heads: list[Member], neurons: list[Member]) -> Sequence[Site]:
    """The sites of the model, if all of these can be removed; heads must be heads, and neurons neurons."""
    sites: Sequence[Site] = all_sites(model) if neurons else resolve(model)
    check_removable([site for site in sites if site.kind == "heads"], heads)
    for member in neurons:
        if not 0 <= member.site < len(sites) or sites[member.site].kind != "neurons":
            indices = [site.index for site in sites if site.kind == "neurons"]
            there = f"sites {indices[0]} to {indices[-1]}" if indices else "no site"
            raise HeadSelectionError(
                f"Neuron {tuple(member)} does not exist: {there} of this model have neurons that can be removed."
            )
    check_removable(sites, neurons)
    return sites


def _needs_verification(model: PreTrainedModel, sites: Sequence[Site]) -> bool:
    """Whether removal has to be verified; without weights nothing can be computed."""
    shapes_only = any(parameter.is_meta for parameter in model.parameters()) and not is_offloaded(model)
    return not shapes_only and any(not site.proven for site in sites)


def _verified_once(
    model: PreTrainedModel,
    sites: Sequence[Site],
    kept: Mapping[int, Sequence[int]],
    batch: Mapping[str, Any] | None,
    remove_now: Callable[[Mapping[str, Any] | None], bool],
) -> None:
    """Verify the removal on two samples of the batch, or on dummy inputs, unless one of its kind was verified for this
    class and config before."""
    entry = repr(family_of(model.config.model_type))  # part of the key, as users may register another
    kinds = sorted({(sites[index].kind, bool(ids)) for index, ids in kept.items()})
    removed = False

    def verified() -> bool | None:
        nonlocal removed
        inputs = _dummy_batch(model) if batch is None else task_of(model).inputs(rows_of(batch, slice(0, 2)))
        if not all(bool(output.isfinite().all()) for output in comparable_outputs(model, inputs)):
            return None  # outputs that are not finite verify nothing
        removed = remove_now(inputs)
        return removed

    remembered(dense_class(model), f"removal {kinds} {entry} {structure_of(model.config)}", verified)
    if not removed:
        remove_now(None)


def _dummy_batch(model: PreTrainedModel) -> dict[str, Any]:
    try:
        return dummy_batch(model, SAMPLES, TOKENS)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{str(error).removesuffix('; give a batch.')}; pass a batch as verify=.") from None


def remove_from_sites(
    model: PreTrainedModel,
    sites: Sequence[Site],
    members: Sequence[Member],
    *,
    verify: Mapping[str, Any] | None = None,
    repair: RepairKind = "none",
    batches: Iterable[Mapping[str, Any]] = (),
    moments: Mapping[int, Moments] | None = None,
    task: Task | None = None,
) -> list[Repair]:
    """`remove` for callers that have the sites of the model and valid members of them, need the repairs, or have the
    `moments` for them."""
    if not members:
        return []
    repairs = plan_repairs(model, sites, members, repair, batches, task or task_of(model), moments)
    remove_units(model, members, sites=sites, verify=verify, afterwards=lambda: apply_repairs(model, sites, repairs))
    return repairs
