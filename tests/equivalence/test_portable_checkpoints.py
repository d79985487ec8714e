"""Checkpoints where plain transformers has nothing but their files: every Auto class, and what is said without trust.

One process without headprune does it all; importing transformers takes longer than the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import checkpoint_process
import headprune
from headprune.checkpoint import portable_checkpoint
from headprune.data.tokenizers import load_tokenizer
from helpers import identical, kept_heads, outputs, pruned, word_tokenizer
from zoo import ZOO

# name in the zoo -> Auto class -> part of the saved model that the class has
CLASSES = {
    "bert": {
        "AutoModelForSequenceClassification": "",
        "AutoModel": "bert",
        "AutoModelForMaskedLM": "bert",
        "AutoModelForTokenClassification": "bert",
    },
    "llama-gqa": {"AutoModelForCausalLM": "", "AutoModel": "model", "AutoModelForSequenceClassification": "model"},
    "t5": {"AutoModelForSeq2SeqLM": "", "AutoModelForTextEncoding": "encoder"},
    "gpt2": {"AutoModelForCausalLM": "", "AutoModelForTokenClassification": "transformer"},
    "bart": {"AutoModelForSeq2SeqLM": "", "AutoModel": "model"},
}
PROGRAM = """
import json, warnings
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file, save_file

folder, said = Path(sys.argv[1]), {}
for name, classes in json.loads(sys.argv[2]).items():
    path, said[name] = folder / name, {}
    for auto in classes:
        kind = getattr(transformers, auto)
        model, found = kind.from_pretrained(path, trust_remote_code=True, output_loading_info=True)
        said[name][auto] = {key: sorted(map(str, value)) for key, value in found.items()}
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        save_file(weights, folder / f"{name}-{auto}.safetensors")
        model.save_pretrained(folder / f"{name}-{auto}")
        again = kind.from_pretrained(folder / f"{name}-{auto}", trust_remote_code=True).state_dict()
        said[name][auto]["kept"] = all(torch.equal(weights[key], again[key]) for key in weights)
    for auto in sorted(json.loads((path / "config.json").read_text())["auto_map"]):
        for options in ({}, {"ignore_mismatched_sizes": True}, {"trust_remote_code": False}):
            try:
                getattr(transformers, auto).from_pretrained(path, **options)
            except ValueError as error:
                said[name].setdefault("refused", []).append(str(error))
    plain = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    for options in ({}, {"ignore_mismatched_sizes": True}):
        try:
            plain.from_pretrained(path, **options)
        except Exception as error:
            said[name].setdefault("plain", []).append(str(error))
try:
    transformers.pipeline("text-classification", model=str(folder / "bert"))
except ValueError as error:
    said["pipeline"] = str(error)
print("\\n" + json.dumps(said))
"""


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("portable")
    models = {name: pruned(ZOO[name], "first-site-gone")[0] for name in CLASSES}
    for name, model in models.items():
        headprune.save(model, folder / name)
    said = checkpoint_process.without_headprune(PROGRAM, folder, json.dumps({n: list(c) for n, c in CLASSES.items()}))
    return folder, models, json.loads(said.splitlines()[-1])


@pytest.mark.parametrize(("name", "auto"), [(name, auto) for name, classes in CLASSES.items() for auto in classes])
def test_every_auto_class_loads_the_pruned_weights(name: str, auto: str, actual: Any) -> None:
    """All that a class shares with the one that was saved; only its head is new, as with plain classes."""
    folder, models, said = actual
    part = CLASSES[name][auto]
    saved = models[name].get_submodule(part).state_dict()
    loaded = load_file(folder / f"{name}-{auto}.safetensors")
    prefix = "" if part and f"{part}.{next(iter(saved))}" not in loaded else f"{part}." if part else ""
    shared = {key: value for key, value in saved.items() if prefix + key in loaded}
    assert all(torch.equal(value, loaded[prefix + key]) for key, value in shared.items())
    about = said[name][auto]
    assert about["mismatched_keys"] == []
    # What is missing was never in the checkpoint, and what is not there belongs to a head that left.
    assert not [key for key in about["missing_keys"] if key.removeprefix(prefix) in saved]
    attention = [key for key in saved if "attention" in key.lower() or "attn" in key or "layer.0" in key]
    assert set(attention) <= set(shared)
    assert about["kept"]  # saved by transformers, and loaded again


@pytest.mark.parametrize("name", CLASSES)
def test_without_trust_transformers_says_what_to_do(name: str, actual: Any) -> None:
    folder, _, said = actual
    autos = json.loads((folder / name / "config.json").read_text())["auto_map"]
    assert len(said[name]["refused"]) == 3 * len(autos)
    for sentence in (*said[name]["refused"], said["pipeline"]):
        assert "contains custom code which must be executed" in sentence
        assert "trust_remote_code=True" in sentence


@pytest.mark.parametrize("name", CLASSES)
def test_a_plain_class_that_is_asked_for_by_name_says_who_pruned_it(name: str, actual: Any) -> None:
    sentences = actual[2][name]["plain"]
    assert len(sentences) == 2
    assert all(portable_checkpoint.REFUSAL in sentence for sentence in sentences)


@pytest.mark.parametrize("name", CLASSES)
def test_every_auto_class_that_serves_the_config_is_mapped(name: str, actual: Any) -> None:
    folder, models, _ = actual
    auto_map = json.loads((folder / name / "config.json").read_text())["auto_map"]
    config = type(models[name].config)
    served = {
        auto
        for auto in dir(transformers)
        if auto.startswith("AutoModel")
        and config in (getattr(getattr(transformers, auto), "_model_mapping", None) or ())
    }
    assert set(auto_map) == {"AutoConfig", *served}


@pytest.mark.parametrize("name", CLASSES)
def test_what_transformers_saved_again_headprune_loads(name: str, actual: Any) -> None:
    folder, models, _ = actual
    auto = next(auto for auto, part in CLASSES[name].items() if not part)
    loaded, batch = headprune.load(folder / f"{name}-{auto}"), ZOO[name].batch(0)
    assert type(loaded) is type(models[name])
    assert kept_heads(loaded) == kept_heads(models[name])
    assert identical(outputs(loaded, batch), outputs(models[name], batch))


def test_a_model_loaded_by_its_own_code_is_pruned_further_and_saved(tmp_path: Path) -> None:
    """In one process: the class is that of the checkpoint's code, and what it writes is that of the plain class."""
    model, batch = pruned(ZOO["bert"])[0], ZOO["bert"].batch(0)
    headprune.save(model, tmp_path / "first")
    auto = transformers.AutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path / "first", trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules.")
    assert loaded.config.model_type == "bert"
    for one in (model, loaded):
        headprune.remove(one, headprune.resolve(one)[0].units()[0])
    assert identical(outputs(loaded, batch), outputs(model, batch))
    headprune.save(loaded, tmp_path / "second")
    headprune.save(model, tmp_path / "expected")
    texts = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("second", "expected")]
    assert texts[0] == texts[1]
    assert identical(outputs(headprune.load(tmp_path / "second"), batch), outputs(model, batch))
    again = auto.from_pretrained(tmp_path / "second", trust_remote_code=True)
    assert identical(outputs(again.eval(), batch), outputs(model, batch))
    headprune.save(loaded, tmp_path / "second", portable=False)
    assert not (tmp_path / "second" / "modeling_headprune.py").exists()
    settings = json.loads((tmp_path / "second" / "config.json").read_text())
    assert "auto_map" not in settings
    assert settings["model_type"] == "bert"
    assert settings["hidden_act"] == model.config.hidden_act == "gelu"


def test_loading_with_headprune_runs_no_code(tmp_path: Path) -> None:
    headprune.save(pruned(ZOO["bert"])[0], tmp_path / "model")
    code = tmp_path / "model" / "modeling_headprune.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    headprune.load(tmp_path / "model")
    headprune.load(tmp_path / "model", trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


def test_a_class_of_ones_own_is_saved_without_code(tmp_path: Path) -> None:
    """Nobody else could import it; headprune loads it when the class is given."""

    class Mine(transformers.BertForSequenceClassification):
        pass

    model = Mine(ZOO["bert"].build().config).eval()
    headprune.remove(model, [(0, 0)])
    headprune.save(model, tmp_path / "model")
    assert not (tmp_path / "model" / "modeling_headprune.py").exists()
    batch = ZOO["bert"].batch(0)
    loaded = headprune.load(tmp_path / "model", model_class=Mine)
    assert identical(outputs(loaded, batch), outputs(model, batch))


def test_a_tokenizer_loads_without_trust(tmp_path: Path) -> None:
    """By headprune's own data room, which must not ask; the words of a user's own process are transformers'."""
    headprune.save(pruned(ZOO["bert"])[0], tmp_path / "model", processor=word_tokenizer())
    assert load_tokenizer(tmp_path / "model")("go heads")["input_ids"] == [4, 2]
