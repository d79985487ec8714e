"""Saves and loads pruned models: safetensors, the config of the model, and a fingerprint of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel

from headprune.checkpoint import fingerprint, plain_check, portable_checkpoint
from headprune.checkpoint.atomic_files import replace_directory
from headprune.checkpoint.config_files import read_config, read_settings, write_settings
from headprune.checkpoint.layout import apply_layout, layout_of, read_layout, refuse_unloadable
from headprune.checkpoint.load_options import checked_options, not_loaded
from headprune.checkpoint.paths import local_folder, model_folder, refuse_bad_config, refuse_missing_structure
from headprune.checkpoint.plain_config import PER_LAYER, dense_numbers, plain_numbers
from headprune.checkpoint.processors import outdated, save_processor
from headprune.checkpoint.quantized import expect_quantized, fill_quantized, has_quantized, save_quantized
from headprune.checkpoint.removable_files import removable_files
from headprune.errors import CheckpointError, HeadpruneError
from headprune.hooks.gates import InstalledGates
from headprune.hooks.offload import is_offloaded, state_of
from headprune.json_forms import check_form
from headprune.models import OWN
from headprune.surgery.shapes_of_earlier_checkpoints import learn_layout, shrink
from headprune.units import Kind, Site, all_sites, survey
from headprune.units.dense_model import dense_class, dense_config_class
from headprune.units.linear import drop_gguf_quantizer, is_quantized
from headprune.units.slicing.record import (
    NAMES,
    dense_numbers_of,
    from_ranges,
    put_numbers,
    removed_members,
    with_numbers,
)

FORMS: dict[Kind, str] = {"heads": "lists of head numbers", "neurons": 'ranges of neuron numbers such as "0-3,7"'}


def save(
    model: PreTrainedModel,
    path: str | Path,
    *,
    processor: Any = None,
    portable: bool = True,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
) -> Path:
    """Write the model, pruned or not, for `headprune.load(path)`.

    Tokenizer or image processor files are copied from the folder that the model was loaded from, or written from
    `processor`; after `shrink_vocabulary` the shrunk tokenizer is written. A pruned checkpoint that plain transformers
    cannot load as it is also includes code for that (`trust_remote_code=True`), unless `portable=False`. The directory
    is created or replaced atomically: files of an earlier save are removed, others kept. One with a model that was
    written or changed by something else is refused, unless `overwrite=True`.
    """
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"headprune.save writes transformers models, not {type(model).__name__}; use torch.save(model, path)."
        )
    if any(isinstance(module, InstalledGates) for module in model.modules()):
        raise CheckpointError("This model has learned gates; close them with gates.remove() before you save it.")
    drop_gguf_quantizer(model)
    quantized = any(is_quantized(parameter) for parameter in model.parameters())

    def weights(folder: Path) -> None:
        if quantized:
            save_quantized(model, folder, max_shard_size)
        else:
            # transformers loads what its own device_map has offloaded, and nothing else.
            unknown = is_offloaded(model) and not getattr(model, "hf_device_map", None)
            state = {"state_dict": state_of(model)} if unknown else {}
            model.save_pretrained(folder, max_shard_size=max_shard_size, **state)

    return _save(model, Path(path), weights, processor, portable=portable, quantized=quantized, overwrite=overwrite)


def save_weights_of(model: PreTrainedModel, path: str | Path, weights: Callable[[Path], None]) -> Path:
    """The same for the model of a run whose weights are on disk, and written into a folder by `weights`. Whether plain
    classes load the checkpoint is decided by shapes alone, and only where one number describes all layers."""

    def write_all(folder: Path) -> None:
        weights(folder)
        model.config.architectures = [dense_class(model).__name__]
        model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)

    return _save(model, Path(path), write_all, None, trust_shapes=True, overwrite=True)


def _save(
    model: PreTrainedModel,
    target: Path,
    weights: Callable[[Path], None],
    processor: Any,
    *,
    portable: bool = True,
    quantized: bool = False,
    trust_shapes: bool = False,
    overwrite: bool = False,
) -> Path:
    outdated_files = (*outdated(model), f"{portable_checkpoint.MODULE}.py")
    sites = all_sites(model) if removed_members(model, "neurons") else survey(model).sites
    layout = layout_of(model, sites)
    refuse_unloadable(model, layout)
    try:
        with replace_directory(target, partial(removable_files, outdated=outdated_files, overwrite=overwrite)) as new:
            weights(new)
            _write(
                model, sites, layout, new, processor, portable=portable, quantized=quantized, trust_shapes=trust_shapes
            )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"Cannot save to {target}: {reason}; make room, or choose another directory.") from error
    return target


def _write(
    model: PreTrainedModel,
    sites: Sequence[Site],
    layout: Mapping[str, Any],
    folder: Path,
    processor: Any,
    *,
    portable: bool,
    quantized: bool,
    trust_shapes: bool,
) -> None:
    """Write everything but the weights, which are in the folder already."""
    save_processor(model, processor, folder)
    settings = _dense_settings(read_settings(folder), portable_checkpoint.is_loadable_elsewhere(model))
    (folder / f"{portable_checkpoint.MODULE}.py").unlink(
        missing_ok=True
    )  # of the checkpoint that the model was loaded from
    if layout:
        settings["headprune"] = layout
    # Neither plain classes nor portable code can load quantised weights.
    plain = (
        None
        if quantized or not portable_checkpoint.is_loadable_elsewhere(model)
        else _plain_settings(model, sites, settings, folder, trust_shapes)
    )
    if plain is not None:
        settings = plain
    elif portable and not quantized and portable_checkpoint.is_loadable_elsewhere(model):
        if layout:
            portable_checkpoint.write(model, settings, folder)
        elif dense_class(model).__name__ in OWN:
            portable_checkpoint.write_model_code(model, settings, folder)
    write_settings(folder, settings)
    fingerprint.write(folder)


def _plain_settings(
    model: PreTrainedModel, sites: Sequence[Site], settings: Mapping[str, Any], folder: Path, trust_shapes: bool
) -> dict[str, Any] | None:
    """Settings with which plain transformers loads the checkpoint, written into the folder and checked there in a
    process without headprune; None where there are none. For models that are too large to load again, shapes decide, if
    one number describes all layers."""
    numbers = plain_numbers(model, sites, settings)
    trust_shapes = trust_shapes or plain_check.too_large(model)
    if not numbers or (PER_LAYER in numbers and trust_shapes):
        return None
    ours = dense_class(model).__name__ in OWN
    dense = dense_numbers(numbers, dense_config_class(model).from_dict(dict(settings)).to_dict())
    changed = with_numbers(settings, numbers)
    changed["headprune"] = {**settings["headprune"], "dense": dense, "native": True}
    if ours:
        portable_checkpoint.write_model_code(model, changed, folder)
    write_settings(folder, changed)
    return changed if trust_shapes or plain_check.loads_plainly(model, folder, ours=ours) else None


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
    """Load a checkpoint that `save` wrote, from a folder or from the hub; an unpruned one loads as well.

    `options` go to transformers' `from_pretrained` (dtype, device_map, attn_implementation, revision, ...), but the
    config is that of the checkpoint. Pickles are refused, and code that comes with a checkpoint is not run.
    """
    options = checked_options(options)
    folder = _folder(path, options)
    _refuse_unreadable(folder)
    fingerprint.verify(folder)
    config, removed, layout = _read_config(folder, model_class)
    dense = model_class or _model_class(config, folder)
    options.pop("trust_remote_code", None)
    kind = _pruned_class(dense, config, removed, layout, folder)
    if has_quantized(folder):
        expect_quantized(kind, folder, options)
    try:
        model, loading_info = kind.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with the name of the tensor
            **options,
        )
    except CheckpointError:
        raise
    except HeadpruneError as error:
        raise _record_error(removed, folder, error) from None
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
        raise CheckpointError(
            f"{unknown[1]!r} is no option of loading, as the config is that of the checkpoint; leave it out."
        ) from None
    except (RuntimeError, ValueError, SafetensorError, OSError) as error:
        raise not_loaded(folder, options, error) from None
    except Exception as error:  # whatever a model class raises on settings that do not fit each other
        raise CheckpointError(
            f"{folder} cannot be loaded ({_reason(error)}); check its config.json, and the options of load."
        ) from error
    if has_quantized(folder):
        fill_quantized(model, folder)
    for what in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if loading_info.get(what) and not (model_class and what != "mismatched_keys"):
            first = sorted(loading_info[what], key=str)[0]
            name = first if isinstance(first, str) else first[0]
            raise CheckpointError(
                f"The weights in {folder} do not fit its config.json: {name} is {what.split('_')[0]}; save the model "
                "again with headprune.save, or pass the class it was saved from as model_class."
            )
    model.__class__ = dense
    return model


def load_structure(path: str | Path) -> PreTrainedModel:
    """The model of a folder, a config.json or a hub name on the meta device, without weights."""
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
        kind = _pruned_class(dense, config, removed, layout, path)
        with torch.device("meta"):
            pruned: PreTrainedModel = kind(config)
            return pruned
    except CheckpointError:
        raise
    except HeadpruneError as error:
        raise _record_error(removed, path, error) from None
    except Exception as error:  # whatever a model class raises on settings that do not fit each other
        raise CheckpointError(
            f"The config of {path} does not describe a {dense.__name__} ({_reason(error)})."
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


Removed = dict[Kind, dict[int, list[int]]]  # by kind, and by the number of a site among those of its kind


def _record_error(removed: Removed, folder: str | Path, error: HeadpruneError) -> CheckpointError:
    what = " and ".join(removed) or "heads"
    return CheckpointError(f"The record of removed {what} in {folder} does not fit its model: {error}")


def _read_config(
    path: str | Path, model_class: type[PreTrainedModel] | None = None
) -> tuple[Any, Removed, dict[str, Any]]:
    """The config of the dense model, the removed units, and the layout of the pruned model."""
    try:
        config = read_config(path, None if model_class is None else model_class.config_class)
        put_numbers(config, dense_numbers_of(config))
    except OSError:
        raise
    except Exception as error:  # whatever a config class raises on values that it does not expect
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The config of {path} cannot be read: {reason[:300]}") from None
    removed: Removed = {kind: ids for kind in NAMES if (ids := _removed(config, kind, path))}
    layout = read_layout(config, removed, path)
    for name in ("headprune", "auto_map", *NAMES.values()):  # written again after the shapes are set
        if hasattr(config, name):
            delattr(config, name)
    return config, removed, layout


def _pruned_class(
    dense: type[PreTrainedModel], config: Any, removed: Removed, layout: dict[str, Any], folder: str | Path
) -> Any:
    """A subclass of the dense class, built with the shapes of the pruned model, for one `from_pretrained`."""
    if removed and not layout:  # a checkpoint of an earlier version
        learn_layout(dense, config, removed)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        dense.__init__(self, config, *args, **kwargs)
        if layout:
            apply_layout(self, layout, removed, folder)
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
    hub_options = {k: options[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in options}
    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"], **hub_options)
        )
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
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            content = json.loads(index.read_bytes())
            check_form(content, {"weight_map": {str: str}, "metadata?": dict})
            if not all(fingerprint.is_plain_name(name) for name in content["weight_map"].values()):
                raise ValueError("a name leads out of the folder")
    except (ValueError, RecursionError):
        raise CheckpointError(f"{index} is damaged; copy the checkpoint again.") from None


def _removed(config: Any, kind: Kind, folder: str | Path) -> dict[int, list[int]]:
    record = getattr(config, NAMES[kind], None) or {}
    try:
        if kind == "heads" and any(isinstance(ids, str) for ids in record.values()):
            raise ValueError  # ranges are for neurons
        removed = {int(site): from_ranges(ids) for site, ids in record.items()}
        for ids in removed.values():
            if len(set(ids)) < len(ids) or any(not isinstance(member, int) for member in ids):
                raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f"{NAMES[kind]} in the config of {folder} must map site numbers to {FORMS[kind]}, each once, not "
            f"{record!r:.200}."
        ) from None
    return {site: sorted(ids) for site, ids in sorted(removed.items()) if ids}


def _model_class(config: Any, folder: str | Path) -> type[PreTrainedModel]:
    names = config.architectures if isinstance(config.architectures, (list, tuple)) else ()
    for name in filter(lambda name: isinstance(name, str), names):
        model_class = OWN.get(name) or getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    raise CheckpointError(
        f"The config of {folder} names no model class of transformers {transformers.__version__} "
        f"({config.architectures}); pass it as model_class."
    )


def _dense_settings(settings: Mapping[str, Any], is_ours: bool) -> dict[str, Any]:
    """Undo the changes of an earlier save, so that the settings are those of the dense model. `is_ours`: the model
    needs no code of the checkpoint that it was loaded from, so its auto_map is dropped."""
    record = settings.get("headprune") or {}
    numbers = record.get("dense", {})
    dropped = is_ours or "dense" in record  # a checkpoint with custom code keeps its auto_map
    kept = {name: value for name, value in settings.items() if name not in ("headprune", "auto_map" if dropped else "")}
    return with_numbers(kept, numbers)
