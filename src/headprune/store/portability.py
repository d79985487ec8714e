"""Checkpoints that plain transformers can load with `trust_remote_code=True`, without headprune installed."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from headprune.models import OWN
from headprune.units import Site, called, quirks, replaced
from headprune.units.cutting.plan import plan

MODULE = "modeling_headprune"
TEMPLATE = """

# --- made by headprune: the class that this checkpoint was saved from, built with the shapes of its weights ----------

from {home} import {name} as _Dense  # noqa: E402


class {name}(_Dense):
    headprune_dense = _Dense

    @classmethod
    def is_custom_code(cls):
        # Its weights are named as those of the plain class, so transformers' renamings of that class apply.
        return False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        restructure(self, config.headprune["plan"])
"""


def write(model: PreTrainedModel, sites: Sequence[Site], settings: dict[str, Any], folder: Path) -> None:
    """Write the code file, and point `auto_map` in the config's `settings` to it."""
    name = type(model).__name__
    kept = {site.index: site.kept for site in sites if site.size < site.original}
    settings["headprune"] = {**settings.get("headprune", {}), "plan": plan(model, sites, kept)}
    autos = [auto for auto in dir(transformers) if auto.startswith("AutoModel") and _serves(auto, model)]
    settings["auto_map"] = dict.fromkeys(autos, f"{MODULE}.{name}")
    home = "transformers"
    if name in OWN:  # transformers does not have it, so the checkpoint brings it
        config, home = _ship(OWN[name], folder)
        settings["auto_map"]["AutoConfig"] = config
    (folder / f"{MODULE}.py").write_text(_source() + TEMPLATE.format(name=name, home=home))


def _ship(kind: Any, folder: Path) -> tuple[str, str]:
    """Copy the files of a model of our own, which need transformers alone; the names of its config and module there."""
    homes = []
    for part in (kind.config_class, kind):
        file = Path(inspect.getfile(part))
        shutil.copyfile(file, folder / file.name)
        homes.append(file.stem)
    return f"{homes[0]}.{kind.config_class.__name__}", f".{homes[1]}"


def _source() -> str:
    """The files that need torch alone, as one."""
    texts = [Path(module.__file__ or "").read_text() for module in (called, replaced, quirks)]
    first, *others = (re.sub(r"^from headprune\.\S+ import .*\n", "", text, flags=re.MULTILINE) for text in texts)
    return "\n\n".join([first, *(text.replace("from __future__ import annotations\n", "") for text in others)])


def _serves(auto: str, model: PreTrainedModel) -> bool:
    mapping = getattr(getattr(transformers, auto), "_model_mapping", {})
    try:
        found = mapping[type(model.config)]
    except KeyError:
        return False
    return any(kind.__name__ == type(model).__name__ for kind in (found if isinstance(found, tuple) else (found,)))
