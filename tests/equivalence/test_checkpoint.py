"""Save and load, for every family: bit for bit, in a fresh process, in several rounds, and with plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import checkpoint_process
import headprune
from headprune.surgery.remove_units import remove_units
from helpers import SAME_CODE, all_units, families, flat, identical, kept_heads, outputs, pruned, telling_variant
from neuron_helpers import with_heads
from zoo import ZOO, Entry

# Families whose plain config can say that every layer has fewer heads, and the class that plain transformers loads.
CAUSAL, IMAGES = transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification
NATIVE = {
    **dict.fromkeys(
        ("llama", "llama-gqa", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "granite", "all-attention"), CAUSAL
    ),
    **dict.fromkeys(("vit", "dinov2"), IMAGES),
}


@pytest.mark.slow
def test_every_family_loads_bit_for_bit_in_a_fresh_process(tmp_path: Path) -> None:
    """Portable checkpoints, where headprune cannot be imported, and all others through headprune: the same outputs, the
    same parameters, and nothing that the weights did not fill. Where neurons have gone, too."""
    names = {"plain": sorted(ZOO), "portable": sorted(name for name in ZOO if name not in SAME_CODE)}
    for kind, some in names.items():
        for name in some:
            case = tmp_path / kind / name
            checkpoint_process.write_case(case, ZOO[name], telling_variant(ZOO[name]), portable=kind == "portable")
            if name not in SAME_CODE:
                model = ZOO[name].build()
                remove_units(model, with_heads(model))
                case = case.with_name(f"{name}-neurons")
                checkpoint_process.write_model(case, model, ZOO[name].batch(4), portable=kind == "portable")
    report = checkpoint_process.load_all(tmp_path)
    for kind, some in names.items():
        assert list(report[kind]) == sorted([*some, *(f"{name}-neurons" for name in some if name not in SAME_CODE)])
        assert {name: problems for name, problems in report[kind].items() if problems} == {}


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_headprune_reads_a_portable_checkpoint_as_it_reads_any_other(entry: Entry, tmp_path: Path) -> None:
    expected = pruned(entry, telling_variant(entry))[0]
    headprune.save(expected, tmp_path / "model", portable=True)
    model = headprune.load(tmp_path / "model")
    assert kept_heads(model) == kept_heads(expected)
    assert identical(outputs(model, entry.batch(0)), outputs(expected, entry.batch(0)))
    assert not hasattr(model.config, "auto_map")


@pytest.mark.parametrize("entry", families())
def test_two_rounds_of_pruning_and_saving_keep_original_ids(entry: Entry, tmp_path: Path) -> None:
    model, batch, path = entry.build(), entry.batch(5), tmp_path / "model"
    units = all_units(headprune.resolve(model))
    gone: list[tuple[int, int]] = []
    for unit in (units[0], units[-1]):
        headprune.remove(model, unit)
        gone += flat([unit])
        headprune.save(model, path)
        loaded = headprune.load(path)
        assert identical(outputs(model, batch), outputs(loaded, batch))
        assert type(loaded) is type(model)
        assert kept_heads(loaded) == [
            tuple(head for head in range(entry.heads) if (site, head) not in gone) for site in range(entry.sites)
        ]
        settings = json.loads((path / "config.json").read_text())
        record = {(int(site), head) for site, ids in settings["pruned_heads"].items() for head in ids}
        assert record == set(gone)
        assert settings["model_type"].removeprefix("headprune-") == model.config.model_type == loaded.config.model_type
        assert settings["architectures"] == [type(model).__name__]
        model = loaded


def uniformly_pruned(entry: Entry) -> Any:
    """The same number of heads from every site, but other ones each time."""
    model = entry.build()
    sites = headprune.resolve(model)
    headprune.remove(model, flat(site.units()[site.index % len(site.units())] for site in sites))
    return model


@pytest.mark.parametrize("entry", families(without=["llama-mqa"]))  # MQA has one unit per site: nothing would be left
def test_uniform_models_of_the_right_families_load_with_plain_transformers(entry: Entry, tmp_path: Path) -> None:
    model, batch = uniformly_pruned(entry), entry.batch(6)
    expected = outputs(model, batch)
    headprune.save(model, tmp_path / "model")
    assert identical(expected, outputs(headprune.load(tmp_path / "model"), batch))
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert ("auto_map" not in settings or entry.name == "all-attention") == (entry.name in NATIVE)
    if entry.name not in NATIVE:
        return
    plain, actual = NATIVE[entry.name].from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(actual[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(plain) is type(model)
    assert identical(expected, outputs(plain, batch))
    assert kept_heads(plain) == kept_heads(model)

    # Pruned further, unevenly: ids go on from the original ones, and the config is the dense one again.
    headprune.remove(plain, headprune.resolve(plain)[0].units()[0])
    headprune.save(plain, tmp_path / "again")
    again = headprune.load(tmp_path / "again")
    assert identical(outputs(plain, batch), outputs(again, batch))
    assert kept_heads(again) == kept_heads(plain)
    settings = json.loads((tmp_path / "again" / "config.json").read_text())
    assert settings["num_attention_heads"] == entry.heads
    assert settings["auto_map"]["AutoConfig"].startswith("modeling_headprune.")

    # Saved by transformers itself after headprune wrote the native config.
    native = NATIVE[entry.name].from_pretrained(tmp_path / "model")
    native.save_pretrained(tmp_path / "plain")
    assert identical(expected, outputs(headprune.load(tmp_path / "plain"), batch))


def test_a_model_that_was_never_pruned_is_saved_as_it_is(tmp_path: Path) -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(0)
    headprune.save(model, tmp_path / "model")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    for loaded in (plain, headprune.load(tmp_path / "model")):
        assert identical(outputs(model, batch), outputs(loaded, batch))
    assert not json.loads((tmp_path / "model" / "config.json").read_text()).get("pruned_heads")


def test_options_go_to_transformers(tmp_path: Path) -> None:
    model, _ = pruned(ZOO["llama-gqa"])
    headprune.save(model, tmp_path / "model")
    loaded = headprune.load(tmp_path / "model", dtype=torch.bfloat16, attn_implementation="eager")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config._attn_implementation == "eager"
    assert not loaded.training


def test_a_checkpoint_serves_another_class_of_its_family(tmp_path: Path) -> None:
    model, batch = pruned(ZOO["bert"])[0], ZOO["bert"].batch(1)
    headprune.save(model, tmp_path / "model")
    body = headprune.load(tmp_path / "model", model_class=transformers.BertModel)
    assert type(body) is transformers.BertModel
    with torch.no_grad():
        assert torch.equal(body(**batch).last_hidden_state, model.bert(**batch).last_hidden_state)


def test_large_models_are_sharded_and_shards_do_not_outlive_them(tmp_path: Path) -> None:
    model, batch = pruned(ZOO["bert"], "first-site-gone")[0], ZOO["bert"].batch(1)
    path = headprune.save(model, tmp_path / "model", max_shard_size="8KB")
    assert (path / "model.safetensors.index.json").is_file()
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2
    assert identical(outputs(model, batch), outputs(headprune.load(path), batch))
    headprune.save(model, path)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    assert identical(outputs(model, batch), outputs(headprune.load(path), batch))


def test_only_safetensors_are_written(tmp_path: Path) -> None:
    path = headprune.save(pruned(ZOO["gpt2"])[0], tmp_path / "model", portable=True)
    suffixes = {file.suffix for file in path.iterdir()}
    assert suffixes == {".safetensors", ".json", ".py"}
