"""Entries of batches that a model would ignore, or fail on in its own code, are named before it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

import headprune
from headprune.errors import CheckpointError, DataError
from headprune.tasks.checks import checked_batches
from task_models import CASES
from zoo import VOCAB, ZOO, text_batch


def checked(model: Any, **changes: Any) -> dict[str, Any]:
    """A batch of BERT's with these entries, as it is after its checks."""
    (batch,) = checked_batches([{**text_batch(0), "labels": torch.tensor([0, 1, 2]), **changes}], model)
    return dict(batch)


def test_a_mask_needs_a_column_per_token() -> None:
    mask = text_batch(0)["attention_mask"]
    for columns in (1, 8):
        with pytest.raises(DataError, match=rf"input_ids of batch 0 has 9 columns and attention_mask {columns}; give"):
            headprune.score(ZOO["bert"].build(), [{**text_batch(0), "attention_mask": mask[:, :columns]}])
    wide = {**ZOO["t5"].batch(0), "decoder_attention_mask": torch.ones(3, 7)}
    with pytest.raises(DataError, match=r"decoder_input_ids of batch 0 has 6 columns and decoder_attention_mask 7"):
        list(checked_batches([wide], ZOO["t5"].build()))


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "clip"])
def test_an_entry_that_only_keywords_take_is_refused(name: str) -> None:
    model, batch = ZOO[name].build(), ZOO[name].batch(0)
    misspelt = {"attention_maks": batch["attention_mask"], **batch}
    with pytest.raises(DataError, match=r"'attention_maks', which \w+ does not take; did you mean 'attention_mask'\?"):
        headprune.score(model, [misspelt])
    with pytest.raises(DataError, match=r"Batch 1 has an entry 'zzz', which \w+ does not take; leave it out\."):
        list(checked_batches([batch, {**batch, "zzz": torch.ones(3)}], model))
    list(checked_batches([{**batch, "seq_idx": torch.ones(3), "note": "no tensor"}], model))


class OwnKeywords(transformers.BertForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("speaker", None)
        return super().forward(*args, **kwargs)


def test_a_forward_of_the_user_reads_what_it_likes() -> None:
    checked(OwnKeywords(ZOO["bert"].build().config), speaker=torch.ones(3))


def test_labels_that_are_none_are_no_labels() -> None:
    assert "labels" not in checked(ZOO["bert"].build(), labels=None)
    assert headprune.score(ZOO["bert"].build(), [{**text_batch(0), "labels": None}], criterion="entropy").samples == 3


def test_labels_in_an_array_of_objects_are_numbers_or_refused() -> None:
    model = ZOO["bert"].build()
    labels = checked(model, labels=numpy.array([0, 1, 2], dtype=object))["labels"]
    assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 1, 2])
    for wrong in (["yes", "no", "no"], [0, None, 1]):
        with pytest.raises(DataError, match=r"labels of batch 0 cannot become a tensor .*; give numbers"):
            checked(model, labels=numpy.array(wrong, dtype=object))


def test_ids_are_whole_numbers() -> None:
    model, ids = ZOO["bert"].build(), text_batch(0)["input_ids"]
    for dtype in (torch.int16, torch.int8, torch.uint8):
        given = checked(model, input_ids=ids.to(dtype))["input_ids"]
        assert given.dtype == torch.int64
        assert torch.equal(given, ids)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(
            DataError, match=r"input_ids of batch 0 must be whole numbers, not torch\.float\d+; convert"
        ):
            headprune.score(model, [{**text_batch(0), "input_ids": ids.to(dtype)}])


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_token_that_the_model_does_not_have_is_named(name: str) -> None:
    model, batch = ZOO[name].build(), ZOO[name].batch(0)
    for wrong in (VOCAB, -1):
        ids = batch["input_ids"].clone()
        ids[1, 1] = wrong
        with pytest.raises(
            DataError, match=rf"batch 0 have the token {wrong}, but the model has 61, numbered 0 to 60;"
        ):
            headprune.score(model, [{**batch, "input_ids": ids}])
    ids = batch["input_ids"].clone()
    ids[1, 1] = VOCAB - 1
    list(checked_batches([{**batch, "input_ids": ids}], model))


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "roberta"])
def test_texts_that_are_too_long_are_refused_and_no_others(name: str) -> None:
    """The oracle is the model itself, at every length around its limit."""
    model = ZOO[name].build()
    refused = 0
    for length in range(36, 46):
        batch = text_batch(0, length=length)
        try:
            with torch.no_grad():
                model(**batch)
        except (IndexError, RuntimeError):
            refused += 1
            with pytest.raises(DataError, match=rf"have {length} tokens, but the model takes \d+ at most; truncate"):
                list(checked_batches([batch], model))
        else:
            list(checked_batches([batch], model))
    assert refused


def test_positions_that_count_the_mask_leave_padding_out() -> None:
    """OPT gives positions to the tokens of the mask: 44 columns of which 36 are tokens are within its 40."""
    model, batch = ZOO["opt"].build(), text_batch(0, length=44)
    batch["attention_mask"] = (torch.arange(44) >= 8).long().expand_as(batch["input_ids"])
    with torch.no_grad():
        model(**batch)
    list(checked_batches([batch], model))


def test_what_tokenizers_return_beside_the_ids_passes() -> None:
    model, batch = ZOO["llama"].build(), text_batch(0)
    ids = batch["input_ids"]
    list(checked_batches([{**batch, "token_type_ids": ids * 0, "special_tokens_mask": ids * 0}], model))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "flaot32", "There is no dtype 'flaot32'; choose torch.float32"),
        ("dtype", 32, "There is no dtype 32; choose torch.float32"),
        ("attn_implementation", "sdap", "cannot be loaded"),
        ("device_map", "nowhere", "cannot be loaded"),
    ],
)
def test_options_of_loading_are_not_blamed_on_the_weights(
    option: str, value: Any, message: str, tmp_path: Path
) -> None:
    headprune.save(ZOO["bert"].build(), tmp_path / "model")
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        headprune.load(tmp_path / "model", **{option: value})
    assert repr(value) in str(error.value)
    assert "do not fit" not in str(error.value)


@pytest.mark.parametrize("name", ZOO)
def test_inputs_of_every_family_pass(name: str) -> None:
    model = ZOO[name].build()
    for seed in (0, 1):
        (batch,) = checked_batches([ZOO[name].batch(seed)], model)
        assert batch.keys() == ZOO[name].batch(seed).keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_inputs_of_every_task_pass(case: Any) -> None:
    (batch,) = checked_batches([case.batch(0)], case.build())
    assert batch.keys() == case.batch(0).keys()
