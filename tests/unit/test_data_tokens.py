"""Tokenizers that do not fit, padding that a model lacks, texts without tokens, and that only what is drawn is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from headprune.data import Examples, load_examples
from headprune.data.lazy_rows import Rows
from headprune.data.tokenizers import Encoder
from headprune.errors import DataError
from oracles import IGNORED
from run_helpers import ROWS, bert, classifier, material, sentences, write_rows
from zoo import VOCAB, ZOO


def words_only(count: int = VOCAB, **tokens: str) -> Any:
    """One id per word, no tokens of its own: as GPT-2's."""
    words = {word: number for number, word in enumerate([*tokens.values(), *(f"w{n}" for n in range(count))])}
    inner = Tokenizer(models.WordLevel({word: n for word, n in words.items() if n < count}, unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=["input_ids", "attention_mask"], **tokens
    )


# --- whether the tokenizer is the model's ---


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """transformers makes up one of five tokens for it."""
    model = classifier()
    model.save_pretrained(tmp_path / "bare")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "bare")) == 5
    with pytest.raises(DataError, match=r"No tokenizer was found at .*bare; save it there, .*--processor"):
        load_examples(model, material().data_csv, processor=tmp_path / "bare")


def test_a_tokenizer_of_its_special_tokens_alone(tmp_path: Path) -> None:
    """As it is saved by those who did not notice."""
    model = classifier()
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"a vocabulary of 5 and the model one of 61, .*--processor"):
        load_examples(model, material().data_csv, processor=tmp_path)


@pytest.mark.parametrize(("size", "fits"), [(60, False), (61, True), (6000, True), (6101, False)])
def test_the_size_of_a_vocabulary(size: int, fits: bool) -> None:
    """The tokenizer has 61 tokens; a model with some more rows is usual, one with fewer or very many is another's."""
    m = material()
    model = bert(vocab_size=size)
    if fits:
        assert len(load_examples(model, m.unlabelled_csv, processor=m.bert)) == ROWS
    else:
        with pytest.raises(DataError, match=f"a vocabulary of 61 and the model one of {size}"):
            load_examples(model, m.unlabelled_csv, processor=m.bert)


def test_text_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    known = sentences(1)[0]
    foreign = write_rows(tmp_path / "x.csv", [{"text": "der die das und nicht", "label": 0}] * 30)
    with pytest.raises(
        DataError, match=r"100% of the tokens of the text are unknown to the tokenizer at .*--processor"
    ):
        load_examples(classifier(), foreign, processor=material().bert)
    half = write_rows(tmp_path / "y.csv", [{"text": f"der die das {known}", "label": 0}] * 30)
    assert len(load_examples(classifier(), half, processor=material().bert)) == 30
    (tmp_path / "x.txt").write_text("der die das und nicht auch")
    with pytest.raises(DataError, match="100% of the tokens of the text are unknown"):
        load_examples(ZOO["gpt2"].build(), tmp_path / "x.txt", processor=material().gpt2)


# --- padding ---


def decoder_classifier(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "num_labels": 3}
    config = transformers.GPT2Config(**{**sizes, "eos_token_id": 0, "bos_token_id": 0, **settings})
    return transformers.GPT2ForSequenceClassification(config).eval()


def test_a_decoder_that_classifies_gets_a_padding_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words_only(eos_token="<end>").save_pretrained(tmp_path)
    texts = ["w5 w6 w7", "w8", "w9 w5"]
    data = write_rows(tmp_path / "x.csv", [{"text": text, "label": 0} for text in texts])
    model = decoder_classifier()
    with caplog.at_level(logging.WARNING):
        examples = load_examples(model, data, processor=tmp_path)
    assert "no padding token; '<end>' is used" in caplog.text
    alone = [model(input_ids=row["input_ids"][None]).logits[0] for row in examples.rows]
    (batch,) = examples.batches(3)
    together = model(**batch).logits
    for number, logits in zip(examples.order(), together, strict=True):
        torch.testing.assert_close(logits, alone[number])


def test_padding_is_what_the_model_looks_for(tmp_path: Path) -> None:
    """The tokenizer says 0, the model 4: a text's last token is found by the model's own."""
    words_only(pad_token="<pad>").save_pretrained(tmp_path)
    data = write_rows(tmp_path / "x.csv", [{"text": text, "label": 0} for text in ("w5 w6 w7", "w8")])
    model = decoder_classifier(pad_token_id=4)
    examples = load_examples(model, data, processor=tmp_path)
    alone = [model(input_ids=row["input_ids"][None]).logits[0] for row in examples.rows]
    (batch,) = examples.batches(2)
    torch.testing.assert_close(model(**batch).logits, torch.stack([alone[1], alone[0]]))


def test_no_token_that_could_be_padding(tmp_path: Path) -> None:
    words_only().save_pretrained(tmp_path)
    data = write_rows(tmp_path / "x.csv", [{"text": "w5 w6", "label": 0}])
    with pytest.raises(DataError, match=r"has a padding or an end token, .* set tokenizer.pad_token"):
        load_examples(decoder_classifier(), data, processor=tmp_path)


# --- texts without tokens ---


def test_a_text_of_nothing_is_refused_by_its_row(tmp_path: Path) -> None:
    """A tokenizer without tokens of its own makes nothing of a character that it drops."""
    tokens = words_only(eos_token="<end>")
    tokens._tokenizer.pre_tokenizer = pre_tokenizers.Split("~", "removed")
    tokens.save_pretrained(tmp_path)
    data = write_rows(tmp_path / "x.csv", [{"text": text, "label": 0} for text in ("w5", "~~", "w6")])
    with pytest.raises(DataError, match="row 1 has no tokens"):
        load_examples(decoder_classifier(), data, processor=tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "masked"])
def test_blank_texts_are_left_out_for_language_models(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ZOO["gpt2"].build() if kind == "gpt2" else bert(transformers.BertForMaskedLM)
    (tmp_path / "x.jsonl").write_text('{"text": "w5 w6"}\n{"text": null}\n{"text": " "}\n{"text": "w7 w8"}\n')
    with caplog.at_level(logging.WARNING):
        rows = load_examples(model, tmp_path / "x.jsonl", processor=getattr(material(), kind)).rows
    assert len(rows) == 2
    assert "2 of 4 texts" in caplog.text


# --- only what is drawn is made ---


def test_rows_are_made_once_and_only_when_looked_at() -> None:
    made: list[int] = []

    def make(numbers: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        made.extend(numbers)
        return [{"input_ids": torch.arange(number + 1)} for number in numbers]

    examples = Examples(Rows(make, [4, 0, 9, 2, 7]), {})
    part, rest = examples.split(2, seed=3)
    plain = Examples([{"input_ids": torch.arange(number + 1)} for number in (4, 0, 9, 2, 7)], {})
    expected, others = plain.split(2, seed=3)
    assert made == []
    assert [row["input_ids"].tolist() for row in part.rows] == [row["input_ids"].tolist() for row in expected.rows]
    assert len(made) == 2
    for actual, wanted in zip(rest.batches(2), others.batches(2), strict=True):
        assert torch.equal(actual["input_ids"], wanted["input_ids"])
    examples.batches(3)
    assert sorted(made) == [0, 2, 4, 7, 9]
    assert [len(row["input_ids"]) for row in examples.rows[1:4]] == [1, 10, 3]
    assert len(examples.rows[-1]["input_ids"]) == 8


def test_only_the_texts_that_are_drawn_are_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sentences(500)
    data = write_rows(tmp_path / "x.csv", [{"text": text, "label": n % 3} for n, text in enumerate(texts)])
    seen: list[int] = []
    encode = Encoder.__call__

    def watched(self: Any, *arguments: Any, rows: Sequence[int], **options: Any) -> Any:
        seen.extend(rows)
        return encode(self, *arguments, rows=rows, **options)

    monkeypatch.setattr(Encoder, "__call__", watched)
    examples = load_examples(classifier(), data, processor=material().bert)
    few = examples.sample(4, seed=1)
    few.batches(2)
    assert len(set(seen)) == len(seen) == 4
    # The draw is the one of before: a permutation of all rows by the seed.
    drawn = torch.randperm(500, generator=torch.Generator().manual_seed(1)).tolist()[:4]
    assert sorted(seen) == sorted(drawn)
    assert [int(row["labels"]) for row in few.rows] == [number % 3 for number in sorted(drawn)]


def test_only_the_images_that_are_drawn_are_opened(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "0").mkdir()
    for number in range(20):
        picture = numpy.full((16, 16, 3), number, dtype=numpy.uint8)
        Image.fromarray(picture).save(tmp_path / "0" / f"{number:02}.png")
    examples = load_examples(ZOO["vit"].build(), tmp_path, processor=material().vit)
    drawn = torch.randperm(20, generator=torch.Generator().manual_seed(5)).tolist()[:3]
    for number in set(range(20)) - set(drawn):
        (tmp_path / "0" / f"{number:02}.png").write_bytes(b"not an image")
    few = examples.sample(3, seed=5).rows
    assert [round(float(row["pixel_values"].mean() * 0.5 + 0.5) * 255) for row in few] == sorted(drawn)
    with pytest.raises(DataError, match=r"\.png is not an image that can be read"):
        examples.batches(4)


def test_hidden_tokens_of_a_row_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    model, m = bert(transformers.BertForMaskedLM), material()
    texts = sentences(30)
    whole = write_rows(tmp_path / "x.csv", [{"text": text} for text in texts])
    changed = write_rows(tmp_path / "y.csv", [{"text": text if n == 7 else "w5 w6 w7"} for n, text in enumerate(texts)])
    one, other = (load_examples(model, data, processor=m.masked, seed=2).rows for data in (whole, changed))
    assert torch.equal(one[7]["input_ids"], other[7]["input_ids"])
    assert torch.equal(one[7]["labels"], other[7]["labels"])
    same = write_rows(tmp_path / "z.csv", [{"text": " ".join(["w5"] * 30)}] * 9)
    masks = {tuple((row["labels"] != IGNORED).tolist()) for row in load_examples(model, same, processor=m.masked).rows}
    assert len(masks) > 5  # equal texts are hidden differently
