"""Removal by the table is verified; discoveries are remembered; layouts of large models come from small twins."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune import cache
from headprune.discovery import attention
from headprune.discovery.to_full_width import scale_to_width
from headprune.discovery.twin import small_config
from headprune.errors import HeadpruneError, UnsupportedModelError
from headprune.repair import remove
from headprune.units import Layout
from headprune.units.families import FAMILIES, Family
from helpers import assert_unchanged, state_of
from zoo import ZOO


@pytest.mark.usefixtures("nothing_proven", "clean_table")
def test_an_error_in_the_table_removes_nothing() -> None:
    """Keys and values exchanged: all shapes agree."""
    place = next(number for number, family in enumerate(FAMILIES) if family.name == "phi3")
    FAMILIES[place] = Family(
        "phi3", ("phi3",), (Layout("self_attn", *("qkv_proj",) * 3, "o_proj", interleaved=True),), stack="decoder"
    )
    model = ZOO["phi3"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HeadpruneError):
        headprune.remove(model, [tuple(head) for head in headprune.resolve(model)[0].units()[0]])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("nothing_proven", "clean_table")
@pytest.mark.parametrize(
    ("count", "reason"), [(1, "does not run with these units removed"), (4, "changed the outputs")]
)
def test_a_registered_table_that_is_wrong_removes_nothing(count: int, reason: str) -> None:
    """CodeGen stores the queries, values and keys of four blocks of heads after one another."""
    headprune.register_family(
        "codegen", model_types=["codegen"], layouts=[Layout("attn", *("qkv_proj",) * 3, "out_proj")], stack="decoder"
    )
    torch.manual_seed(0)
    model = transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=8, rotary_dim=4, n_positions=32)
    )
    before = state_of(model)
    with pytest.raises(HeadpruneError, match=reason):
        headprune.remove(model, [(0, head) for head in range(count)])
    assert_unchanged(model, before)


@pytest.mark.usefixtures("nothing_proven")
def test_a_removal_of_the_table_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    right = remove.dummy_batch
    monkeypatch.setattr(remove, "dummy_batch", lambda *args: made.append(args) or right(*args))
    for _ in range(2):
        headprune.remove(ZOO["bert"].build(), [(0, 0)])
    monkeypatch.setattr(cache, "_memory", {})  # as another process finds it
    headprune.remove(ZOO["bert"].build(), [(0, 1)])
    assert len(made) == 1
    headprune.remove(ZOO["bert"].build(), [(0, head) for head in range(4)])  # a site without heads is another sort
    assert len(made) == 2
    headprune.remove(ZOO["granite"].build(), headprune.resolve(ZOO["granite"].build())[0].units()[0])
    assert len(made) == 2


@pytest.mark.usefixtures("nothing_proven")
def test_where_a_model_does_not_run_on_made_up_inputs_a_batch_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(1)
    right = model.forward

    def picky(input_ids: torch.Tensor, **others: Any) -> Any:
        if input_ids.shape != batch["input_ids"].shape:
            raise ValueError("not today")
        return right(input_ids, **others)

    monkeypatch.setattr(model, "forward", picky)
    with pytest.raises(UnsupportedModelError, match=r"dummy inputs .*not today.*; pass a batch as verify="):
        headprune.remove(model, [(0, 0)])
    assert headprune.resolve(model)[0].heads == 4
    headprune.remove(model, [(0, 0)], verify=batch)
    assert headprune.resolve(model)[0].heads == 3


@pytest.mark.usefixtures("nothing_proven")
def test_batches_that_are_given_serve_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ZOO["bert"].build(), ZOO["bert"].batch(1)
    monkeypatch.setattr(remove, "dummy_batch", lambda *args: pytest.fail("a batch was made up"))
    headprune.remove(model, [(0, 0)], repair="mean", batches=[batch])
    assert headprune.resolve(model)[0].heads == 3


@pytest.mark.usefixtures("nothing_proven")
def test_what_was_discovered_is_read_from_disk_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["granite"].build()
    first = headprune.survey(model)
    (file,) = (cache.folder() / "proofs").iterdir()
    assert file.name.startswith("GraniteForCausalLM-")
    monkeypatch.setattr(cache, "_memory", {})  # as another process finds it
    monkeypatch.setattr(attention, "_discover", lambda *args: pytest.fail("it was measured again"))
    assert headprune.survey(model) == first


@pytest.mark.usefixtures("nothing_proven")
def test_a_broken_file_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["granite"].build()
    first = headprune.survey(model)
    for file in (cache.folder() / "proofs").iterdir():
        file.write_text("{")
    monkeypatch.setattr(cache, "_memory", {})
    assert headprune.survey(model) == first


ATTENTION = """
from torch import nn

class EditedAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4))

    def forward(self, states):
        q, k, v = (m(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(heads)
"""
MODELING = """
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from edited_family.attention import EditedAttention

class EditedConfig(PreTrainedConfig):
    model_type = "edited-family"

    def __init__(self, hidden_size=16, num_attention_heads=4, vocab_size=32, **kwargs):
        self.hidden_size, self.num_attention_heads, self.vocab_size = hidden_size, num_attention_heads, vocab_size
        super().__init__(**kwargs)

class EditedModel(PreTrainedModel):
    config_class = EditedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([EditedAttention(config) for _ in range(2)])
        self.post_init()

    def forward(self, input_ids):
        states = self.embed(input_ids)
        for layer in self.layers:
            states = states + layer(states)
        return {"last_hidden_state": states}
"""


@pytest.mark.usefixtures("nothing_proven")
def test_a_proof_is_void_where_the_code_of_a_module_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention is in another file than the class of the model. Once edited, its heads depend on one another."""
    package = tmp_path / "edited_family"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(ATTENTION)
    (package / "modeling.py").write_text(MODELING)
    monkeypatch.syspath_prepend(tmp_path)

    def survey_in_a_new_process() -> headprune.units.Survey:
        monkeypatch.setattr(cache, "_memory", {})
        for name in [name for name in sys.modules if name.startswith("edited_family")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        modeling = importlib.import_module("edited_family.modeling")
        return headprune.survey(modeling.EditedModel(modeling.EditedConfig()))

    assert [site.heads for site in survey_in_a_new_process().sites] == [4, 4]
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_discover", lambda *args: pytest.fail("it was measured again"))
        assert [site.heads for site in survey_in_a_new_process().sites] == [4, 4]
    edited = ATTENTION.replace("return self.o(heads)", "return self.o(nn.functional.softmax(heads, -1))")
    (package / "attention.py").write_text(edited)
    assert survey_in_a_new_process().sites == []


@pytest.mark.usefixtures("nothing_proven")
def test_a_proof_is_void_where_a_function_of_a_class_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.granite.modeling_granite import GraniteAttention

    right = GraniteAttention.forward
    model = ZOO["granite"].build()
    assert headprune.survey(model).sites

    def replaced(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, *rest = right(self, hidden_states, *args, **kwargs)
        return (output, *rest)

    made: list[Any] = []
    discover = attention._discover
    monkeypatch.setattr(attention, "_discover", lambda *args: made.append(args) or discover(*args))
    headprune.survey(model)
    assert not made
    monkeypatch.setattr(GraniteAttention, "forward", replaced)
    headprune.survey(model)
    assert len(made) == 1


def test_code_that_is_in_no_file_is_cached_in_memory_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a notebook, where a class of the same name may have other code in the next session."""
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    made: list[int] = []
    for _ in range(2):
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec("class Cell:\n    def forward(self): ...", scope)
        for _ in range(2):
            cache.remembered(scope["Cell"], "", lambda: made.append(1) or 1)
    assert len(made) == 2
    assert not list(tmp_path.rglob("*.gz"))


IMAGE = {"image_size": 32, "patch_size": 2}
WIDER: dict[str, dict[str, Any]] = {
    "swin": {
        "embed_dim": 32,
        "depths": [1, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "image_size": 32,
        "patch_size": 2,
    },
    "falcon": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "new_decoder_architecture": True},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 1},
    "diffllama": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 1},
}


def plain(sites: Sequence[Any]) -> list[dict[str, Any]]:
    """By their values: each equals itself alone, as the key of a cache."""
    return [dataclasses.asdict(site) for site in sites]


@pytest.mark.parametrize("model_type", WIDER)
def test_a_layout_of_a_narrow_twin_is_that_of_the_wide_model(model_type: str) -> None:
    """Twice as wide heads: the layout scaled up from the twin is what an experiment on the wide model itself finds."""
    config = transformers.AutoConfig.for_model(model_type, **WIDER[model_type], vocab_size=99)
    if model_type == "falcon":
        config.num_kv_heads = 2
    kind = transformers.AutoModel._model_mapping[type(config)]
    narrow = attention._on_twin(kind, small_config(config, keep_heads=True))
    wide = attention._on_twin(kind, config)
    with torch.device("meta"):
        dense = kind(config)
    assert len(wide.sites[0].layout.members[0]) > len(narrow.sites[0].layout.members[0])
    assert plain([scale_to_width(site, dense) for site in narrow.sites]) == plain(wide.sites)


DEEP = {
    "gpt_neo": {"hidden_size": 64, "num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]]},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4},
    "deberta": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 32},
}


@pytest.mark.parametrize("model_type", DEEP)
def test_a_layout_of_a_shallow_twin_is_that_of_the_deep_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.for_model(model_type, **DEEP[model_type], vocab_size=99)
    kind = transformers.AutoModel._model_mapping[type(config)]
    with torch.device("meta"):
        dense = kind(config)
    deep = attention._on_narrow_twin(kind, config, dense)
    monkeypatch.setattr(attention, "SHORTEN_ABOVE", 0)
    counted: list[int] = []
    right = attention._on_twin
    monkeypatch.setattr(attention, "_on_twin", lambda k, c: counted.append(c.num_hidden_layers) or right(k, c))
    assert plain(attention._on_narrow_twin(kind, config, dense).sites) == plain(deep.sites)
    assert counted == [attention.SHORT_DEPTH]
    assert len(deep.sites) == 6


def test_a_large_model_is_known_from_its_config() -> None:
    config = transformers.StableLmConfig(num_hidden_layers=2)  # 2560 wide, 32 heads
    with torch.device("meta"):
        model = transformers.StableLmForCausalLM(config)
    sites = headprune.resolve(model)
    assert [(site.heads, site.head_dim, site.kv_heads) for site in sites] == [(32, 80, 32)] * 2
    queries = sites[1].roles["q"]
    assert queries.module == "model.layers.1.self_attn.q_proj"
    assert [list(rows) for rows in queries.units] == [list(range(head * 80, head * 80 + 80)) for head in range(32)]


def test_inspect_says_how_it_is_known_and_what_stays_whole(tmp_path: Path) -> None:
    seen = headprune.inspect(ZOO["bert"].build())
    assert "table of families" in seen.proof
    assert "verified on the model itself" in seen.proof
    seen = headprune.inspect(ZOO["granite"].build())
    assert "measured by experiment" in seen.proof
    assert "proven exact" in seen.proof
    config = transformers.Olmo2Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40
    )
    seen = headprune.inspect(transformers.Olmo2ForCausalLM(config))
    assert seen.proof == "None of its attention can be pruned."
    said = json.loads(json.dumps(seen.to_json()))
    assert said["sites"] == []
    assert [place["path"] for place in said["left_whole"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all("q_norm" in place["reason"] for place in said["left_whole"])


def test_prune_warns_of_what_it_leaves_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = gemma3n()
    batch = {"input_ids": torch.randint(3, 90, (4, 7), generator=torch.Generator().manual_seed(0))}
    left = headprune.survey(model).left
    assert left
    with caplog.at_level(logging.WARNING, logger="headprune"):
        result = headprune.prune(model, [batch], criterion="random", repair="none", keep=0.5)
    assert left[0][0] in caplog.text
    assert "are not pruned" in caplog.text
    assert result.trajectory[-1].left < result.trajectory[0].left


def gemma3n() -> Any:
    """Its last layers use the keys and values of earlier ones, so those must keep all their heads."""
    config = small_config(transformers.Gemma3nTextConfig(), keep_heads=False, depth=2)
    torch.manual_seed(0)
    return transformers.Gemma3nForCausalLM(config).eval()


def test_a_portable_checkpoint_of_a_measured_family_is_pruned_further(tmp_path: Path) -> None:
    """Its class is made by code in the checkpoint; what was proven is the class that it derives from."""
    entry = ZOO["granite"]
    model = entry.build()
    first, second = headprune.resolve(model)[0].units()[:2]
    headprune.remove(model, first)
    headprune.save(model, tmp_path / "model", portable=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    assert type(again) is not type(model)
    for either in (model, again):
        headprune.remove(either, second)
    batch = entry.batch(1)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
