"""A trained model (six layers of twelve heads) through the same promises, where it is present."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from helpers import MATTERS, SHARED, TOLERANCE, Heads, difference, gated_outputs, gates_without, identical, outputs

MODEL = SHARED / "models" / "minilm-sst2"
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="the trained model of ../shared/models is not here")

SENTENCES = [
    "a gripping, beautifully acted film that earns every one of its tears",
    "dull",
    "the plot makes no sense and the jokes are older than the actors",
    "it is not the worst way to spend an evening, if you have nothing to read",
]
ALL = [(site, head) for site in range(6) for head in range(12)]


def load() -> Any:
    return headprune.load(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def selections() -> dict[str, Heads]:
    rng = random.Random(0)
    return {
        **{f"random-{size}": rng.sample(ALL, size) for size in (7, 36, 60)},
        "whole-site": [(3, head) for head in range(12)],
        "all-but-one": [head for head in ALL if head != (4, 7)],
    }


@pytest.mark.parametrize("heads", selections().values(), ids=selections())
def test_masked_equals_removed_and_loads_again(heads: Heads, batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = load()
    sites = headprune.resolve(model)
    assert sum(site.heads for site in sites) == 72
    assert batch["attention_mask"].min() == 0  # padded
    dense = outputs(model, batch)
    expected = gated_outputs(model, batch, gates_without(sites, heads))
    assert difference(dense, expected) > MATTERS
    headprune.remove(model, heads[::2], verify=batch)
    headprune.remove(model, heads[1::2], verify=batch)
    actual = outputs(model, batch)
    assert difference(expected, actual) <= TOLERANCE

    headprune.save(model, tmp_path / "model")
    assert identical(actual, outputs(headprune.load(tmp_path / "model"), batch))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert torch.equal(tokenizer(SENTENCES, padding=True, return_tensors="pt")["input_ids"], batch["input_ids"])


def test_the_model_is_loaded_in_its_own_precision_unless_told_otherwise() -> None:
    assert {parameter.dtype for parameter in headprune.load(MODEL).parameters()} == {torch.float16}
