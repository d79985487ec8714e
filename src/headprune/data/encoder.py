"""Tokenizers: whether one belongs to the model, how long its texts may be, what fills them up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from headprune.data.files import is_there
from headprune.errors import DataError
from headprune.store.configs import read_config
from headprune.store.files import short
from headprune.store.processors import has_tokenizer
from headprune.tasks import IGNORED, Task

log = logging.getLogger(__name__)
SMALL = 100  # a vocabulary this many times smaller than the model's is another one's
UNKNOWN = 0.9  # of the tokens: more than that, and the tokenizer does not know the text
LOOKED_AT = 64  # texts for that
CHUNK = 1000  # texts that are counted together
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def load_tokenizer(place: Any) -> Any:
    """The tokenizer in a folder or on the hub, or the one given."""
    if not isinstance(place, (str, Path)):
        return place
    fix = "save it there, or name another place with --processor"
    if is_there(place) and Path(place).is_dir() and not has_tokenizer(Path(place)):
        raise DataError(f"No tokenizer was found at {place}; {fix}.")
    try:
        return AutoTokenizer.from_pretrained(place, **_config(place))
    except ImportError as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"The tokenizer at {short(place)} needs a package that is not installed ({reason}).") from None
    except Exception as error:  # broken files raise whatever the parser at hand does
        raise DataError(f"No tokenizer was found at {short(place)} ({type(error).__name__}); {fix}.") from None


def _config(place: str | Path) -> dict[str, Any]:
    """The config of a pruned model there, which transformers would ask to run the folder's code for."""
    if not (Path(place) / "config.json").is_file():
        return {}
    return {"config": read_config(place)}


class Encoder:
    """A tokenizer that was found to fit a model, and what the model needs to know about its texts."""

    def __init__(self, model: PreTrainedModel, task: Task, place: Any, max_length: int) -> None:
        self.tokenizer = load_tokenizer(place)
        self.place = place if isinstance(place, (str, Path)) else self.tokenizer.name_or_path
        self.limit = _limit(model, max_length)
        self.vocabulary = _vocabulary(model)
        self._refuse_stranger()
        self.padding = {"input_ids": self._pad(model, task), "labels": IGNORED}

    def __call__(self, texts: Any, pairs: Any = None, *, rows: Sequence[int], **options: Any) -> Any:
        """The tokenizer's own answer for these texts, cut to the limit; `rows` are their numbers in the data."""
        encoded = self.tokenizer(texts, pairs, **{"truncation": True, "max_length": self.limit, **options})
        self.check(encoded["input_ids"], rows)
        return encoded

    def rows(self, encoded: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        names = [name for name in INPUTS if name in encoded]
        count = len(encoded["input_ids"])
        return [{name: torch.tensor(encoded[name][row], dtype=torch.long) for name in names} for row in range(count)]

    def check(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Refuse a row without tokens, which no model takes, and tokens that the model has no embedding for."""
        for row, own in zip(rows, ids, strict=True):
            if not own:
                raise DataError(f"The text in row {row} gives no tokens (rows are counted from 0); remove the row.")
            if self.vocabulary is not None and max(own) >= self.vocabulary:
                raise DataError(
                    f"The tokenizer at {self.place} gives token {max(own)} in row {row}, and the model has only "
                    f"{self.vocabulary}; name the model's own tokenizer with --processor."
                )

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, without keeping any of them."""
        counts: list[int] = []
        for start in range(0, len(texts), CHUNK):
            part = self.tokenizer(list(texts[start : start + CHUNK]), truncation=True, max_length=self.limit)
            counts += [len(ids) for ids in part["input_ids"]]
        return counts

    def refuse_unknown(self, texts: Sequence[str]) -> None:
        """Refuse texts that are nearly all unknown to the tokenizer: a model that sees them sees nothing."""
        unknown = self.tokenizer.unk_token_id
        if unknown is None or not texts:
            return
        step = max(len(texts) // LOOKED_AT, 1)
        some = texts[::step][:LOOKED_AT]
        ids = self.tokenizer([text[:2000] for text in some], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = [token for row in ids for token in row]
        share = tokens.count(unknown) / max(len(tokens), 1)
        if len(tokens) >= 5 and share > UNKNOWN:
            raise DataError(
                f"The tokenizer at {self.place} knows none of {share:.0%} of the text's tokens; name the model's own "
                "tokenizer with --processor, or give data in a language that it knows."
            )

    def _refuse_stranger(self) -> None:
        """Refuse a tokenizer whose vocabulary cannot be the model's."""
        size, rows = len(self.tokenizer), self.vocabulary
        if rows is None:
            return
        tokens = self.tokenizer
        used = (tokens.cls_token_id, tokens.sep_token_id, tokens.bos_token_id, tokens.eos_token_id, tokens.unk_token_id)
        ordinary = size - len(set(tokens.all_special_ids))
        outside = any(token is not None and token >= rows for token in used)
        if tokens.vocab_size > rows or outside or ordinary < 1 or size * SMALL < rows:
            raise DataError(
                f"The tokenizer at {self.place} has a vocabulary of {size} where the model has one of {rows}, so it is "
                "not the model's own; name that one with --processor."
            )

    def _pad(self, model: PreTrainedModel, task: Task) -> int:
        """What fills short texts up. The model's own choice counts, since some look for it: RoBERTa to number its
        positions, decoders that classify to find the last token of a text."""
        config = model.config.get_text_config()
        rows = self.vocabulary if self.vocabulary is not None else torch.iinfo(torch.long).max

        def usable(token: Any) -> bool:
            return isinstance(token, int) and 0 <= token < rows

        own, tokens = getattr(config, "pad_token_id", None), self.tokenizer
        if isinstance(own, int) and usable(own):
            return own
        found = next((token for token in (tokens.pad_token_id, tokens.eos_token_id) if usable(token)), None)
        if task.name == "sequence-classification":
            if found is None:
                raise DataError(
                    f"Neither the model nor the tokenizer at {self.place} has a padding or an end token, so texts of "
                    "different lengths cannot be classified together; set tokenizer.pad_token and save it."
                )
            # A classifier on a decoder refuses more than one text at a time while it does not know the padding.
            log.warning("The model has no padding token; it gets %r.", tokens.convert_ids_to_tokens(found))
            config.pad_token_id = found
            if config is not model.config:
                model.config.pad_token_id = found
        return int(found or 0)


def _vocabulary(model: PreTrainedModel) -> int | None:
    """The number of tokens that the model has embeddings for; None where tokens are no rows of a table."""
    if getattr(model.config.get_text_config(), "vocab_size", None) is None:
        return None
    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(found, "weight", None)
    return int(weight.shape[0]) if isinstance(found, torch.nn.Embedding) and weight is not None else None


def _limit(model: PreTrainedModel, max_length: int) -> int:
    """At most what the position table holds; RoBERTa's kin start counting after the padding id."""
    if max_length < 2:
        raise DataError(f"max_length must be at least 2, but it is {max_length}.")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(max_length, positions - 2) if isinstance(positions, int) and positions > 4 else max_length
