"""Which tokens are kept, which ids configs hold, what is refused and left alone, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import headprune
from headprune.checkpoint.processors import KEPT_TOKENS, _write_kept_tokens
from headprune.data.columns import Columns
from headprune.data.vocabulary_texts import refuse_changed_tokens, texts_of, tokens_in
from headprune.errors import CheckpointError, DataError, VocabularyError
from headprune.vocabulary.config_ids import renumber, special_ids
from headprune.vocabulary.shrink import Shrunk
from headprune.vocabulary.tokenizer_json import backend_of, encode, renumber_tokens, state_of
from helpers import assert_unchanged, contents, outputs
from helpers import state_of as everything
from vocabularies import CASES, SIZES, Case, built, gpt2_tokenizer, some_lines, xlm_roberta_tokenizer
from zoo import ZOO

BY_NAME = {case.name: case for case in CASES}
KINDS = ("xlm-roberta", "t5", "albert", "bert-tied", "roberta", "llama-untied")


def fast(model: Any, **special: str) -> Any:
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def tiny(tokenizer: Any, **settings: Any) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    options = {**sizes, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **settings}
    return built(tf.BertModel, tf.BertConfig(**options))


def shrunk(tokenizer: Any, texts: list[str]) -> Any:
    smaller, _ = headprune.shrink_vocabulary(tiny(tokenizer), tokenizer, texts)
    return smaller


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", KINDS)
def test_any_texts_are_cut_as_before(name: str, seed: int) -> None:
    tokenizer = BY_NAME[name].tokenizer()
    texts = [*some_lines(seed, 1 + 9 * seed), "unbekannt ☃", "a  b\tc\n"]
    smaller = shrunk(tokenizer, texts)
    assert [smaller.tokenize(text) for text in texts] == [tokenizer.tokenize(text) for text in texts]


def test_a_merged_word_keeps_what_it_is_merged_from_and_no_more() -> None:
    vocab = {token: n for n, token in enumerate(["[PAD]", *"abcdx", "ab", "cd", "abcd", "bc", "xx", "abx"])}
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("b", "c"), ("x", "x"), ("ab", "x")]
    tokenizer = fast(models.BPE(vocab, merges), pad_token="[PAD]")
    smaller = shrunk(tokenizer, ["abcd"])
    assert smaller.tokenize("abcd") == ["abcd"]
    assert set(smaller.get_vocab()) == {"[PAD]", *"abcd", "ab", "cd", "abcd"}
    assert json.loads(smaller.backend_tokenizer.to_str())["model"]["merges"] == [["a", "b"], ["c", "d"], ["ab", "cd"]]


def test_a_word_that_is_unknown_stays_unknown() -> None:
    """WordPiece takes the longest piece first: without 'abc', 'abcd' would be known as 'ab' and '##cd'."""
    tokens = ["[PAD]", "[UNK]", "ab", "abc", "x", "##cd", "##x"]
    tokenizer = fast(
        models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"),
        unk_token="[UNK]",
        pad_token="[PAD]",
    )
    assert tokenizer.tokenize("abcd ab xcd") == ["[UNK]", "ab", "x", "##cd"]
    smaller = shrunk(tokenizer, ["abcd ab xcd"])
    assert smaller.tokenize("abcd ab xcd") == ["[UNK]", "ab", "x", "##cd"]
    assert "abc" in smaller.get_vocab()
    assert "abc" not in shrunk(tokenizer, ["ab xcd"]).get_vocab()


def test_what_is_unknown_costs_a_unigram_as_much_as_before() -> None:
    """The worst piece of all decides about the score of unknown letters, and so about other paths."""
    pieces = [("<unk>", 0.0), ("<pad>", 0.0), ("ab", -30.0), ("cd", -30.0), ("ef", -30.0), ("gh", -30.0)]
    pieces += [("bcdefgh", -1.0), ("zz", -200.0), ("yy", -50.0)]
    tokenizer = fast(models.Unigram(pieces, unk_id=0), unk_token="<unk>", pad_token="<pad>")
    texts = ["abcdefgh", "bcdefgh"]
    assert tokenizer.tokenize(texts[0]) == ["ab", "cd", "ef", "gh"]
    smaller = shrunk(tokenizer, texts)
    assert [smaller.tokenize(text) for text in texts] == [["ab", "cd", "ef", "gh"], ["bcdefgh"]]
    assert "zz" in smaller.get_vocab()
    assert "yy" not in smaller.get_vocab()


def test_words_of_the_same_letters_can_be_spelled() -> None:
    tokenizer = xlm_roberta_tokenizer()
    smaller = shrunk(tokenizer, ["the heads that stay"])
    assert smaller.unk_token not in smaller.tokenize("shade")
    assert smaller.tokenize("xylophone") != tokenizer.tokenize("xylophone")


def test_added_tokens_stay_where_they_are_special_or_used() -> None:
    tokenizer = gpt2_tokenizer()
    tokenizer.add_tokens(["<think>", "<never>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>"]})
    smaller = shrunk(tokenizer, ["one <think> two"])
    assert smaller.tokenize("one <think> two") == tokenizer.tokenize("one <think> two")
    assert {"<think>", "<tool>"} <= smaller.get_vocab().keys()
    assert "<never>" not in smaller.get_vocab()
    assert sorted(smaller.get_vocab().values()) == list(range(len(smaller)))


def test_ids_outside_of_the_vocabulary_follow() -> None:
    """The settings of padding, and what is put around a text and a pair of texts."""
    tokenizer = BY_NAME["bert-tied"].tokenizer()
    tokenizer.backend_tokenizer.enable_padding(pad_id=tokenizer.mask_token_id, pad_token="[MASK]")
    state = state_of(tokenizer)
    ids = sorted(set(tokenizer("a model", "of heads")["input_ids"]) | {tokenizer.unk_token_id, tokenizer.mask_token_id})
    new = {old: place for place, old in enumerate(ids)}
    small = backend_of(renumber_tokens(state, new))
    expected = [new[token] for token in backend_of(state).encode("a model", "of heads").ids]
    assert small.encode("a model", "of heads").ids == expected
    assert renumber_tokens(state, new)["padding"]["pad_id"] == new[tokenizer.mask_token_id]
    assert list(encode(small, ["a model"])) == [[new[token] for token in next(encode(backend_of(state), ["a model"]))]]


def test_truncation_does_not_hide_tokens() -> None:
    tokenizer = BY_NAME["bert-tied"].tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    text = some_lines()[0]
    smaller = shrunk(tokenizer, [text])
    assert smaller.backend_tokenizer.truncation["max_length"] == 3
    tokenizer.backend_tokenizer.no_truncation()
    smaller.backend_tokenizer.no_truncation()
    assert smaller.tokenize(text) == tokenizer.tokenize(text)


# --- ids in configs --------------------------------------------------------------------------------------------------


KEPT_IDS = {0: 0, 5: 1, 7: 2, 9: 3}  # of ten tokens
# Every field of a generation config that holds token ids, of GenerationConfig or of single models: before and after.
GENERATION_IDS: dict[str, tuple[Any, Any]] = {
    "pad_token_id": (0, 0),
    "bos_token_id": (5, 1),
    "eos_token_id": ([9, 5], [3, 1]),
    "decoder_start_token_id": ([7, 5], [2, 1]),
    "forced_bos_token_id": (7, 2),
    "forced_eos_token_id": ([9], [3]),
    "suppress_tokens": ([5, 6, -1], [1, -1]),
    "begin_suppress_tokens": ([6], []),
    "bad_words_ids": ([[5, 9], [5, 6]], [[1, 3]]),
    "force_words_ids": ([[5, 7], [[9], [0, 5]]], [[1, 2], [[3], [0, 1]]]),
    "sequence_bias": ({(7,): -2.5, (9, 5): 1.5, (6, 9): 4.0}, {(2,): -2.5, (3, 1): 1.5}),
    "forced_decoder_ids": ([[1, 9], [2, None]], [[1, 3], [2, None]]),
    "no_timestamps_token_id": (9, 3),
    "prev_sot_token_id": (7, 2),
    "lang_to_id": ({"<|de|>": 7}, {"<|de|>": 2}),
    "task_to_id": ({"transcribe": 9}, {"transcribe": 3}),
    "text_decoder_lang_to_code_id": ({"deu": 5}, {"deu": 1}),
}
COUNTS = {  # fields of GenerationConfig with such names that hold no ids
    *("max_new_tokens", "min_new_tokens", "num_assistant_tokens", "prompt_lookup_num_tokens"),
    *("num_assistant_tokens_schedule", "token_healing"),
}


def test_ids_of_generation_follow() -> None:
    config = tf.GenerationConfig(max_length=9, **{name: before for name, (before, _) in GENERATION_IDS.items()})
    assert special_ids(config) == set(KEPT_IDS)
    renumber(config, KEPT_IDS, rows=10, count=4)
    assert {name: getattr(config, name) for name in GENERATION_IDS} == {
        name: after for name, (_, after) in GENERATION_IDS.items()
    }
    assert config.max_length == 9


def test_every_field_of_generation_configs_is_known() -> None:
    """A field that a later transformers adds must be added to one of the two tables here."""
    words = ("token", "ids", "words", "bias", "suppress")
    fields = {name for name in vars(tf.GenerationConfig()) if any(word in name for word in words)}
    assert {name for name in fields if not name.startswith("_")} <= {*GENERATION_IDS, *COUNTS}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([[[7], -2.5], [[6, 9], 4.0]], [[[2], -2.5]]),
        ({"(9, 5)": 1.5}, {(3, 1): 1.5}),  # as a generation_config.json has it
        ({(6,): 4.0}, None),
    ],
)
def test_all_forms_of_sequence_bias_follow(before: Any, after: Any) -> None:
    config = tf.GenerationConfig(sequence_bias=before)
    renumber(config, KEPT_IDS, rows=10, count=4)
    assert config.sequence_bias == after


def test_generation_is_biased_towards_the_same_tokens_as_before() -> None:
    case = BY_NAME["llama-untied"]
    tokenizer = case.tokenizer()
    model = case.model(tokenizer)
    texts = some_lines()
    ids = tokenizer(texts[0], return_tensors="pt")["input_ids"][:, :6]
    wanted = int(tokenizer(texts[1])["input_ids"][-1])
    model.generation_config.sequence_bias = {(wanted,): 1e4}
    options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    # How many tokens a text has depends on how the tokenizer was trained.
    assert model.generate(ids, **options)[0, ids.shape[1] :].tolist() == [wanted] * 4
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    new_ids = smaller(texts[0], return_tensors="pt")["input_ids"][:, :6]
    assert model.generate(new_ids, **options)[0, ids.shape[1] :].tolist() == [kept.index(wanted)] * 4
    assert kept.index(wanted) != wanted


def test_every_config_of_a_model_follows() -> None:
    """T5 gives copies of its config to its stacks."""
    case = BY_NAME["t5"]
    tokenizer = case.tokenizer()
    model = case.model(tokenizer)
    _, kept = headprune.shrink_vocabulary(model, tokenizer, some_lines())
    assert {model.config.vocab_size, model.encoder.config.vocab_size, model.decoder.config.vocab_size} == {len(kept)}
    assert model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id == 0


def test_a_token_that_moves_is_followed_by_the_model() -> None:
    """The last token is the padding: everything that knew its number knows the new one."""
    tokenizer = gpt2_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<fill>"})
    config = tf.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=len(tokenizer),
        pad_token_id=len(tokenizer) - 1, eos_token_id=2, num_labels=3,
    )  # fmt: skip
    model = built(tf.LlamaForSequenceClassification, config)
    texts = ["one text", "another text that is longer"]
    before = outputs(model, tokenizer(texts, padding=True, return_tensors="pt"))
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    last = len(kept) - 1
    assert (smaller.pad_token_id, model.config.pad_token_id) == (last, last)
    assert (model.model.padding_idx, model.model.embed_tokens.padding_idx) == (last, last)
    after = outputs(model, smaller(texts, padding=True, return_tensors="pt"))
    assert torch.equal(before["logits"], after["logits"])


def test_a_row_that_the_config_names_stays_without_a_token() -> None:
    tokenizer = gpt2_tokenizer()
    size = len(tokenizer) + 5
    config = tf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=size, eos_token_id=2, bos_token_id=size - 2)
    model = built(tf.GPT2Model, config)
    row = model.wte.weight[size - 2].clone()
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, ["a text"])
    assert (kept[-1], model.config.bos_token_id) == (size - 2, len(smaller))
    assert torch.equal(model.wte.weight[len(smaller)], row)


# --- what is refused -------------------------------------------------------------------------------------------------


class KnowsANumber(tf.BertModel):
    number = BY_NAME["bert-tied"].tokenizer().convert_tokens_to_ids("heads")

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        result = super().forward(input_ids, **options)
        result.last_hidden_state = result.last_hidden_state + (input_ids == self.number).sum()
        return result


class HalfTheRows(tf.BertModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.half = nn.Linear(2, config.vocab_size // 2)


def bert_of(kind: Any) -> tuple[Any, Any]:
    tokenizer = BY_NAME["bert-tied"].tokenizer()
    config = tf.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=len(tokenizer)
    )
    return built(kind, config), tokenizer


@pytest.mark.parametrize(
    ("kind", "said"), [(KnowsANumber, "gives other outputs"), (HalfTheRows, "half.weight that depends on the vocab")]
)
def test_a_model_that_is_not_understood_is_left_as_it_is(kind: Any, said: str) -> None:
    model, tokenizer = bert_of(kind)
    assert tokenizer.tokenize("heads") == ["heads"]
    before = everything(model)
    with pytest.raises(VocabularyError, match=said):
        headprune.shrink_vocabulary(model, tokenizer, ["some heads", "a model"])
    assert_unchanged(model, before)
    assert len(tokenizer) == model.config.vocab_size


def test_positions_that_count_from_the_padding_are_noticed() -> None:
    """RoBERTa numbers its positions from the id of the padding, which must not move then."""
    tokenizer = gpt2_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<fill>"})
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    last = len(tokenizer) - 1
    model = built(
        tf.RobertaModel,
        tf.RobertaConfig(**sizes, vocab_size=last + 1, pad_token_id=last, max_position_embeddings=last + 80),
    )
    before = everything(model)
    with pytest.raises(VocabularyError, match="gives other outputs"):
        headprune.shrink_vocabulary(model, tokenizer, ["a text"])
    assert_unchanged(model, before)


def test_models_and_tokenizers_without_a_vocabulary_are_refused() -> None:
    tokenizer = gpt2_tokenizer()
    with pytest.raises(VocabularyError, match="no table of token embeddings"):
        headprune.shrink_vocabulary(ZOO["vit"].build(), tokenizer, ["a text"])
    with pytest.raises(VocabularyError, match="not a fast tokenizer"):
        headprune.shrink_vocabulary(tiny(tokenizer), tf.ByT5Tokenizer(), ["a text"])
    with pytest.raises(VocabularyError, match="not a transformers model"):
        headprune.shrink_vocabulary(nn.Linear(2, 2), tokenizer, ["a text"])  # type: ignore[arg-type]
    with pytest.raises(VocabularyError, match="only 300; give the tokenizer of the model"):
        headprune.shrink_vocabulary(tiny(tokenizer, vocab_size=300), tokenizer, some_lines())
    model = tiny(tokenizer)
    model.config.vocab_size += 1
    with pytest.raises(VocabularyError, match="resize one of them"):
        headprune.shrink_vocabulary(model, tokenizer, ["a text"])


def test_a_model_that_needs_more_than_text_is_refused() -> None:
    tokenizer = gpt2_tokenizer()
    layers = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in SIZES.items()}
    named = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 0}
    config = tf.WhisperConfig(d_model=16, vocab_size=len(tokenizer), max_source_positions=10, **layers, **named)
    model = built(tf.WhisperForConditionalGeneration, config)
    before = everything(model)
    with pytest.raises(VocabularyError, match="does not run on text alone"):
        headprune.shrink_vocabulary(model, tokenizer, ["a text"])
    assert_unchanged(model, before)


@pytest.mark.parametrize("texts", [[], "one text", [1, 2]])
def test_texts_must_be_texts(texts: Any) -> None:
    tokenizer = gpt2_tokenizer()
    with pytest.raises(VocabularyError, match="at least one string"):
        headprune.shrink_vocabulary(tiny(tokenizer), tokenizer, texts)


# --- saving ----------------------------------------------------------------------------------------------------------


def bert(case: Case = BY_NAME["bert-tied"]) -> tuple[Any, Any]:
    tokenizer = case.tokenizer()
    return case.model(tokenizer), tokenizer


def test_twice_is_as_good_as_once(tmp_path: Path) -> None:
    """Ids beside the model are those of the first vocabulary, whether it was saved in between or not."""
    many, few = some_lines(count=12), some_lines(count=12)[:3]
    model, tokenizer = bert()
    once, kept = headprune.shrink_vocabulary(model, tokenizer, few)
    headprune.save(model, tmp_path / "once")
    direct, again = bert()[0], bert()[0]
    middle, _ = headprune.shrink_vocabulary(direct, tokenizer, many)
    headprune.save(direct, tmp_path / "middle")
    headprune.shrink_vocabulary(direct, middle, few)
    headprune.save(direct, tmp_path / "direct")
    again = headprune.load(tmp_path / "middle")
    headprune.shrink_vocabulary(again, tf.AutoTokenizer.from_pretrained(tmp_path / "middle"), few)
    headprune.save(again, tmp_path / "loaded")
    for name in ("direct", "loaded"):
        assert json.loads((tmp_path / name / "kept_tokens.json").read_text()) == kept
        record = json.loads((tmp_path / name / "config.json").read_text())["headprune_vocabulary"]
        assert record == {"before": len(tokenizer), "after": len(kept)}
        assert tf.AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == once.get_vocab()


def test_a_loaded_one_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = bert()
    headprune.shrink_vocabulary(model, tokenizer, some_lines())
    headprune.save(model, tmp_path / "one")
    headprune.save(headprune.load(tmp_path / "one"), tmp_path / "two")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert {name: one[name] for name in one if "token" in name} == {name: two[name] for name in two if "token" in name}
    assert {"tokenizer.json", "tokenizer_config.json", "kept_tokens.json"} <= two.keys()


def test_files_of_the_full_vocabulary_do_not_stay_beside_the_smaller_one(tmp_path: Path) -> None:
    model, tokenizer = bert()
    headprune.save(model, tmp_path / "source", processor=tokenizer)
    (tmp_path / "source" / "vocab.txt").write_text("\n".join(tokenizer.get_vocab()))
    headprune.save(headprune.load(tmp_path / "source"), tmp_path / "model")
    assert (tmp_path / "model" / "vocab.txt").exists()
    (tmp_path / "model" / "notes.md").write_text("mine")
    model = headprune.load(tmp_path / "model")
    smaller, _ = headprune.shrink_vocabulary(model, tokenizer, some_lines())
    headprune.save(model, tmp_path / "model")
    assert not (tmp_path / "model" / "vocab.txt").exists()
    assert (tmp_path / "model" / "notes.md").read_text() == "mine"
    assert len(tf.AutoTokenizer.from_pretrained(tmp_path / "model")) == len(smaller)


def test_the_full_tokenizer_is_not_saved_with_the_smaller_model(tmp_path: Path) -> None:
    model, tokenizer = bert()
    smaller, _ = headprune.shrink_vocabulary(model, tokenizer, some_lines())
    with pytest.raises(CheckpointError, match="900 tokens and the model"):
        headprune.save(model, tmp_path / "model", processor=tokenizer)
    assert not (tmp_path / "model").exists()
    headprune.save(model, tmp_path / "model", processor=smaller)


# --- texts in data ---------------------------------------------------------------------------------------------------


def test_texts_of_files(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(name="sequence-classification")
    (tmp_path / "a.txt").write_text("one two\nthree\n\n")
    assert texts_of(tmp_path / "a.txt", columns=Columns(), task=task) == ["one two\nthree\n\n", "one two", "three"]
    rows = [{"sentence": "a b", "other": "c", "label": "no", "id": "x1"}, {"sentence": None, "other": "d"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = Columns(text="missing here", pair="other")
    assert texts_of(tmp_path / "b.jsonl", columns=asked, task=task) == ["a b", "c", "d"]
    words = [{"tokens": ["Ein", "Wort"], "tags": ["A", "B"]}]
    (tmp_path / "c.json").write_text(json.dumps(words))
    tagging: Any = SimpleNamespace(name="token-classification")
    assert texts_of(tmp_path / "c.json", columns=Columns(), task=tagging) == ["Ein", "Wort", " Ein Wort"]
    (tmp_path / "d.csv").write_text("text,summary\nlong,short\n")
    summing: Any = SimpleNamespace(name="seq2seq-lm")
    assert texts_of(tmp_path / "d.csv", columns=Columns(), task=summing) == ["long", "short"]
    (tmp_path / "e.txt").write_text(" \n")
    with pytest.raises(DataError, match="has no text"):
        texts_of(tmp_path / "e.txt", columns=Columns(), task=task)


def test_data_that_would_change_is_refused() -> None:
    task: Any = SimpleNamespace(name="masked-lm")
    before: Any = SimpleNamespace(rows=[{"input_ids": torch.tensor([2, 9]), "labels": torch.tensor([-100, 7])}])
    after: Any = SimpleNamespace(rows=[{"input_ids": torch.tensor([0, 2]), "labels": torch.tensor([-100, 1])}])
    assert tokens_in(before, task) == {2, 9, 7}
    refuse_changed_tokens("data.csv", before, after, task, [2, 7, 9])
    with pytest.raises(DataError, match=r"Row 0 of data\.csv is split into other tokens"):
        refuse_changed_tokens("data.csv", before, after, task, [2, 8, 9])


def test_damaged_ids_of_an_earlier_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shrunk = Shrunk(None, [2, 0], 3, 0)
    (tmp_path / KEPT_TOKENS).write_text("[5, 6, 7]")
    _write_kept_tokens(shrunk, tmp_path, tmp_path / "new")
    assert json.loads((tmp_path / "new" / KEPT_TOKENS).read_text()) == [7, 5]
    for damaged in ("[5, 6", '[5, "6", 7]', "{}", "[" * 100_000):
        (tmp_path / KEPT_TOKENS).write_text(damaged)
        with pytest.raises(CheckpointError, match=r"kept_tokens\.json is damaged .*; copy it again"):
            _write_kept_tokens(shrunk, tmp_path, tmp_path / "new")
