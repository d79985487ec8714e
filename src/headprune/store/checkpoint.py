"""Saving and loading pruned models: safetensors, the model's own config, and a fingerprint of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel

from headprune.errors import CheckpointError, HeadpruneError
from headprune.hooks.gates import InstalledGates
from headprune.hooks.offload import is_offloaded, state_of
from headprune.models import OWN
from headprune.store import fingerprint, portability, proof
from headprune.store.configs import read_config, write_settings
from headprune.store.files import replaced_directory
from headprune.store.layout import apply_layout, layout_of, read_layout
from headprune.store.native import PER_LAYER, dense_numbers, native_numbers
from headprune.store.places import local_folder, model_folder, refuse_bad_config, refuse_missing_structure
from headprune.store.processors import carry_processor, outdated
from headprune.store.quantized import expect_quantized, fill_quantized, has_quantized, save_quantized
from headprune.surgery.shrink import learn_layout, shrink
from headprune.units import Kind, Site, all_sites, survey
from headprune.units.cutting.record import (
    NAMES,
    dense_numbers_of,
    from_ranges,
    put_numbers,
    removed_members,
    with_numbers,
)
from headprune.units.dense import dense_class, dense_config_class
from headprune.units.linear import is_quantized

FORMS: dict[Kind, str] = {"heads": "lists of head numbers", "neurons": 'ranges of neuron numbers such as "0-3,7"'}


def save(
    model: PreTrainedModel,
    path: str | Path,
    *,
    processor: Any = None,
    portable: bool = True,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write the model, pruned or not, so that `headprune.load(path)` gives it back.

    Tokenizer or image processor files come along from the folder the model was loaded from, or from `processor`; after
    `shrink_vocabulary` it is the smaller tokenizer that comes along.
    A pruned checkpoint that the plain class cannot be built for also carries the code with which plain transformers
    loads it (`trust_remote_code=True`), unless `portable=False`. The directory appears, or is replaced, in one step.
    """
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"headprune.save writes transformers models; {type(model).__name__} is none: use torch.save(model, path)."
        )
    if any(isinstance(module, InstalledGates) for module in model.modules()):
        raise CheckpointError("This model has learned gates on it; close them with gates.remove() before you save it.")
    quantized = any(is_quantized(parameter) for parameter in model.parameters())

    def weights(folder: Path) -> None:
        if quantized:
            save_quantized(model, folder, max_shard_size)
        else:
            # transformers brings in what its own device_map has offloaded, and nothing else.
            unknown = is_offloaded(model) and not getattr(model, "hf_device_map", None)
            given = {"state_dict": state_of(model)} if unknown else {}
            model.save_pretrained(folder, max_shard_size=max_shard_size, **given)

    return _save(model, Path(path), weights, processor, portable=portable, quantized=quantized)


def save_weights_of(model: PreTrainedModel, path: str | Path, weights: Callable[[Path], None]) -> Path:
    """The same for a model whose weights are elsewhere, and are put into a folder by `weights`. A form that plain
    classes are built from is believed by its shapes, where numbers for all layers say it: classes read those."""

    def everything(folder: Path) -> None:
        weights(folder)
        model.config.architectures = [dense_class(model).__name__]
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)

    return _save(model, Path(path), everything, None, believed=True)


def _save(
    model: PreTrainedModel,
    target: Path,
    weights: Callable[[Path], None],
    processor: Any,
    *,
    portable: bool = True,
    quantized: bool = False,
    believed: bool = False,
) -> Path:
    sites = all_sites(model) if removed_members(model, "neurons") else survey(model).sites
    try:
        with replaced_directory(target, (*outdated(model), f"{portability.MODULE}.py")) as fresh:
            weights(fresh)
            _write(model, sites, fresh, processor, portable=portable, quantized=quantized, believed=believed)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"Cannot save to {target}: {reason}; make room, or choose another place.") from error
    return target


def _write(
    model: PreTrainedModel,
    sites: Sequence[Site],
    folder: Path,
    processor: Any,
    *,
    portable: bool,
    quantized: bool,
    believed: bool,
) -> None:
    """All but the weights, which are there already."""
    carry_processor(model, processor, folder)
    settings = _dense_settings(json.loads((folder / "config.json").read_text()), portability.can_ship(model))
    (folder / f"{portability.MODULE}.py").unlink(missing_ok=True)  # of the checkpoint that the model came from
    # Neither plain classes nor the code that comes along know integers.
    layout = layout_of(model, sites)
    if layout:
        settings["headprune"] = layout
    native = None if quantized or not portability.can_ship(model) else _native(model, sites, settings, folder, believed)
    if native is not None:
        settings = native
    elif portable and not quantized and portability.can_ship(model):
        if layout:
            portability.write(model, settings, folder)
        elif dense_class(model).__name__ in OWN:
            portability.ship_own(model, settings, folder)
    write_settings(folder, settings)
    fingerprint.write(folder)


def _native(
    model: PreTrainedModel, sites: Sequence[Site], settings: Mapping[str, Any], folder: Path, believed: bool
) -> dict[str, Any] | None:
    """Settings from which the plain class is built as the model is, written into the folder and proven there by a
    process without headprune; None where there are none. What is too large for that is believed by its shapes, if
    numbers for all layers say it: classes read those."""
    numbers = native_numbers(model, sites, settings)
    believed = believed or proof.too_large(model)
    if not numbers or (PER_LAYER in numbers and believed):
        return None
    ours = dense_class(model).__name__ in OWN
    dense = dense_numbers(numbers, dense_config_class(model).from_dict(dict(settings)).to_dict())
    changed = with_numbers(settings, numbers)
    changed["headprune"] = {**settings["headprune"], "dense": dense, "native": True}
    if ours:
        portability.ship_own(model, changed, folder)
    write_settings(folder, changed)
    return changed if believed or proof.loads_plainly(model, folder, ours=ours) else None


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
    """Load a checkpoint that `save` wrote, from a folder or from the hub; an unpruned one loads as well.

    `options` go to transformers' `from_pretrained` (dtype, device_map, attn_implementation, revision, ...). Pickles
    are refused, and code that comes with a checkpoint is not run.
    """
    folder = _folder(path, options)
    _refuse_unreadable(folder)
    fingerprint.verify(folder)
    config, removed, layout = _read_config(folder)
    dense = model_class or _model_class(config, folder)
    options.pop("trust_remote_code", None)
    kind = _pruned(dense, config, removed, layout, folder)
    if has_quantized(folder):
        expect_quantized(kind, folder, options)
    try:
        model, found = kind.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below with the name of the tensor
            **options,
        )
    except CheckpointError:
        raise
    except HeadpruneError as error:
        raise _unfitting(removed, folder, error) from None
    except (RuntimeError, ValueError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The weights in {folder} do not fit its config.json: {reason[:400]}") from None
    if has_quantized(folder):
        fill_quantized(model, folder)
    for what in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if found.get(what) and not (model_class and what != "mismatched_keys"):
            first = sorted(found[what], key=str)[0]
            name = first if isinstance(first, str) else first[0]
            raise CheckpointError(
                f"The weights in {folder} do not fit its config.json: {name} is {what.split('_')[0]}; save the model "
                "again with headprune.save, or pass the class it was saved from as model_class."
            )
    model.__class__ = dense
    return model


def load_structure(path: str | Path) -> PreTrainedModel:
    """The model of a folder, a config.json or a hub name without its weights: shapes on the meta device only."""
    refuse_missing_structure(path)
    path = str(model_folder(path))
    try:
        config, removed, layout = _read_config(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} is neither a folder with a config.json nor a model that could be fetched from the hub "
            f"({type(error).__name__}); check the name and the connection."
        ) from None
    dense = _model_class(config, path) if config.architectures else AutoModel._model_mapping[type(config)]
    try:
        kind = _pruned(dense, config, removed, layout, path)
        with torch.device("meta"):
            pruned: PreTrainedModel = kind(config)
            return pruned
    except CheckpointError:
        raise
    except HeadpruneError as error:
        raise _unfitting(removed, path, error) from None


Removed = dict[Kind, dict[int, list[int]]]  # by kind, and by the number of a site among those of its kind


def _unfitting(removed: Removed, place: str | Path, error: HeadpruneError) -> CheckpointError:
    what = " and ".join(removed) or "heads"
    return CheckpointError(f"The record of removed {what} in {place} does not fit its model: {error}")


def _read_config(path: str | Path) -> tuple[Any, Removed, dict[str, Any]]:
    """The config of the dense model, what was removed from it, and the layout of what is left."""
    try:
        config = read_config(path)
        put_numbers(config, dense_numbers_of(config))
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The config of {path} cannot be read: {reason[:300]}") from None
    removed: Removed = {kind: own for kind in NAMES if (own := _removed(config, kind, path))}
    layout = read_layout(config, removed, path)
    for name in ("headprune", "auto_map", *NAMES.values()):  # the record comes back when the shapes have shrunk
        if hasattr(config, name):
            delattr(config, name)
    return config, removed, layout


def _pruned(
    dense: type[PreTrainedModel], config: Any, removed: Removed, layout: dict[str, Any], place: str | Path
) -> Any:
    """The dense class, but built with the shapes of the pruned model: it lives for one `from_pretrained` only."""
    if removed and not layout:  # a checkpoint of an earlier version
        learn_layout(dense, config, removed)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        dense.__init__(self, config, *args, **kwargs)
        if layout:
            apply_layout(self, layout, removed, place)
        elif removed:
            shrink(self, removed)

    members = {"__init__": init, "__module__": dense.__module__, "headprune_dense": dense}
    return type(dense.__name__, (dense,), members)


def _folder(path: str | Path, options: Mapping[str, Any]) -> Path:
    folder = local_folder(path)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    name = str(path)
    wanted = {k: options[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in options}
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"], **wanted))
    except Exception as error:
        raise CheckpointError(
            f"{name} is neither a directory here nor a model that could be fetched from the hub "
            f"({type(error).__name__}); check the name and the connection."
        ) from error


def _refuse_unreadable(folder: Path) -> None:
    refuse_bad_config(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        if pickles:
            raise CheckpointError(
                f"{folder} holds its weights as a pickle ({pickles[0].name}), which can run code when it is loaded; "
                "convert it to safetensors first."
            )
        raise CheckpointError(f"{folder} has no *.safetensors file; copy the checkpoint again.")


def _removed(config: Any, kind: Kind, place: str | Path) -> dict[int, list[int]]:
    record = getattr(config, NAMES[kind], None) or {}
    try:
        if kind == "heads" and any(isinstance(ids, str) for ids in record.values()):
            raise ValueError  # ranges are for neurons, of which there are thousands
        removed = {int(site): from_ranges(ids) for site, ids in record.items()}
        for ids in removed.values():
            if len(set(ids)) < len(ids) or any(not isinstance(member, int) for member in ids):
                raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f"{NAMES[kind]} in the config of {place} must map site numbers to {FORMS[kind]}, each once, not "
            f"{record!r:.200}."
        ) from None
    return {site: sorted(ids) for site, ids in sorted(removed.items()) if ids}


def _model_class(config: Any, place: str | Path) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        found = OWN.get(name) or getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise CheckpointError(
        f"The config of {place} names no model class that transformers {transformers.__version__} knows "
        f"({config.architectures}); pass it as model_class."
    )


def _dense_settings(settings: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """Undo what an earlier save changed, so that ids and shapes start from the dense model again. What is `known`
    needs nobody's code, whatever the config that it came with names."""
    record = settings.get("headprune") or {}
    numbers = record.get("dense", {})
    dropped = known or "dense" in record  # a checkpoint of somebody's own code keeps its auto_map
    kept = {name: value for name, value in settings.items() if name not in ("headprune", "auto_map" if dropped else "")}
    return with_numbers(kept, numbers)
