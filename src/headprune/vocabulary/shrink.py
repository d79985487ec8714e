"""Shrinks a model and its tokenizer to the tokens of some texts; the outputs on these texts stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from headprune.errors import VocabularyError
from headprune.hooks.offload import refuse_offloaded
from headprune.hooks.outputs import largest_difference, run
from headprune.units.slicing.undo import Undo
from headprune.vocabulary import tokenizer_json
from headprune.vocabulary.config_ids import configs_of, configs_with_vocabulary, renumber, special_ids
from headprune.vocabulary.needed_tokens import Pieces
from headprune.vocabulary.token_tables import apply_tables, find_tables, rows_of

RECORD = "headprune_vocabulary"  # in the config: the numbers of tokens before and after; on the model: `Shrunk`
CHUNK = 100  # texts from which those to compare are chosen
COMPARED_TEXTS, COMPARED_TOKENS = 4, 64  # texts on which outputs are compared, and tokens of each


@dataclass(frozen=True)
class Shrunk:
    """The record of a smaller vocabulary: the new tokenizer, and the old id of each token in the order of new ids."""

    tokenizer: Any
    kept: Sequence[int]
    before: int
    parameters: int  # that were removed

    def to_json(self) -> dict[str, int]:
        return {"before": self.before, "after": len(self.kept), "parameters": self.parameters}


def shrink_vocabulary(
    model: PreTrainedModel, tokenizer: Any, texts: Iterable[str], *, keep: Iterable[int] = ()
) -> tuple[Any, list[int]]:
    """Keep the tokens that occur in these texts, the special ones and those in `keep`, in the model, in place, and in a
    new tokenizer; returns the tokenizer, and the old ids of its tokens in the order of their new ids.

    Every text is split into the same tokens as before, and the outputs of the model on them are the same. Other texts
    work as well, with smaller tokens or unknown ones. `headprune.save` writes the new tokenizer with the model. If the
    vocabulary cannot be shrunk, an error is raised and nothing changes.
    """
    text_list = list(texts)
    if not isinstance(model, PreTrainedModel):
        raise VocabularyError(
            f"{type(model).__name__} is not a transformers model, so its vocabulary cannot be shrunk; give one that is."
        )
    if isinstance(texts, str) or not text_list or not all(isinstance(text, str) for text in text_list):
        raise VocabularyError("No texts were given whose tokens to keep; give a list of at least one string.")
    refuse_offloaded(model, "given a smaller vocabulary")
    rows = rows_of(model)
    configs = configs_of(model, rows)
    config_ids = {entry for config in configs for entry in special_ids(config) if entry < rows}
    reduction = _find(tokenizer, text_list, config_ids | set(map(int, keep)), config_ids, rows)
    before = _parameters(model)
    _replace(model, configs, reduction, _batch(model, reduction, text_list), rows)
    _record(model, reduction, rows, before - _parameters(model))
    return reduction.tokenizer, reduction.kept


@dataclass(frozen=True)
class _Reduction:
    tokenizer: Any
    new: Mapping[int, int]  # old id -> new id
    kept: list[int]  # old ids of rows, by their new ones
    full: Tokenizer


# --- the tokenizer ---


def _find(tokenizer: Any, texts: Sequence[str], needed: set[int], config_ids: set[int], rows: int) -> _Reduction:
    """The smallest tokenizer of this type that splits every text as before. `named` are ids in the configs of the
    model, whether the tokenizer has such tokens or not."""
    state = tokenizer_json.state_of(tokenizer)
    pieces = Pieces(state)
    full = tokenizer_json.backend_of(state, as_text=tokenizer.split_special_tokens)
    all_ids = set(full.get_vocab(with_added_tokens=True).values())
    used = {token for ids in tokenizer_json.encode(full, texts) for token in ids}
    if used and max(used) >= rows:
        raise VocabularyError(
            f"The tokenizer returns token {max(used)}, but the model has only {rows}; give the tokenizer of the model."
        )
    needed = needed | used | tokenizer_json.special_ids(state) | set(tokenizer.all_special_ids)
    tokens = pieces.with_parts((needed & all_ids) | pieces.always())
    for _ in range(2):
        order = sorted(token for token in tokens if token < rows)
        order += sorted(config_ids - all_ids) + sorted(token for token in tokens if token >= rows)
        new = {old: index for index, old in enumerate(order)}
        changed: list[str] = []
        for smaller in tokenizer_json.rebuild(tokenizer, tokenizer_json.renumber_tokens(state, new)):
            changed = _split_differently(full, smaller, texts, new)
            if not changed:
                return _Reduction(smaller, new, [old for old in order if old < rows], full)
        for text in changed:
            tokens |= pieces.inside(full, text)
        tokens = pieces.with_parts(tokens)
    problem = f"{changed[0][:40]!r} is split into other tokens" if changed else "its class cannot be built from them"
    raise VocabularyError(
        f"The vocabulary of {type(tokenizer).__name__} cannot be made smaller: with the tokens of these texts alone, "
        f"{problem}; leave that text out, or keep the whole vocabulary."
    )


def _split_differently(full: Tokenizer, smaller: Any, texts: Sequence[str], new: Mapping[int, int]) -> list[str]:
    """Texts that the smaller tokenizer splits into other tokens; all texts where its vocabulary is not as expected."""
    expected = {token: new[old] for token, old in full.get_vocab(with_added_tokens=True).items() if old in new}
    if smaller.get_vocab() != expected:
        return list(texts)
    small = tokenizer_json.backend_of(tokenizer_json.state_of(smaller), as_text=smaller.split_special_tokens)
    pairs = zip(texts, tokenizer_json.encode(full, texts), tokenizer_json.encode(small, texts), strict=True)
    return [text for text, old_ids, new_ids in pairs if [new.get(token) for token in old_ids] != new_ids]


# --- the model ---


def _batch(model: PreTrainedModel, reduction: _Reduction, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch of some texts, to compare outputs on; of one text where the model has no padding token."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(COMPARED_TOKENS, positions - 2) if isinstance(positions, int) and positions > 4 else COMPARED_TOKENS
    pad = getattr(config, "pad_token_id", None)
    count = COMPARED_TEXTS if isinstance(pad, int) and pad in reduction.new else 1
    sequences = [ids for ids in tokenizer_json.encode(reduction.full, texts[:CHUNK]) if ids][:count]
    if not sequences:
        raise VocabularyError("The first texts have no tokens, so outputs cannot be compared; put others first.")
    sequences = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in sequences]
    width = max(map(len, sequences))
    rows = [ids + [pad] * (width - len(ids)) for ids in sequences]
    mask = [[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def _replace(
    model: PreTrainedModel, configs: Sequence[Any], reduction: _Reduction, batch: Mapping[str, torch.Tensor], rows: int
) -> None:
    """Shrink the tables of the model and compare its outputs; undo it where they differ."""
    after = copy.deepcopy(model.config)
    for config in configs_with_vocabulary(after, rows):
        renumber(config, reduction.new, rows, len(reduction.kept))
    tables = find_tables(model, after, rows, len(reduction.kept))
    form, expected = _outputs(model, batch)
    new_ids = torch.zeros(rows, dtype=torch.long)
    new_ids[reduction.kept] = torch.arange(len(reduction.kept))
    undo, settings = Undo(model), [(config, dict(vars(config))) for config in configs]
    try:
        apply_tables(model, tables, reduction.kept)
        for config in configs:
            renumber(config, reduction.new, rows, len(reduction.kept))
        actual = run(model, INPUT_FORMATS[form]({**batch, "input_ids": new_ids[batch["input_ids"]]}))
        compared = [
            old[..., reduction.kept] if old.shape != actual_tensor.shape and old.shape[-1:] == (rows,) else old
            for old, actual_tensor in zip(expected, actual, strict=True)
        ]
        difference, allowed = largest_difference(compared, actual)
        if not difference <= allowed:
            raise VocabularyError(
                f"With fewer tokens {type(model).__name__} gives other outputs (by up to {difference:.3g}), so it was "
                "not changed; its code may use token ids that are not in its config."
            )
    except BaseException:
        undo()
        for config, values in settings:
            vars(config).clear()
            vars(config).update(values)
        raise


INPUT_FORMATS: dict[str, Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "text": dict,
    "text and target": lambda batch: {**batch, "decoder_input_ids": batch["input_ids"]},
    "choices": lambda batch: {name: value[:, None] for name, value in batch.items()},
}


def _outputs(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    """The format of inputs on which the model runs, and its outputs."""
    reason = ""
    for form, to_inputs in INPUT_FORMATS.items():
        try:
            return form, run(model, to_inputs(batch))
        except Exception as error:  # the model needs other inputs
            reason = reason or " ".join(str(error).split())[:200]
    raise VocabularyError(
        f"{type(model).__name__} does not run on text alone ({reason}), so its outputs cannot be compared; keep its "
        "whole vocabulary."
    )


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _record(model: PreTrainedModel, reduction: _Reduction, rows: int, removed: int) -> None:
    """Record the numbers of tokens before and after in the config, and the tokenizer for `save` on the model."""
    earlier: Shrunk | None = getattr(model, RECORD, None)
    if earlier is None:
        shrunk = Shrunk(reduction.tokenizer, tuple(reduction.kept), rows, removed)
    else:
        old_ids = tuple(earlier.kept[old_id] for old_id in reduction.kept)
        shrunk = Shrunk(reduction.tokenizer, old_ids, earlier.before, earlier.parameters + removed)
    first = (getattr(model.config, RECORD, None) or {}).get("before", rows)
    setattr(model.config, RECORD, {"before": first, "after": len(reduction.kept)})
    setattr(model, RECORD, shrunk)
