"""How to use a pruned model, as its card says it: plain transformers first, then headprune."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto
from transformers.pipelines import get_supported_tasks

from headprune.store.processors import has_tokenizer
from headprune.task import TASKS

PLACE = "path/to/this/folder"  # until it is known where the model will be
TAGS = {task.name: task.pipeline_tag for task in TASKS}


def pipeline_tag(record: Mapping[str, Any], folder: Path | None) -> str:
    """What hubs and `pipeline` call the task of a run's model; empty where they have no word for it."""
    tag = TAGS.get(record.get("task", ""), "")
    images = folder is not None and not has_tokenizer(folder) and (folder / "preprocessor_config.json").is_file()
    return f"image-{tag}" if tag == "feature-extraction" and images else tag


def usage(folder: Path | None, tag: str) -> list[str]:
    """The lines of the section; what a folder needs, its config says."""
    settings = json.loads((folder / "config.json").read_text()) if folder and (folder / "config.json").is_file() else {}
    own, auto = "auto_map" in settings, _auto_class(settings)
    if folder is None or not auto:
        return _headprune("")
    trust = ", trust_remote_code=True" if own else ""
    lines = [_plain_words(settings, own), ""]
    if tag in get_supported_tasks() and (has_tokenizer(folder) or (folder / "preprocessor_config.json").is_file()):
        lines += _code("from transformers import pipeline", f'pipe = pipeline("{tag}", model="{PLACE}"{trust})')
    lines += _code(f"from transformers import {auto}", f'model = {auto}.from_pretrained("{PLACE}"{trust})')
    return [*lines, *_headprune("With headprune, whose code alone is run:")]


def _plain_words(settings: Mapping[str, Any], own: bool) -> str:
    if own:
        return (
            "With transformers alone. Its layers differ in size, so the folder brings the code that builds them, "
            "`modeling_headprune.py`; transformers runs it if you say so:"
        )
    return "With transformers alone, as any other model:"


def _headprune(words: str) -> list[str]:
    code = _code("import headprune", f'model = headprune.load("{PLACE}")')[:-1]
    return [words, "", *code] if words else code


def _code(first: str, second: str) -> list[str]:
    return ["```python", first, "", second, "```", ""]


def _auto_class(settings: Mapping[str, Any]) -> str:
    """The Auto class that gives the class a checkpoint was saved from; empty where there is none, or where no plain
    class would take it."""
    kinds = settings.get("architectures") or [""]
    if "auto_map" in settings:
        found = [auto for auto, kind in settings["auto_map"].items() if kind.endswith(f".{kinds[0]}")]
    else:
        pruned = any(settings.get(name) for name in ("pruned_heads", "pruned_neurons"))
        native = (settings.get("headprune") or {}).get("native")
        found = list(_serving(kinds[0])) if native or not pruned else []
    # The class for pretraining may be that of a task, which says more.
    return min(found, key=lambda auto: auto == "AutoModelForPreTraining", default="")


def _serving(kind: str) -> Iterator[str]:
    for auto, made in vars(modeling_auto).items():
        mapping = getattr(made, "_model_mapping", None) if auto.startswith("AutoModel") else None
        names = getattr(mapping, "_model_mapping", {})
        if any(kind in (found if isinstance(found, tuple) else (found,)) for found in names.values()):
            yield auto
