"""Tokenizer and image processor files that belong to a model, and how they travel with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

VOCABULARIES = ("tokenizer*", "vocab*", "merges.txt", "*.spm", "*.model", "*.tiktoken")  # a tokenizer has one of these
PATTERNS = (
    *VOCABULARIES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "normalizer.json",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in this folder. transformers makes one up from the model's config if none was."""
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def carry_processor(model: PreTrainedModel, processor: Any, target: Path) -> None:
    """Write the processor into `target`: the one given, or the files beside the weights the model came from."""
    if processor is not None:
        processor.save_pretrained(target)
        return
    source = source_folder(model)
    if source is not None:
        for pattern in PATTERNS:
            for file in source.glob(pattern):
                if file.is_file() and not (target / file.name).exists():
                    shutil.copyfile(file, target / file.name)


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that the model was loaded from, if it still is on this machine."""
    name = getattr(model.config, "_name_or_path", "")
    if not name:
        return None
    try:
        if Path(name).is_dir():
            return Path(name)
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except (ValueError, OSError):  # not the form of a hub name, or too long for a path
        return None
    return Path(cached).parent if isinstance(cached, str) else None
