"""Copies the files of the tokenizer or image processor of a model into its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.json_forms import check_form
from headprune.vocabulary.shrink import RECORD, Shrunk

KEPT_TOKENS = "kept_tokens.json"  # of a model with a shrunk vocabulary: the original id of each token
VOCABULARIES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.spm",
    "*.model",
    "*.tiktoken",
)  # every tokenizer has one of these
TOKENIZERS = (*VOCABULARIES, "special_tokens_map.json", "added_tokens.json", "chat_template*", KEPT_TOKENS)
PATTERNS = (
    *TOKENIZERS,
    "*preprocessor_config.json",
    "processor_config.json",
    "normalizer.json",
)

MODULES = "modules.json"
SENTENCES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in this folder; otherwise transformers would build one from the model's config."""
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def save_processor(model: PreTrainedModel, processor: Any, target: Path) -> None:
    """Write the processor into `target`: this one, or the files in the folder that the model was loaded from. Where the
    vocabulary was shrunk, the shrunk tokenizer is written instead."""
    shrunk: Shrunk | None = getattr(model, RECORD, None)
    if processor is not None:
        _refuse_larger(model, processor)
        processor.save_pretrained(target)
    elif shrunk is not None:
        shrunk.tokenizer.save_pretrained(target)
    source = source_folder(model)
    if shrunk is not None:
        _write_kept_tokens(shrunk, source, target)
    elif source is not None and (source / KEPT_TOKENS).is_file() and hasattr(model.config, RECORD):
        shutil.copyfile(source / KEPT_TOKENS, target / KEPT_TOKENS)
    if source is not None:
        _copy_sentence_transformers(model, source, target)
    if source is not None and processor is None:
        copy_files(source, target, TOKENIZERS if shrunk is not None else ())


def copy_files(source: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Copy the files of tokenizers and processors from one folder to another, without overwriting."""
    for pattern in PATTERNS:
        for file in source.glob(pattern) if pattern not in without else ():
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def _copy_sentence_transformers(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Copy the files with which sentence-transformers pools an encoder's tokens. Another class of the same folder, such
    as a classifier, is no sentence encoder."""
    try:
        modules = json.loads((source / MODULES).read_text())
        kinds = json.loads((source / "config.json").read_text()).get("architectures") or ()
        paths = [str(module["path"]) for module in modules if module["path"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    if type(model).__name__ not in kinds or any(Path(path).name != path for path in paths):
        return
    for pattern in SENTENCES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    for path in paths:
        if (source / path).is_dir():
            shutil.copytree(source / path, target / path, dirs_exist_ok=True)


def _refuse_larger(model: PreTrainedModel, processor: Any) -> None:
    """Refuse the tokenizer that a model had before its vocabulary was shrunk: its ids are different."""
    record = getattr(model.config, RECORD, None)
    tokenizer = getattr(processor, "tokenizer", processor)
    if record and hasattr(tokenizer, "get_vocab") and len(tokenizer) > record["after"]:
        raise CheckpointError(
            f"The processor has {len(tokenizer)} tokens and the model {record['after']}, since its vocabulary was "
            "shrunk; pass the tokenizer that headprune.shrink_vocabulary returned, or none."
        )


def _write_kept_tokens(shrunk: Shrunk, source: Path | None, target: Path) -> None:
    """Original ids, also where the vocabulary had been shrunk before the model was loaded."""
    kept = list(shrunk.kept)
    if source is not None and (source / KEPT_TOKENS).is_file():
        earlier = _read_kept_tokens(source / KEPT_TOKENS)
        if len(earlier) == shrunk.before:
            kept = [earlier[token] for token in kept]
    (target / KEPT_TOKENS).write_text(json.dumps(kept) + "\n")


def _read_kept_tokens(file: Path) -> list[int]:
    try:
        content: Any = json.loads(file.read_bytes())
        check_form(content, [int])
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{file} is damaged ({reason}); copy it again, or delete it to number tokens as this model does."
        ) from None
    return list(content)


def outdated(model: PreTrainedModel) -> Sequence[str]:
    """Files of an earlier checkpoint that have to be removed: those of another vocabulary."""
    return TOKENIZERS if hasattr(model.config, RECORD) else (KEPT_TOKENS,)


def source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that the model was loaded from, if it still is on this machine."""
    name = getattr(model.config, "_name_or_path", "")
    if not name:
        return None
    try:
        if Path(name).is_dir():
            return Path(name)
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except (ValueError, OSError):  # not a valid hub name, or too long for a path
        return None
    return Path(cached).parent if isinstance(cached, str) else None
