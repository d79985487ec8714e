"""Checkpoints that plain transformers can load with `trust_remote_code=True`, without headprune installed.

Where transformers has code for the type of a model, it takes that code unless the user asks for the checkpoint's own,
and would build the dense model. So config.json of such a checkpoint names a type that it has no code for: then
transformers says in a sentence of its own what to do.
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

from headprune.hooks import torch_attention
from headprune.models import OWN
from headprune.store import shipped
from headprune.store.configs import TYPE
from headprune.units import placeholders, quirks
from headprune.units.cutting.record import entries, number_of, with_numbers
from headprune.units.dense import dense_class, dense_config_class, quiet

MODULE = "modeling_headprune"
SENTENCE = (
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


def can_ship(model: PreTrainedModel) -> bool:
    """Whether the class of a model, and that of its config, are known by name where headprune is not installed."""
    kinds = (dense_class(model), dense_config_class(model))
    return type(model).__name__ in OWN or all(getattr(transformers, kind.__name__, None) is kind for kind in kinds)


def ship_own(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> None:
    """The code of a model that transformers does not have, for a checkpoint that needs nothing else."""
    settings["auto_map"] = _ship(dense_class(model), folder)


def write(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> None:
    """Write the code file, point `auto_map` in the config's `settings`, which have the layout of the model, to it, and
    make plain classes refuse them."""
    dense, config = dense_class(model), dense_config_class(model)
    instead = {"model_type": TYPE + settings["model_type"], **_refused(model, settings)}
    dense_names = {name: number_of(settings, name) for name in instead}
    settings["headprune"] = {**settings["headprune"], "dense": dense_names, "instead": instead}
    settings.update(with_numbers(settings, instead))
    served = dict(_served(model))
    own = dense.__name__ in OWN
    if own:  # transformers does not have it, so the checkpoint brings it
        served = {auto: kind for auto, kind in served.items() if kind.__name__ in OWN}
        _ship(dense, folder)
    settings["auto_map"] = {
        "AutoConfig": f"{MODULE}.{config.__name__}",
        **{auto: f"{MODULE}.{kind.__name__}" for auto, kind in served.items()},
    }
    kinds = {kind.__name__: kind for kind in (dense, *served.values())}
    (folder / f"{MODULE}.py").write_text(_source() + _classes(config, [kinds[name] for name in sorted(kinds)], own))


def _classes(config: Any, kinds: Sequence[Any], own: bool) -> str:
    """The part of the code file that names classes: each is the dense one, and loads with the pruned shapes."""
    imports = ["import transformers  # noqa: E402"]
    if own:
        imports = [
            f"from .{Path(inspect.getfile(kind)).stem} import {kind.__name__} as _{kind.__name__}  # noqa: E402"
            for kind in (config, *kinds)
        ]
    before = "_" if own else "transformers."
    made = [HEADER.format(imports="\n".join(imports), before=before, config=config.__name__)]
    made += [CLASS.format(name=kind.__name__, before=before, config=config.__name__) for kind in kinds]
    return "".join(made)


def _served(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Auto class -> the class it has for the config of this model; the model's own where it has several."""
    dense, config = dense_class(model), dense_config_class(model)
    for auto, made in vars(modeling_auto).items():
        mapping = getattr(made, "_model_mapping", None) if auto.startswith("AutoModel") else None
        if mapping is None or config not in mapping:
            continue
        found = mapping[config]
        kinds = found if isinstance(found, tuple) else (found,)
        kind = dense if dense in kinds else kinds[0]
        if kind is not None and kind.config_class is config:  # not a class for a part of the config
            yield auto, kind


def _refused(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, str]:
    """The name of an activation, with a sentence in its place: a plain class that is asked for by name then refuses to
    be built, and says that sentence. Its config can still be read. Empty where no activation is looked up by name."""
    for name, value in entries(settings):
        if not isinstance(value, str) or value.rpartition("-")[2] not in ACT2FN:
            continue
        try:
            with torch.device("meta"), quiet():
                dense_class(model)(dense_config_class(model).from_dict(with_numbers(settings, {name: SENTENCE})))
        except Exception as error:  # whatever a family raises, if it says the sentence
            if SENTENCE in str(error):
                return {name: SENTENCE}
    return {}


def _ship(kind: Any, folder: Path) -> dict[str, str]:
    """Copy the files of a model of our own, which need transformers alone; Auto class -> class there."""
    homes = []
    for part in (kind.config_class, kind):
        file = Path(inspect.getfile(part))
        shutil.copyfile(file, folder / file.name)
        homes.append(file.stem)
    config, code = homes
    found = {"AutoConfig": f"{config}.{kind.config_class.__name__}"}
    for name, own in OWN.items():
        auto = "AutoModelForCausalLM" if name.endswith("ForCausalLM") else "AutoModel"
        if own.config_class is kind.config_class:
            found[auto] = f"{code}.{name}"
    return found


def _source() -> str:
    """The files that need torch and transformers alone, as one."""
    texts = [Path(module.__file__ or "").read_text() for module in (torch_attention, placeholders, quirks, shipped)]
    first, *others = (re.sub(r"^from headprune\.\S+ import .*\n", "", text, flags=re.MULTILINE) for text in texts)
    return "\n\n".join([first, *(text.replace("from __future__ import annotations\n", "") for text in others)])
