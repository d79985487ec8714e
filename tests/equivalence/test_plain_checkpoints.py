"""Checkpoints that plain classes load as they are: numbers for all layers, and for each; and what is not called so."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.checkpoint import plain_check, plain_config
from helpers import flat, identical, kept_heads, outputs
from zoo import ZOO

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma4() -> Any:
    """Four KV heads in its sliding layers, two in the last one."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **COMMON,
        num_key_value_heads=4,
        global_head_dim=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=61,
        num_kv_shared_layers=0,
    )
    return transformers.Gemma4ForCausalLM(config).eval()


def step() -> Any:
    torch.manual_seed(0)
    config = transformers.Step3p7TextConfig(
        **COMMON, num_key_value_heads=2, mlp_layer_types=["dense"] * 3, sliding_window=8
    )
    return transformers.Step3p7TextModel(config).eval()


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])}


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def two_heads_each(sites: Any) -> Any:
    return flat(unit for site in sites for unit in site.units()[: 2 // site.group])


# class -> what to remove -> what config.json says of each layer
EACH: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma4": (
        gemma4,
        two_heads_each,
        {str(layer): {"num_key_value_heads": left} for layer, left in enumerate((2, 2, 1))},
    ),
    "step3p7": (
        step,
        lambda sites: flat([sites[1].units()[0]]),
        {
            str(layer): {"num_attention_heads": 2 * left, "num_key_value_heads": left}
            for layer, left in enumerate((2, 1, 2))
        },
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_classes_that_read_numbers_of_each_layer_load_plainly(name: str, tmp_path: Path) -> None:
    build, choose, expected = EACH[name]
    model = build()
    headprune.remove(model, choose(headprune.resolve(model)))
    headprune.save(model, tmp_path / "model")
    settings = settings_of(tmp_path / "model")
    assert settings["per_layer_config"] == expected
    assert settings["headprune"]["native"] is True
    assert "auto_map" not in settings
    plain, actual = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(actual[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert identical(outputs(plain.eval(), batch()), outputs(model, batch()))

    # headprune knows the original ids, and goes on from them; then the numbers are those of the dense model again.
    again = headprune.load(tmp_path / "model")
    assert kept_heads(again) == kept_heads(model)
    assert identical(outputs(again, batch()), outputs(model, batch()))
    headprune.remove(again, headprune.resolve(again)[0].units()[0])
    headprune.save(again, tmp_path / "more")
    more = headprune.load(tmp_path / "more")
    assert kept_heads(more) == kept_heads(again)
    assert identical(outputs(more, batch()), outputs(again, batch()))


def test_a_skip_that_a_class_passes_by_is_not_called_native(tmp_path: Path) -> None:
    """Llama takes `skip` in its config, and builds the layer all the same."""
    model = ZOO["llama-gqa"].build()
    headprune.remove(model, flat(headprune.resolve(model)[0].units()))
    headprune.save(model, tmp_path / "model", portable=False)
    asked = plain_config._per_layer_numbers(model, headprune.resolve(model), settings_of(tmp_path / "model"))
    assert asked["per_layer_config"]["0"] == {"skip": ["attention"]}
    only = {"0": {"skip": ["attention"]}}
    config = type(model.config).from_dict({**settings_of(tmp_path / "model"), "per_layer_config": only})
    assert "model.layers.0.self_attn.q_proj.weight" in type(model)(config).state_dict()  # passed by, without a word
    headprune.save(model, tmp_path / "model")
    settings = settings_of(tmp_path / "model")
    assert "per_layer_config" not in settings
    assert "native" not in settings["headprune"]
    assert settings["auto_map"]["AutoModelForCausalLM"] == "modeling_headprune.LlamaForCausalLM"


def uniform() -> Any:
    model = ZOO["llama-gqa"].build()
    headprune.remove(model, flat(site.units()[0] for site in headprune.resolve(model)))
    return model


@pytest.mark.usefixtures("nothing_proven")
def test_other_outputs_in_the_other_process_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that fit are not enough: what the other process says decides."""
    model, real = uniform(), plain_check._expected_outputs

    def other(asked: Any) -> Any:
        told = real(asked)
        return {**told, "outputs": {name: value + 0.01 for name, value in told["outputs"].items()}}

    monkeypatch.setattr(plain_check, "_expected_outputs", other)
    headprune.save(model, tmp_path / "model")
    settings = settings_of(tmp_path / "model")
    assert settings["model_type"] == "headprune-llama"
    assert settings["num_attention_heads"] == model.config.num_attention_heads == 6
    assert "native" not in settings["headprune"]
    assert identical(outputs(headprune.load(tmp_path / "model"), batch()), outputs(model, batch()))
    monkeypatch.undo()
    headprune.save(model, tmp_path / "model")
    assert settings_of(tmp_path / "model")["headprune"]["native"] is True
    assert not (tmp_path / "model" / "modeling_headprune.py").exists()


@pytest.mark.usefixtures("nothing_proven")
def test_a_process_that_dies_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plain_check.shared_check_process():
        real = subprocess.Popen
        monkeypatch.setattr(
            plain_check.subprocess, "Popen", lambda command, **o: real([command[0], "-c", "1 / 0"], **o)
        )
        headprune.save(uniform(), tmp_path / "model")
    assert "auto_map" in settings_of(tmp_path / "model")


@pytest.mark.usefixtures("nothing_proven")
def test_a_process_that_does_not_answer_is_ended_with_its_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that hangs holds the line to its parent open."""
    hanging = "import os, sys, time\nsys.stdin.readline()\nos.fork()\ntime.sleep(1000)"
    started, real = [], subprocess.Popen

    def start(command: Any, **options: Any) -> Any:
        started.append(real([command[0], "-c", hanging], **options))
        return started[0]

    monkeypatch.setattr(plain_check, "TIMEOUT", 2.0)
    monkeypatch.setattr(plain_check.subprocess, "Popen", start)
    with plain_check.shared_check_process():
        headprune.save(uniform(), tmp_path / "model")
    assert "auto_map" in settings_of(tmp_path / "model")
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.usefixtures("nothing_proven")
def test_why_nothing_was_proven_is_logged(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plain_check, "_expected_outputs", lambda model: {"inputs": {"no_such_input": 1}, "outputs": {}, "within": 1}
    )
    with caplog.at_level("DEBUG", logger=plain_check.__name__):
        headprune.save(uniform(), tmp_path / "model")
    assert "ValueError: You must specify exactly one of input_ids or inputs_embeds" in caplog.text


@pytest.mark.usefixtures("nothing_proven")
def test_one_structure_is_proven_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        plain_check.CheckProcess, "check", lambda self, folder, expected, ours: not asked.append(folder)
    )
    model = uniform()
    headprune.save(model, tmp_path / "one")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    headprune.save(model, tmp_path / "two")
    assert len(asked) == 1
    headprune.remove(model, headprune.resolve(model)[0].units()[0])
    headprune.save(model, tmp_path / "three")  # uneven, and so no question
    assert len(asked) == 1


def test_uneven_classes_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(plain_check.CheckProcess, "check", refuse)
    model = ZOO["bert"].build()
    headprune.remove(model, [(0, 1)])
    headprune.save(model, tmp_path / "model")
    headprune.save(ZOO["bert"].build(), tmp_path / "dense")
    assert "headprune" not in settings_of(tmp_path / "dense")


@pytest.mark.usefixtures("nothing_proven")
def test_what_is_too_large_is_believed_by_its_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_check, "LARGEST", 0)
    headprune.save(uniform(), tmp_path / "llama")
    assert settings_of(tmp_path / "llama")["headprune"]["native"] is True
    model = gemma4()
    headprune.remove(model, two_heads_each(headprune.resolve(model)))
    headprune.save(model, tmp_path / "gemma4")
    assert "auto_map" in settings_of(tmp_path / "gemma4")


def foreign_code(cache: Path, ran: Path) -> dict[str, str]:
    """Code in a cache of the hub that leaves a file when it is run, and the map of a config that names it."""
    repository, revision = cache / "models--evil--repo", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "snapshots" / revision / "modeling_evil.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaForCausalLM\nPath({str(ran)!r}).write_text('ran')\n"
    )
    return {"AutoModelForCausalLM": "evil/repo--modeling_evil.LlamaForCausalLM"}


@pytest.mark.usefixtures("nothing_proven")
def test_code_that_a_config_names_is_neither_run_nor_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was loaded without trust is saved without it, however it is saved."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ZOO["llama-gqa"].build().save_pretrained(tmp_path / "dense")
    named = foreign_code(tmp_path / "cache", tmp_path / "ran")
    (tmp_path / "dense" / "config.json").write_text(json.dumps({**settings_of(tmp_path / "dense"), "auto_map": named}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", trust_remote_code=False)
    assert model.config.auto_map == named
    units = [site.units()[0] for site in headprune.resolve(model)]
    headprune.remove(model, flat(units))
    with plain_check.shared_check_process():
        headprune.save(model, tmp_path / "native")
    assert not (tmp_path / "ran").exists()
    assert settings_of(tmp_path / "native")["headprune"]["native"] is True
    assert "auto_map" not in settings_of(tmp_path / "native")
    headprune.remove(model, headprune.resolve(model)[0].units()[0])
    headprune.save(model, tmp_path / "portable")
    assert "evil" not in (tmp_path / "portable" / "config.json").read_text()
    headprune.save(model, tmp_path / "bare", portable=False)
    assert "auto_map" not in settings_of(tmp_path / "bare")
