"""How to use a pruned model, as its card says it: plain transformers first, then headprune."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.pipelines import get_supported_tasks

from headprune.report.use import model_snippet, pipeline_snippet, plain_loads, transformers_snippet, way_of
from headprune.store.processors import has_tokenizer
from headprune.tasks import TASKS

PLACE = "path/to/this/folder"  # until it is known where the model will be
TAGS = {task.name: task.pipeline_tag for task in TASKS}
HEADPRUNE = f'import headprune\n\nmodel = headprune.load("{PLACE}")\n'
PLAIN = "With transformers alone, as any other model:"
OWN_CODE = (
    "With transformers alone. Its layers differ in size, so the folder brings the code that builds them, "
    "`modeling_headprune.py`; transformers runs it if you say so:"
)


def pipeline_tag(record: Mapping[str, Any], folder: Path | None) -> str:
    """What hubs and `pipeline` call the task of a run's model; empty where they have no word for it."""
    tag = TAGS.get(record.get("task", ""), "")
    images = folder is not None and not has_tokenizer(folder) and _has_processor(folder)
    return f"image-{tag}" if tag == "feature-extraction" and images else tag


def usage(folder: Path | None, task: str, tag: str) -> list[str]:
    """The lines of the section, for a model of this task, which hubs call by its tag; what a folder needs, its config
    says."""
    config = json.loads((folder / "config.json").read_text()) if folder and (folder / "config.json").is_file() else {}
    if folder is None or not plain_loads(config):
        return _block(HEADPRUNE)
    lines, shown = [OWN_CODE if config.get("auto_map") else PLAIN, ""], ""
    if has_tokenizer(folder) or _has_processor(folder):
        if way_of(config, task) is not None:
            shown = transformers_snippet(config, task, PLACE)
        elif tag in get_supported_tasks():
            shown = pipeline_snippet(config, tag, PLACE)
        lines += [*_block(shown), ""] if shown else []
    if "\nmodel = " not in shown:
        lines += [*_block(model_snippet(config, task, PLACE)), ""]
    return [*lines, "With headprune, whose code alone is run:", "", *_block(HEADPRUNE)]


def _has_processor(folder: Path) -> bool:
    return (folder / "preprocessor_config.json").is_file()


def _block(code: str) -> list[str]:
    return ["```python", *code.splitlines(), "```"]
