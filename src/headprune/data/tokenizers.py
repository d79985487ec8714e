"""Loads tokenizers, checks that they fit the model, and sets length limits and padding."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from headprune.checkpoint.atomic_files import short
from headprune.checkpoint.config_files import read_config
from headprune.checkpoint.processors import has_tokenizer
from headprune.data.files import is_there
from headprune.errors import DataError
from headprune.tasks import IGNORED, Task

log = logging.getLogger(__name__)
MAX_VOCABULARY_RATIO = 100  # a vocabulary this many times smaller than the model's belongs to another model
MAX_UNKNOWN_SHARE = 0.9  # the share of unknown tokens above which a text is refused
CHECKED_TEXTS = 64  # texts that are checked for unknown tokens
CHUNK = 1000  # texts tokenized together
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def load_tokenizer(location: Any) -> Any:
    """The tokenizer in a folder or on the hub; a tokenizer object is returned unchanged."""
    if not isinstance(location, (str, Path)):
        return location
    advice = "save it there, or name another folder or hub repository with --processor"
    if is_there(location) and Path(location).is_dir() and not has_tokenizer(Path(location)):
        raise DataError(f"No tokenizer was found at {location}; {advice}.")
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=False, **_config(location))
    except ImportError as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"The tokenizer at {short(location)} needs a package that is not installed ({reason})."
        ) from None
    except Exception as error:  # a parser may raise any error for broken files
        raise DataError(f"No tokenizer was found at {short(location)} ({type(error).__name__}); {advice}.") from None


def _config(location: str | Path) -> dict[str, Any]:
    """The config of a pruned model, read here because transformers would need trust_remote_code for it."""
    if not (Path(location) / "config.json").is_file():
        return {}
    return {"config": read_config(location)}


class Encoder:
    """A tokenizer that fits a model, with the length limit and the padding of its texts."""

    def __init__(self, model: PreTrainedModel, task: Task, location: Any, max_length: int) -> None:
        self.tokenizer = load_tokenizer(location)
        self.location = location if isinstance(location, (str, Path)) else self.tokenizer.name_or_path
        self.limit = _limit(model, max_length)
        self.vocabulary = _vocabulary(model)
        self._refuse_other_vocabulary()
        self.padding = {"input_ids": self._pad(model, task), "labels": IGNORED}

    def __call__(self, texts: Any, pairs: Any = None, *, rows: Sequence[int], **options: Any) -> Any:
        """The encoding of these texts, truncated to the limit; `rows` are their row numbers, for messages."""
        encoded = self.tokenizer(texts, pairs, **{"truncation": True, "max_length": self.limit, **options})
        self.check(encoded["input_ids"], rows)
        return encoded

    def rows(self, encoded: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        names = [name for name in INPUTS if name in encoded]
        count = len(encoded["input_ids"])
        return [{name: torch.tensor(encoded[name][row], dtype=torch.long) for name in names} for row in range(count)]

    def check(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Raise for a row without tokens, and for tokens without an embedding in the model."""
        for row, tokens in zip(rows, ids, strict=True):
            if not tokens:
                raise DataError(f"The text in row {row} has no tokens (rows are counted from 0); remove the row.")
            if self.vocabulary is not None and max(tokens) >= self.vocabulary:
                raise DataError(
                    f"The tokenizer at {self.location} returns token {max(tokens)} in row {row}, but the model has "
                    f"only {self.vocabulary}; name the model's own tokenizer with --processor."
                )

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text."""
        counts: list[int] = []
        for start in range(0, len(texts), CHUNK):
            part = self.tokenizer(list(texts[start : start + CHUNK]), truncation=True, max_length=self.limit)
            counts += [len(ids) for ids in part["input_ids"]]
        return counts

    def refuse_unknown(self, texts: Sequence[str]) -> None:
        """Raise where nearly all tokens of the texts are unknown to the tokenizer."""
        unknown = self.tokenizer.unk_token_id
        if unknown is None or not texts:
            return
        step = max(len(texts) // CHECKED_TEXTS, 1)
        sample = texts[::step][:CHECKED_TEXTS]
        ids = self.tokenizer([text[:2000] for text in sample], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = [token for row in ids for token in row]
        share = tokens.count(unknown) / max(len(tokens), 1)
        if len(tokens) >= 5 and share > MAX_UNKNOWN_SHARE:
            raise DataError(
                f"{share:.0%} of the tokens of the text are unknown to the tokenizer at {self.location}; name the "
                "model's tokenizer with --processor, or give data in a language of the model."
            )

    def _refuse_other_vocabulary(self) -> None:
        """Raise for a tokenizer whose vocabulary cannot be that of the model."""
        size, rows = len(self.tokenizer), self.vocabulary
        if rows is None:
            return
        tokens = self.tokenizer
        used = (tokens.cls_token_id, tokens.sep_token_id, tokens.bos_token_id, tokens.eos_token_id, tokens.unk_token_id)
        ordinary = size - len(set(tokens.all_special_ids))
        outside = any(token is not None and token >= rows for token in used)
        if tokens.vocab_size > rows or outside or ordinary < 1 or size * MAX_VOCABULARY_RATIO < rows:
            raise DataError(
                f"The tokenizer at {self.location} has a vocabulary of {size} and the model one of {rows}, so it is "
                "not the tokenizer of the model; name that one with --processor."
            )

    def _pad(self, model: PreTrainedModel, task: Task) -> int:
        """The padding token. The one of the model's config comes first, because some models read it: RoBERTa to number
        positions, decoders with a classification head to find the last token of a text."""
        config = model.config.get_text_config()
        rows = self.vocabulary if self.vocabulary is not None else torch.iinfo(torch.long).max

        def usable(candidate: Any) -> bool:
            return isinstance(candidate, int) and 0 <= candidate < rows

        config_token, tokens = getattr(config, "pad_token_id", None), self.tokenizer
        if isinstance(config_token, int) and usable(config_token):
            return config_token
        token = next((candidate for candidate in (tokens.pad_token_id, tokens.eos_token_id) if usable(candidate)), None)
        if task.name == "sequence-classification":
            if token is None:
                raise DataError(
                    f"Neither the model nor the tokenizer at {self.location} has a padding or an end token, so texts "
                    "of different lengths cannot be classified together; set tokenizer.pad_token and save it."
                )
            # A classification head on a decoder raises for batches of several texts without a padding token.
            log.warning("The model has no padding token; %r is used.", tokens.convert_ids_to_tokens(token))
            config.pad_token_id = token
            if config is not model.config:
                model.config.pad_token_id = token
        return int(token or 0)


def _vocabulary(model: PreTrainedModel) -> int | None:
    """The number of rows of the token embeddings; None where the model has no such table."""
    if getattr(model.config.get_text_config(), "vocab_size", None) is None:
        return None
    try:
        embeddings = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(embeddings, "weight", None)
    return int(weight.shape[0]) if isinstance(embeddings, torch.nn.Embedding) and weight is not None else None


def _limit(model: PreTrainedModel, max_length: int) -> int:
    """At most the number of positions, less 2: RoBERTa and its variants number positions from the padding id on."""
    if max_length < 2:
        raise DataError(f"max_length must be at least 2, but it is {max_length}.")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(max_length, positions - 2) if isinstance(positions, int) and positions > 4 else max_length
