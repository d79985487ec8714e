"""Small configs and sample runs: any architecture builds, runs, and reaches its attention."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.discovery.twin import attention_modules, randomise, sample_runs, small_config
from headprune.discovery.twin.config_patterns import HEADS
from headprune.discovery.twin.config_tree import nodes

TEXTS = ["bert", "deberta-v2", "gpt2", "gpt_neox", "llama", "falcon", "gemma2", "t5", "bart", "longformer", "big_bird"]
MIXED = ["mixtral", "qwen3_moe", "deepseek_v3", "jamba", "falcon_h1", "luke", "layoutlmv3", "time_series_transformer"]
SEEN_OR_HEARD = ["vit", "swin", "segformer", "detr", "sam", "wav2vec2", "whisper", "audio-spectrogram-transformer"]
BOTH = ["clip", "blip-2", "llava", "gemma3", "qwen2_vl", "qwen2_5_vl", "llama4"]


def build(config: PretrainedConfig) -> torch.nn.Module:
    model = AutoModel.from_config(config).eval()
    randomise(model, seed=1)
    return model


@pytest.mark.parametrize("model_type", [*TEXTS, *MIXED, *SEEN_OR_HEARD, *BOTH])
def test_every_attention_module_is_reached(model_type: str) -> None:
    model = build(small_config(CONFIG_MAPPING[model_type](), keep_heads=False, depth=2))
    reached: set[str] = set()
    for path in attention_modules(model):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: reached.add(path))
    before = torch.get_rng_state()
    runs = sample_runs(model)
    assert torch.equal(torch.get_rng_state(), before)
    reached.clear()
    with torch.no_grad():
        for run in runs:
            model.get_submodule(run.path)(**run.inputs)
    assert reached == set(attention_modules(model))
    assert reached


@pytest.mark.parametrize("model_type", ["bert", "llama", "gemma3", "swin", "deepseek_v3", "clip"])
def test_heads_and_depth_are_kept(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    small = small_config(config)
    for before, after in zip(nodes(config), nodes(small), strict=True):
        for name, value in before.old.items():
            if HEADS.search(name) or name == "num_hidden_layers":
                assert value is None or after.old[name] == value
    assert sum(parameter.numel() for parameter in build(small).parameters()) < 2e7


def test_the_given_config_is_left_alone() -> None:
    config = CONFIG_MAPPING["qwen2_vl"]()
    before = config.to_dict()
    small_config(config, keep_heads=False, depth=2)
    assert config.to_dict() == before


def test_hybrids_keep_every_kind_of_layer() -> None:
    config = CONFIG_MAPPING["gemma3_text"]()
    assert set(small_config(config, keep_heads=False, depth=1).layer_types) == set(config.layer_types)


def test_random_weights_are_neither_constant_nor_shared_between_seeds() -> None:
    config = small_config(CONFIG_MAPPING["bert"](), keep_heads=False, depth=1)
    first, second = build(config), AutoModel.from_config(config)
    randomise(second, seed=2)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.std() > 0.01
        assert not torch.equal(one, other)


def test_runs_are_the_same_each_time() -> None:
    model = build(small_config(CONFIG_MAPPING["clip"](), keep_heads=False, depth=1))
    first, second = sample_runs(model), sample_runs(model)
    for one, other in zip(first, second, strict=True):
        assert one.path == other.path
        assert all(torch.equal(value, other.inputs[name]) for name, value in one.inputs.items())
