"""Entries of batches that a model would ignore, or fail on in its own code, are named before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.errors import DataError
from headprune.tasks.checks import checked_batches
from task_models import CASES
from zoo import ZOO, text_batch


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
