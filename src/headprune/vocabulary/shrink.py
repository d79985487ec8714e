"""A model and its tokenizer with the tokens of given texts only: their outputs on such texts stay what they were."""

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
from headprune.units.cutting.undo import Undo
from headprune.vocabulary import rewriting
from headprune.vocabulary.ids import configs_of, named_ids, own_configs, renumber
from headprune.vocabulary.pieces import Pieces
from headprune.vocabulary.tables import apply_tables, find_tables, rows_of

RECORD = "headprune_vocabulary"  # in the config: how many tokens there were and are; on the model: `Shrunk`
CHUNK = 100  # texts among which those are
LOOKED_AT, LONGEST = 4, 64  # texts, and tokens of each, that outputs are compared on


@dataclass(frozen=True)
class Shrunk:
    """What became of a vocabulary: the smaller tokenizer, and the old id of each token by its new one."""

    tokenizer: Any
    kept: Sequence[int]
    before: int
    parameters: int  # that went

    def to_json(self) -> dict[str, int]:
        return {"before": self.before, "after": len(self.kept), "parameters": self.parameters}


def shrink_vocabulary(
    model: PreTrainedModel, tokenizer: Any, texts: Iterable[str], *, keep: Iterable[int] = ()
) -> tuple[Any, list[int]]:
    """Keep the tokens that occur in these texts, the special ones and those in `keep`, in the model, in place, and in a
    new tokenizer; returns that one, and the ids that its tokens had, in the order of their new ones.

    Every text is cut into the same tokens as before, and the outputs of the model on them are the same. Other texts
    work as well, in smaller pieces or with unknown tokens. `headprune.save` writes the new tokenizer with the model.
    If anything cannot be done, nothing is changed.
    """
    given = list(texts)
    if not isinstance(model, PreTrainedModel):
        raise VocabularyError(f"{type(model).__name__} is not a transformers model, so its vocabulary is not known.")
    if isinstance(texts, str) or not given or not all(isinstance(text, str) for text in given):
        raise VocabularyError("Give at least one text, as a list of strings, to keep the tokens of.")
    refuse_offloaded(model, "given a smaller vocabulary")
    rows = rows_of(model)
    configs = configs_of(model, rows)
    named = {entry for config in configs for entry in named_ids(config) if entry < rows}
    found = _find(tokenizer, given, named | set(map(int, keep)), named, rows)
    before = _parameters(model)
    _replace(model, configs, found, _batch(model, found, given), rows)
    _remember(model, found, rows, before - _parameters(model))
    return found.tokenizer, found.kept


@dataclass(frozen=True)
class _Found:
    tokenizer: Any
    new: Mapping[int, int]  # old id -> new id
    kept: list[int]  # old ids of rows, by their new ones
    full: Tokenizer


# --- the tokenizer ---


def _find(tokenizer: Any, texts: Sequence[str], wanted: set[int], named: set[int], rows: int) -> _Found:
    """The smallest tokenizer of this form that cuts every text as before. `named` are rows that the model knows by
    their number, whether the tokenizer has a token there or not."""
    state = rewriting.state_of(tokenizer)
    pieces = Pieces(state)
    full = rewriting.backend_of(state, as_text=tokenizer.split_special_tokens)
    known = set(full.get_vocab(with_added_tokens=True).values())
    used = {token for ids in rewriting.cut(full, texts) for token in ids}
    if used and max(used) >= rows:
        raise VocabularyError(
            f"The tokenizer gives token {max(used)} and the model has only {rows}; give the model's own tokenizer."
        )
    wanted = wanted | used | rewriting.special_ids(state) | set(tokenizer.all_special_ids)
    kept = pieces.closed((wanted & known) | pieces.always())
    for _ in range(2):
        order = sorted(token for token in kept if token < rows)
        order += sorted(named - known) + sorted(token for token in kept if token >= rows)
        new = {old: place for place, old in enumerate(order)}
        other: list[str] = []
        for made in rewriting.rebuilt(tokenizer, rewriting.rewritten(state, new)):
            other = _cut_otherwise(full, made, texts, new)
            if not other:
                return _Found(made, new, [old for old in order if old < rows], full)
        for text in other:
            kept |= pieces.inside(full, text)
        kept = pieces.closed(kept)
    shown = f"{other[0][:40]!r} is cut into other tokens" if other else "its class cannot be built from them"
    raise VocabularyError(
        f"The vocabulary of {type(tokenizer).__name__} cannot be made smaller: with the tokens of these texts alone, "
        f"{shown}; leave that text out, or keep the whole vocabulary."
    )


def _cut_otherwise(full: Tokenizer, made: Any, texts: Sequence[str], new: Mapping[int, int]) -> list[str]:
    """Texts that the smaller tokenizer cuts into other tokens, all of them where its tokens have other ids."""
    expected = {token: new[old] for token, old in full.get_vocab(with_added_tokens=True).items() if old in new}
    if made.get_vocab() != expected:
        return list(texts)
    small = rewriting.backend_of(rewriting.state_of(made), as_text=made.split_special_tokens)
    pairs = zip(texts, rewriting.cut(full, texts), rewriting.cut(small, texts), strict=True)
    return [text for text, one, other in pairs if [new.get(token) for token in one] != other]


# --- the model ---


def _batch(model: PreTrainedModel, found: _Found, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Some of the texts, to compare outputs on; several at once only where the model knows what fills them up."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(LONGEST, positions - 2) if isinstance(positions, int) and positions > 4 else LONGEST
    pad = getattr(config, "pad_token_id", None)
    count = LOOKED_AT if isinstance(pad, int) and pad in found.new else 1
    some = [ids for ids in rewriting.cut(found.full, texts[:CHUNK]) if ids][:count]
    if not some:
        raise VocabularyError("The first texts have no tokens, so nothing can be compared; give others first.")
    some = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in some]
    width = max(map(len, some))
    rows = [ids + [pad] * (width - len(ids)) for ids in some]
    mask = [[1] * len(ids) + [0] * (width - len(ids)) for ids in some]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def _replace(
    model: PreTrainedModel, configs: Sequence[Any], found: _Found, batch: Mapping[str, torch.Tensor], rows: int
) -> None:
    """Give the model the new tokens, and compare its outputs; put it back where they differ."""
    after = copy.deepcopy(model.config)
    for config in own_configs(after, rows):
        renumber(config, found.new, rows, len(found.kept))
    tables = find_tables(model, after, rows, len(found.kept))
    form, expected = _outputs(model, batch)
    table = torch.zeros(rows, dtype=torch.long)
    table[found.kept] = torch.arange(len(found.kept))
    undo, settings = Undo(model), [(config, dict(vars(config))) for config in configs]
    try:
        apply_tables(model, tables, found.kept)
        for config in configs:
            renumber(config, found.new, rows, len(found.kept))
        actual = run(model, FORMS[form]({**batch, "input_ids": table[batch["input_ids"]]}))
        cut = [
            one[..., found.kept] if one.shape != other.shape and one.shape[-1:] == (rows,) else one
            for one, other in zip(expected, actual, strict=True)
        ]
        difference, allowed = largest_difference(cut, actual)
        if not difference <= allowed:
            raise VocabularyError(
                f"With fewer tokens {type(model).__name__} gives other outputs (by up to {difference:.3g}), so it was "
                "left as it is; it may know tokens by numbers that its config does not name."
            )
    except BaseException:
        undo()
        for config, values in settings:
            vars(config).clear()
            vars(config).update(values)
        raise


FORMS: dict[str, Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "text": dict,
    "text and target": lambda batch: {**batch, "decoder_input_ids": batch["input_ids"]},
    "choices": lambda batch: {name: value[:, None] for name, value in batch.items()},
}


def _outputs(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    """What the model says, and the form of inputs that it takes."""
    reason = ""
    for form, made in FORMS.items():
        try:
            return form, run(model, made(batch))
        except Exception as error:  # of a model that wants other inputs
            reason = reason or " ".join(str(error).split())[:200]
    raise VocabularyError(
        f"{type(model).__name__} does not run on text alone ({reason}), so that its outputs could not be compared; "
        "its vocabulary stays as it is."
    )


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _remember(model: PreTrainedModel, found: _Found, rows: int, gone: int) -> None:
    """In the config how many tokens there were at first and are, on the model what `save` needs to know."""
    earlier: Shrunk | None = getattr(model, RECORD, None)
    if earlier is None:
        shrunk = Shrunk(found.tokenizer, tuple(found.kept), rows, gone)
    else:
        kept = tuple(earlier.kept[place] for place in found.kept)
        shrunk = Shrunk(found.tokenizer, kept, earlier.before, earlier.parameters + gone)
    first = (getattr(model.config, RECORD, None) or {}).get("before", rows)
    setattr(model.config, RECORD, {"before": first, "after": len(found.kept)})
    setattr(model, RECORD, shrunk)
