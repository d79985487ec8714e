"""Tokenizer and image processor files that belong to a model, and how they travel with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.vocabulary.shrink import RECORD, Shrunk

KEPT = "kept_tokens.json"  # beside a model with a smaller vocabulary: the original id of each of its tokens
VOCABULARIES = ("tokenizer*", "vocab*", "merges.txt", "*.spm", "*.model", "*.tiktoken")  # a tokenizer has one of these
TOKENIZERS = (*VOCABULARIES, "special_tokens_map.json", "added_tokens.json", "chat_template*", KEPT)
PATTERNS = (
    *TOKENIZERS,
    "*preprocessor_config.json",
    "processor_config.json",
    "normalizer.json",
)

MODULES = "modules.json"
SENTENCES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in this folder. transformers makes one up from the model's config if none was."""
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def carry_processor(model: PreTrainedModel, processor: Any, target: Path) -> None:
    """Write the processor into `target`: the one given, or the files beside the weights the model came from. Where the
    vocabulary was made smaller, the tokenizer that belongs to it comes instead of theirs."""
    shrunk: Shrunk | None = getattr(model, RECORD, None)
    if processor is not None:
        _refuse_larger(model, processor)
        processor.save_pretrained(target)
    elif shrunk is not None:
        shrunk.tokenizer.save_pretrained(target)
    source = source_folder(model)
    if shrunk is not None:
        _write_kept(shrunk, source, target)
    elif source is not None and (source / KEPT).is_file() and hasattr(model.config, RECORD):
        shutil.copyfile(source / KEPT, target / KEPT)
    if source is not None:
        _carry_sentences(model, source, target)
    if source is not None and processor is None:
        carry_files(source, target, TOKENIZERS if shrunk is not None else ())


def carry_files(source: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Copy what prepares inputs from one folder to another, but for what is there already."""
    for pattern in PATTERNS:
        for file in source.glob(pattern) if pattern not in without else ():
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def _carry_sentences(model: PreTrainedModel, source: Path, target: Path) -> None:
    """What sentence-transformers keeps beside an encoder: how its tokens become one embedding. Another class of the
    same folder, such as a classifier, is no encoder of sentences."""
    try:
        modules = json.loads((source / MODULES).read_text())
        kinds = json.loads((source / "config.json").read_text()).get("architectures") or ()
        places = [str(module["path"]) for module in modules if module["path"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    if type(model).__name__ not in kinds or any(Path(place).name != place for place in places):
        return
    for pattern in SENTENCES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    for place in places:
        if (source / place).is_dir():
            shutil.copytree(source / place, target / place, dirs_exist_ok=True)


def _refuse_larger(model: PreTrainedModel, processor: Any) -> None:
    """Refuse the tokenizer that a model had before its vocabulary was made smaller: its ids are others."""
    record = getattr(model.config, RECORD, None)
    tokenizer = getattr(processor, "tokenizer", processor)
    if record and hasattr(tokenizer, "get_vocab") and len(tokenizer) > record["after"]:
        raise CheckpointError(
            f"The processor has {len(tokenizer)} tokens and the model {record['after']}, since its vocabulary was made "
            "smaller; give the tokenizer that headprune.shrink_vocabulary returned, or none."
        )


def _write_kept(shrunk: Shrunk, source: Path | None, target: Path) -> None:
    """Original ids, whether the model had all of its vocabulary when it was loaded or not."""
    kept = list(shrunk.kept)
    if source is not None and (source / KEPT).is_file():
        earlier = json.loads((source / KEPT).read_text())
        if isinstance(earlier, list) and len(earlier) == shrunk.before:
            kept = [earlier[place] for place in kept]
    (target / KEPT).write_text(json.dumps(kept) + "\n")


def outdated(model: PreTrainedModel) -> Sequence[str]:
    """Files of an earlier checkpoint that may not stay beside this one: another vocabulary's."""
    return TOKENIZERS if hasattr(model.config, RECORD) else (KEPT,)


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
