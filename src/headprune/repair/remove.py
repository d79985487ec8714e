"""`remove`: removes units from the weights, and refits the output projections of their sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.errors import DataError, HeadSelectionError, UnsupportedModelError, warn_renamed
from headprune.hooks.logit_blocks import comparable_outputs
from headprune.hooks.model_lock import exclusively
from headprune.hooks.offload import is_offloaded
from headprune.measure.dummy_inputs import dummy_batch
from headprune.repair.apply import apply_repairs, check_repair, plan_repairs
from headprune.repair.regression import BUDGETS_ONLY, Repair, RepairKind
from headprune.signals.moments import Moments
from headprune.surgery.check_removable import check_removable
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task, task_of
from headprune.tasks.checks import checked_batches
from headprune.units import Member, Site, all_sites, as_members, resolve
from headprune.units.dense_model import changed_module, classes_of, dense_class, structure_of
from headprune.units.families import family_of
from headprune.units.linear import refuse_inference_weights, refuse_quantized
from headprune.units.slicing.removal import remaining

SAMPLES, TOKENS = 2, 8  # of dummy inputs to verify on


@exclusively
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
    done on two samples of `batches` or dummy inputs: once for a class and config of the table of families, and always
    where modules of the model are not those that its class builds.
    With `repair="lstsq"` the output projection of the remaining heads is refitted by least squares on the calibration
    `batches`; with "mean" its bias absorbs the mean of what was removed; `compensate` is the former name of `repair`.
    Parameters are replaced by smaller ones, so make an optimizer after this and not before.
    """
    if compensate is not None:
        warn_renamed("compensate", "repair")
        repair = compensate
    refuse_quantized(model, "pruned")
    refuse_inference_weights(model)
    chosen_heads, chosen_neurons = as_members(heads), as_members(neurons, "neuron")
    sites = _checked_sites(model, chosen_heads, chosen_neurons)
    if check_repair(repair) in BUDGETS_ONLY:
        raise DataError(f"repair={repair!r} goes with a budget of prune; use 'lstsq', 'mean' or 'none' here.")
    if repair != "none" and batches is None:
        raise DataError(f"repair={repair!r} needs calibration data; give it as batches=[...].")
    if batches is not None:
        checked = checked_batches(batches, model)
        batches = list(checked) if isinstance(batches, Sequence) else checked
    if verify is not None:
        (verify,) = checked_batches([verify], model)
    chosen = [*chosen_heads, *chosen_neurons]

    def remove_now(batch: Mapping[str, Any] | None) -> bool:
        remove_from_sites(model, sites, chosen, verify=batch, repair=repair, batches=batches or ())
        return True

    kept = remaining(sites, chosen)
    batch = next(iter(batches), None) if isinstance(batches, Sequence) else None
    if verify is not None or _has_no_weights(model):
        remove_now(verify)
    elif changed_module(model) is not None:
        inputs = _inputs(model, batch)
        if not _is_finite(model, inputs):
            raise UnsupportedModelError(
                f"{type(model).__name__} has modules that its class does not build, and outputs that are not finite, "
                "so the removal cannot be verified; pass a batch as verify=."
            )
        remove_now(inputs)
    elif all(sites[index].proven for index in kept):
        remove_now(None)
    else:
        _verified_once(model, sites, kept, batch, remove_now)
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


def _has_no_weights(model: PreTrainedModel) -> bool:
    """Whether the model is on the meta device, where nothing can be computed."""
    return any(parameter.is_meta for parameter in model.parameters()) and not is_offloaded(model)


def _inputs(model: PreTrainedModel, batch: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Two samples of the batch, or dummy inputs."""
    if batch is None:
        return _dummy_batch(model)
    task = task_of(model)
    return task.inputs(task.select(batch, slice(0, 2)))


def _is_finite(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    return all(bool(output.isfinite().all()) for output in comparable_outputs(model, inputs))


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
        inputs = _inputs(model, batch)
        if not _is_finite(model, inputs):
            return None  # outputs that are not finite verify nothing
        removed = remove_now(inputs)
        return removed

    kind, settings = dense_class(model), f"removal {kinds} {entry} {structure_of(model.config)}"
    remembered(kind, settings, verified, classes=classes_of(kind, model.config))
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
