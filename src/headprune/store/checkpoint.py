"""Saving and loading pruned models: safetensors, the model's own config, and a fingerprint of both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PreTrainedModel

from headprune.errors import CheckpointError, HeadpruneError
from headprune.store import fingerprint, portability
from headprune.store.files import replaced_directory
from headprune.store.places import local_folder, model_folder, refuse_bad_config, refuse_missing_structure
from headprune.store.processors import carry_processor, outdated
from headprune.surgery.shrink import learn_layout, shrink
from headprune.units import AttentionSite, survey

# The numbers by which a dense config of a family with a `head_dim` can describe a uniformly pruned model.
NATIVE_COUNTS = ("num_attention_heads", "num_key_value_heads")


def save(
    model: PreTrainedModel,
    path: str | Path,
    *,
    processor: Any = None,
    portable: bool = False,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write the model, pruned or not, so that `headprune.load(path)` gives it back.

    Tokenizer or image processor files come along from the folder the model was loaded from, or from `processor`; after
    `shrink_vocabulary` it is the smaller tokenizer that comes along.
    With `portable=True` the checkpoint also carries the code that plain transformers needs to load it
    (`trust_remote_code=True`). The directory appears, or is replaced, in one step.
    """
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"headprune.save writes transformers models; {type(model).__name__} is none: use torch.save(model, path)."
        )
    sites = survey(model).sites
    target = Path(path)
    try:
        with replaced_directory(target, outdated(model)) as fresh:
            _write(model, sites, fresh, processor, portable, max_shard_size)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"Cannot save to {target}: {reason}; make room, or choose another place.") from error
    return target


def _write(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    folder: Path,
    processor: Any,
    portable: bool,
    max_shard_size: str | int,
) -> None:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    carry_processor(model, processor, folder)
    settings = json.loads((folder / "config.json").read_text())
    _restore_dense_counts(settings)
    native = _native_counts(model, sites, settings)
    if native:
        settings["headprune"] = {"dense": {name: settings[name] for name in native if name != "head_dim"}}
        settings.update(native)
    if portable:
        portability.write(model, sites, settings, folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    fingerprint.write(folder)


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
    """Load a checkpoint that `save` wrote, from a folder or from the hub; an unpruned one loads as well.

    `options` go to transformers' `from_pretrained` (dtype, device_map, attn_implementation, revision, ...). Pickles
    are refused, and code that comes with a checkpoint is not run.
    """
    folder = _folder(path, options)
    _refuse_unreadable(folder)
    fingerprint.verify(folder)
    config, removed = _read_config(folder)
    dense = model_class or _model_class(config, folder)
    if removed:
        learn_layout(dense, config)
    options.pop("trust_remote_code", None)
    try:
        model, found = _pruned(dense, removed).from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below with the name of the tensor
            **options,
        )
    except HeadpruneError as error:
        raise CheckpointError(f"The record of removed heads in {folder} does not fit its model: {error}") from None
    except (RuntimeError, ValueError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The weights in {folder} do not fit its config.json: {reason[:400]}") from None
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
        config, removed = _read_config(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} is neither a folder with a config.json nor a model that could be fetched from the hub "
            f"({type(error).__name__}); check the name and the connection."
        ) from None
    dense = _model_class(config, path) if config.architectures else AutoModel._model_mapping[type(config)]
    try:
        if removed:
            learn_layout(dense, config)
        with torch.device("meta"):
            return _pruned(dense, removed)(config)
    except HeadpruneError as error:
        raise CheckpointError(f"The record of removed heads in {path} does not fit its model: {error}") from None


def _read_config(path: str | Path) -> tuple[Any, dict[int, list[int]]]:
    """The config of the dense model, and the heads that were removed from it."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        settings = config.to_dict()
        _restore_dense_counts(settings)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The config of {path} cannot be read: {reason[:300]}") from None
    for name in NATIVE_COUNTS:
        if settings.get(name) is not None:
            setattr(config, name, settings[name])
    removed = _removed(config, path)
    for name in ("headprune", "auto_map", "pruned_heads"):  # the record comes back when the shapes have shrunk
        if hasattr(config, name):
            delattr(config, name)
    return config, removed


def _pruned(dense: type[PreTrainedModel], removed: Mapping[int, list[int]]) -> Any:
    """The dense class, but built with the shapes of the pruned model: it lives for one `from_pretrained` only."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        dense.__init__(self, config, *args, **kwargs)
        if removed:
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


def _removed(config: Any, place: str | Path) -> dict[int, list[int]]:
    record = getattr(config, "pruned_heads", None) or {}
    try:
        removed = {int(site): list(ids) for site, ids in record.items()}
        if any(not isinstance(head, int) or ids.count(head) > 1 for ids in removed.values() for head in ids):
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f"pruned_heads in the config of {place} must map site numbers to lists of head numbers, each once, not "
            f"{record!r}."
        ) from None
    return {site: sorted(ids) for site, ids in sorted(removed.items()) if ids}


def _model_class(config: Any, place: str | Path) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise CheckpointError(
        f"The config of {place} names no model class that transformers {transformers.__version__} knows "
        f"({config.architectures}); pass it as model_class."
    )


def _restore_dense_counts(settings: dict[str, Any]) -> None:
    """Undo what a native config changed, so that head ids and shapes start from the dense model again."""
    settings.update(settings.pop("headprune", {}).get("dense", {}))


def _native_counts(
    model: PreTrainedModel, sites: Sequence[AttentionSite], settings: Mapping[str, Any]
) -> dict[str, int]:
    """Config numbers with which the plain class has exactly the weights of this pruned model; empty if none do.

    The proof is in the shapes: the plain class is built from them, without memory, and compared.
    """
    if len({(site.heads, site.kv_heads, site.head_dim) for site in sites}) != 1 or not settings.get("pruned_heads"):
        return {}
    site = sites[0]
    if not site.kept or "num_attention_heads" not in settings:
        return {}
    counts = {"num_attention_heads": site.heads, "head_dim": site.head_dim}
    if settings.get("num_key_value_heads") is not None:
        counts["num_key_value_heads"] = site.kv_heads
    try:
        with torch.device("meta"):
            plain = type(model)(type(model.config).from_dict({**settings, **counts}))
    except (ValueError, StrictDataclassError):  # the family derives its head width from the head count
        return {}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return counts if {name: tensor.shape for name, tensor in plain.state_dict().items()} == shapes else {}
