"""Writes checkpoints that plain transformers can load with `trust_remote_code=True`, without headprune installed.

For a model_type that it knows, transformers would use its own code and build the dense model. So config.json of such a
checkpoint has a model_type that transformers does not know; then its error message says to use trust_remote_code.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto import modeling_auto

from headprune.checkpoint import portable_code
from headprune.checkpoint.config_files import TYPE_PREFIX
from headprune.hooks import torch_attention
from headprune.models import OWN
from headprune.units import placeholders, quirks
from headprune.units.dense_model import dense_class, dense_config_class, quiet
from headprune.units.slicing.record import entries, number_of, with_numbers

MODULE = "modeling_headprune"
REFUSAL = (
    "This model was pruned by headprune: load it by an Auto class with trust_remote_code=True, or with headprune.load"
)
HEADER = """

# --- made by headprune: the classes of this checkpoint's family, built with the shapes of its weights -----------------

{imports}


class {config}(PrunedConfig, {before}{config}):
    headprune_dense = {before}{config}
"""
CLASS = """

class {name}(PrunedModel, {before}{name}):
    config_class = {config}
    headprune_dense = {before}{name}
"""


def is_loadable_elsewhere(model: PreTrainedModel) -> bool:
    """Whether the classes of a model and of its config can be imported where headprune is not installed."""
    kinds = (dense_class(model), dense_config_class(model))
    return type(model).__name__ in OWN or all(getattr(transformers, kind.__name__, None) is kind for kind in kinds)


def write_model_code(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> None:
    """Write the code of a model class of headprune into an unpruned checkpoint, and refer to it in `auto_map`."""
    settings["auto_map"] = _copy_model_code(dense_class(model), folder)


def write(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> None:
    """Write the code file, refer to it in `auto_map` of the config's `settings`, which have the layout of the model,
    and make plain classes refuse these settings."""
    dense, config = dense_class(model), dense_config_class(model)
    replacements = {"model_type": TYPE_PREFIX + settings["model_type"], **_refusing_activation(model, settings)}
    dense_names = {name: number_of(settings, name) for name in replacements}
    settings["headprune"] = {**settings["headprune"], "dense": dense_names, "instead": replacements}
    settings.update(with_numbers(settings, replacements))
    auto_classes = dict(_auto_classes(model))
    in_headprune = dense.__name__ in OWN
    if in_headprune:  # not in transformers, so the checkpoint includes it
        auto_classes = {auto: kind for auto, kind in auto_classes.items() if kind.__name__ in OWN}
        _copy_model_code(dense, folder)
    settings["auto_map"] = {
        "AutoConfig": f"{MODULE}.{config.__name__}",
        **{auto: f"{MODULE}.{kind.__name__}" for auto, kind in auto_classes.items()},
    }
    kinds = {kind.__name__: kind for kind in (dense, *auto_classes.values())}
    (folder / f"{MODULE}.py").write_text(
        _shared_code() + _classes(config, [kinds[name] for name in sorted(kinds)], in_headprune)
    )


def _classes(config: Any, kinds: Sequence[Any], in_headprune: bool) -> str:
    """The part of the code file with the classes: each is the dense one, built with the pruned shapes."""
    imports = ["import transformers  # noqa: E402"]
    if in_headprune:
        imports = [
            f"from .{Path(inspect.getfile(kind)).stem} import {kind.__name__} as _{kind.__name__}  # noqa: E402"
            for kind in (config, *kinds)
        ]
    before = "_" if in_headprune else "transformers."
    text = [HEADER.format(imports="\n".join(imports), before=before, config=config.__name__)]
    text += [CLASS.format(name=kind.__name__, before=before, config=config.__name__) for kind in kinds]
    return "".join(text)


def _auto_classes(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Auto class -> its class for the config of this model; the class of the model where there are several."""
    dense, config = dense_class(model), dense_config_class(model)
    for auto, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None) if auto.startswith("AutoModel") else None
        if mapping is None or config not in mapping:
            continue
        mapped = mapping[config]
        kinds = mapped if isinstance(mapped, tuple) else (mapped,)
        kind = dense if dense in kinds else kinds[0]
        if kind is not None and kind.config_class is config:  # not a class for a part of the config
            yield auto, kind


def _refusing_activation(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, str]:
    """The name of an activation, replaced by a message: a plain class that is used directly then cannot be built, and
    its error has that message. The config can still be read. Empty where no activation is looked up by name."""
    for name, value in entries(settings):
        if not isinstance(value, str) or value.rpartition("-")[2] not in ACT2FN:
            continue
        try:
            with torch.device("meta"), quiet():
                dense_class(model)(dense_config_class(model).from_dict(with_numbers(settings, {name: REFUSAL})))
        except Exception as error:  # whatever a family raises, if it contains the message
            if REFUSAL in str(error):
                return {name: REFUSAL}
    return {}


def _copy_model_code(kind: Any, folder: Path) -> dict[str, str]:
    """Copy the files of a model class of headprune, which need only transformers; returns the `auto_map`."""
    modules = []
    for part in (kind.config_class, kind):
        file = Path(inspect.getfile(part))
        shutil.copyfile(file, folder / file.name)
        modules.append(file.stem)
    config, code = modules
    entries = {"AutoConfig": f"{config}.{kind.config_class.__name__}"}
    for name, in_headprune in OWN.items():
        auto = "AutoModelForCausalLM" if name.endswith("ForCausalLM") else "AutoModel"
        if in_headprune.config_class is kind.config_class:
            entries[auto] = f"{code}.{name}"
    return entries


def _shared_code() -> str:
    """The modules that need only torch and transformers, as one file."""
    texts = [
        Path(module.__file__ or "").read_text() for module in (torch_attention, placeholders, quirks, portable_code)
    ]
    first, *others = (re.sub(r"^from headprune\.\S+ import .*\n", "", text, flags=re.MULTILINE) for text in texts)
    return "\n\n".join([first, *(text.replace("from __future__ import annotations\n", "") for text in others)])
