"""Checkpoints of models without some neurons: bit for bit, in rounds, by plain transformers where a config can say it.

That they load in a fresh process, portable ones without headprune, is in test_checkpoint.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import headprune
from headprune.checkpoint.save_load import load_structure
from headprune.errors import CheckpointError
from headprune.surgery.remove_units import remove_units
from headprune.units import all_sites
from helpers import NO_NEURONS, SAME_CODE, families, flat, identical, outputs
from neuron_helpers import evenly, first_layer, kept_units, layers_of, scattered, with_heads
from zoo import BART, GQA, VOCAB, ZOO, Entry, _model, seq2seq_batch

# Families whose config has no number that is the width of their feed-forward layers.
NOT_NATIVE = ("bloom", "dinov2")
# Families whose plain config can also say that every layer has fewer heads.
HEADS_TOO = ("llama-gqa", "qwen3", "gemma2", "phi3", "vit")
MOE = {"num_experts": 2, "expert_capacity": 8}
EXPERTS = {
    "switch": _model(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        **MOE,
        vocab_size=VOCAB,
        d_model=24,
        d_kv=5,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=1,
        d_ff=20,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=0,
        pad_token_id=1,
        decoder_start_token_id=1,
    ),
    "nllb": _model(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        **{**BART, **MOE, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
}


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def shapes(model: Any) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def assert_same(model: Any, other: Any, batch: Any) -> None:
    assert identical(outputs(model, batch), outputs(other, batch))
    assert kept_units(model) == kept_units(other)
    assert shapes(model) == shapes(other)


@pytest.mark.parametrize("entry", families(without=(*SAME_CODE, *NO_NEURONS)))
def test_two_rounds_of_pruning_and_saving(entry: Entry, tmp_path: Path) -> None:
    """Uneven widths first; then a layer and a site of attention as a whole, on top."""
    model, batch = entry.build(), entry.batch(5)
    dense = {**model.config.to_dict()}
    gone = scattered(model)
    remove_units(model, gone)
    headprune.save(model, tmp_path / "model")
    model = headprune.load(tmp_path / "model")
    more = [member for member in with_heads(model) if member not in set(gone)]
    remove_units(model, more)
    headprune.save(model, tmp_path / "model", portable=entry.name in ("bert", "t5"))
    assert_same(model, headprune.load(tmp_path / "model"), batch)
    assert shapes(load_structure(tmp_path / "model")) == shapes(model)
    settings = settings_of(tmp_path / "model")
    first = layers_of(model)[0]
    assert settings["pruned_neurons"]["0"] == f"0-{first.original - 1}"
    kind, portable = model.config.model_type, entry.name in ("bert", "t5")
    assert settings["model_type"] == (f"headprune-{kind}" if portable else kind)
    assert all(settings.get(name) == value for name, value in dense.items() if name.endswith(("_size", "_dim", "d_ff")))


@pytest.mark.parametrize("entry", families(without=(*SAME_CODE, *NO_NEURONS)))
def test_one_width_everywhere_loads_with_plain_transformers(entry: Entry, tmp_path: Path) -> None:
    model, batch, path = entry.build(), entry.batch(6), tmp_path / "model"
    remove_units(model, evenly(model))
    headprune.save(model, path)
    assert_same(model, headprune.load(path), batch)
    assert ("auto_map" in settings_of(path)) == (entry.name in NOT_NATIVE)
    if entry.name in NOT_NATIVE:
        return
    plain, actual = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(actual[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(model, plain, batch)
    plain.save_pretrained(tmp_path / "again")  # by transformers itself
    assert_same(model, headprune.load(tmp_path / "again"), batch)

    remove_units(plain, [(layers_of(plain)[0].index, layers_of(plain)[0].kept[0])])
    headprune.save(plain, tmp_path / "uneven")
    if entry.name != "albert":  # whose one layer has one width whatever goes
        assert "auto_map" in settings_of(tmp_path / "uneven")
        assert settings_of(tmp_path / "uneven").get("intermediate_size") in (20, None)
    assert_same(plain, headprune.load(tmp_path / "uneven"), batch)


@pytest.mark.parametrize("name", HEADS_TOO)
def test_heads_and_neurons_in_one_native_config(name: str, tmp_path: Path) -> None:
    model, batch = ZOO[name].build(), ZOO[name].batch(6)
    sites = [site for site in all_sites(model) if site.kind == "heads"]
    remove_units(model, evenly(model) + flat(site.units()[site.index % len(site.units())] for site in sites))
    headprune.save(model, tmp_path / "model", portable=True)
    settings = settings_of(tmp_path / "model")
    assert settings["intermediate_size"] == 14
    assert settings["headprune"]["dense"]["intermediate_size"] == 20
    assert settings["headprune"]["dense"]["num_attention_heads"] == ZOO[name].heads
    assert_same(model, type(model).from_pretrained(tmp_path / "model"), batch)
    assert_same(model, headprune.load(tmp_path / "model"), batch)


def test_uneven_heads_need_headprune_however_even_neurons_are(tmp_path: Path) -> None:
    model = ZOO["llama"].build()
    remove_units(model, [*evenly(model), (0, 1)])
    headprune.save(model, tmp_path / "model")
    assert settings_of(tmp_path / "model")["intermediate_size"] == 20
    assert_same(model, headprune.load(tmp_path / "model"), ZOO["llama"].batch(1))


def test_two_stacks_of_two_widths(tmp_path: Path) -> None:
    model, batch = ZOO["bart"].build(), ZOO["bart"].batch(1)
    layers = layers_of(model)
    remove_units(model, [(site.index, n) for site in layers for n in range(5 if site.stack == "encoder" else 9)])
    headprune.save(model, tmp_path / "model")
    settings = settings_of(tmp_path / "model")
    assert (settings["encoder_ffn_dim"], settings["decoder_ffn_dim"]) == (15, 11)
    assert_same(model, transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "model"), batch)
    assert_same(model, headprune.load(tmp_path / "model"), batch)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_layers_of_their_own(name: str, tmp_path: Path) -> None:
    model, dense, batch = EXPERTS[name](), EXPERTS[name](), seq2seq_batch(1)
    experts = [site for site in layers_of(model) if "expert" in site.path]
    assert len(experts) >= 2
    gone = [(site.index, n) for site in layers_of(model) for n in range(0, 20, 2 + site.index % 2)]
    gone += [(experts[0].index, n) for n in range(20) if (experts[0].index, n) not in gone]
    remove_units(model, gone, verify=batch)
    headprune.save(model, tmp_path / "model")
    assert_same(model, headprune.load(tmp_path / "model"), batch)
    assert not identical(outputs(model, batch), outputs(dense, batch))


# --- records that do not fit -----------------------------------------------------------------------------------------

RECORDS: dict[str, tuple[Any, str]] = {
    "a-list": ([[0, 1]], "must map site numbers to ranges of neuron numbers"),
    "words": ({"first": "0-3"}, "must map site numbers to ranges"),
    "no-range": ({"0": "a-b"}, "must map site numbers to ranges"),
    "backwards": ({"0": "7-3"}, "must map site numbers to ranges"),
    "open": ({"0": "7-"}, "must map site numbers to ranges"),
    "twice": ({"0": "0-3,2"}, "must map site numbers to ranges"),
    "endless": ({"0": "0-99999999999999"}, "must map site numbers to ranges"),
    "no-such-layer": ({"7": "0-3"}, r"record of removed neurons.*Neuron \(7, 0\) does not exist.*3 sites of neurons"),
    "no-such-neuron": ({"1": "18-20"}, r"record of removed neurons.*Neuron \(4, 20\) does not exist.*neurons 0 to 19"),
    "another-number": ({"0": "0-3"}, "do not fit its config.json"),
    "none": ({}, "do not fit its config.json"),
}


@pytest.mark.parametrize("carried", [True, False], ids=["layout", "earlier-version"])
@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_does_not_fit(case: str, carried: bool, tmp_path: Path) -> None:
    record, message = RECORDS[case]
    if carried and "must map" not in message:
        message = r"layout in the config of .* does not match the \d+ of site \d in pruned_neurons"
    model = ZOO["bert"].build()
    remove_units(model, first_layer(model)[:5])
    path = headprune.save(model, tmp_path / "model")
    settings = {**settings_of(path), "pruned_neurons": record}
    if not carried:
        del settings["headprune"]["layout"]
    (path / "config.json").write_text(json.dumps(settings))
    (path / "headprune.json").unlink()
    with pytest.raises(CheckpointError, match=message) as error:
        headprune.load(path)
    assert "\n" not in str(error.value)


def test_a_number_that_is_no_width_is_left_alone(tmp_path: Path) -> None:
    """The window has the number of the layers' width by chance, and so has a table of positions."""
    build = _model(
        "MistralForCausalLM", "MistralConfig", **{**GQA, "sliding_window": 20, "max_position_embeddings": 20}
    )
    model = build()
    remove_units(model, evenly(model))
    settings = settings_of(headprune.save(model, tmp_path / "model"))
    assert settings["headprune"]["dense"] == {"intermediate_size": 20}
    assert (settings["sliding_window"], settings["max_position_embeddings"]) == (20, 20)
