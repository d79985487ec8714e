"""What pruning saved: counted against closed forms, and measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headprune
from headprune.measure.savings import SMALL_SHARE, _peak_memory, _TensorMeter, savings
from helpers import flat
from run_helpers import bert
from score_helpers import labelled
from zoo import ZOO, text_batch


def half(model: Any) -> Any:
    """A copy without half of its heads."""
    sites = headprune.resolve(model)
    return headprune.remove(copy.deepcopy(model), flat(unit for site in sites for unit in site.units()[::2]))


def larger(**settings: Any) -> Any:
    """Large enough for megabytes to be seen."""
    return bert(**{"hidden_size": 96, "num_attention_heads": 8, "intermediate_size": 96, **settings})


BATCH = text_batch(0, size=8, length=32)


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    dense = larger()
    return savings(dense, half(dense), {**BATCH, "labels": torch.zeros(8, dtype=torch.long)})


def test_heads_and_parameters(actual: dict[str, Any]) -> None:
    assert (actual["dense"]["heads"], actual["pruned"]["heads"]) == (24, 12)
    width, head = 96, 12
    per_head = 3 * (head * width + head) + head * width  # rows of Q, K, V with their biases, columns of O
    assert actual["dense"]["parameters"] - actual["pruned"]["parameters"] == 12 * per_head
    for name in ("dense", "pruned"):
        assert sum(actual[name]["modules"].values()) == actual[name]["parameters"]
        assert actual[name]["megabytes"] == pytest.approx(4 * actual[name]["parameters"] / 2**20, abs=0.005)


def test_flops(actual: dict[str, Any]) -> None:
    """Two operations per weight and token, and two products of tokens by tokens; half of the heads do half of it."""
    tokens, width, layers = 32, 96, 3
    heads = layers * 2 * (tokens * 4 * width * width + 2 * tokens * tokens * width)
    rest = layers * 2 * tokens * 2 * width * 96 + 2 * (width * width + 3 * width)  # feed-forward; pooler, classifier
    assert actual["dense"]["head_flops"] == heads
    assert actual["dense"]["flops"] == heads + rest
    assert actual["pruned"]["head_flops"] == heads / 2
    assert actual["pruned"]["flops"] == heads / 2 + rest


def test_latency_says_how_it_was_taken(actual: dict[str, Any]) -> None:
    latency = actual["latency"]
    assert latency.keys() >= {"threads", "repeats", "tokens", "batch_1", "batch_8"}
    assert (latency["threads"], latency["tokens"]) == (torch.get_num_threads(), 32)
    for batch in ("batch_1", "batch_8"):
        one = latency[batch]
        assert one["dense"] > 0
        assert one["ratio"] == pytest.approx(one["pruned"] / one["dense"], abs=0.02)


def test_the_two_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slows the machine down slows both."""
    dense = ZOO["bert"].build()
    pruned = half(dense)
    order: list[str] = []
    dense.register_forward_pre_hook(lambda *_: order.append("dense"))
    pruned.register_forward_pre_hook(lambda *_: order.append("pruned"))
    savings(dense, pruned, labelled(ZOO["bert"], 0))
    turns = order[: 2 * (len(order) // 2 - 1)]
    assert turns == ["dense", "pruned"] * (len(turns) // 2)
    assert len(turns) > 10


def test_peak_memory_falls_with_the_heads(actual: dict[str, Any]) -> None:
    assert actual["pruned"]["peak_memory_megabytes"] < actual["dense"]["peak_memory_megabytes"]


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    with _TensorMeter() as meter:
        one = torch.ones(1000)  # 4,000 bytes
        other = one + 1
        del one
        last = other * 2
        view = last[10:]
        del other, last
        final = view + 1
    assert meter.peak == 8000
    del view, final
    assert meter.now == 0


def test_peak_memory_of_linear_layers_is_known() -> None:
    """The weights, and the largest pair of an input and its output; the given input itself is the caller's."""

    class Two(nn.Module):
        main_input_name = "x"

        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"is_encoder_decoder": False, "use_cache": False})()
            self.wide, self.narrow = nn.Linear(10, 1000, bias=False), nn.Linear(1000, 10, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x))

    model: Any = Two()
    peak = _peak_memory(model, {"x": torch.ones(5, 10)}, headprune.task_of(model))
    assert peak == 4 * (20_000 + 5 * 1000 + 5 * 10)


def test_a_sentence_where_heads_are_a_small_share() -> None:
    dense = larger(intermediate_size=1200)
    seen = savings(dense, half(dense), BATCH)
    share = seen["dense"]["head_flops"] / seen["dense"]["flops"]
    assert share < SMALL_SHARE
    assert f"Attention heads are {share:.0%} of this model's FLOPs at 32 tokens" in seen["note"]


def test_no_such_sentence_where_they_are_not(actual: dict[str, Any]) -> None:
    assert actual["dense"]["head_flops"] / actual["dense"]["flops"] > SMALL_SHARE
    assert "note" not in actual


def test_size_on_disk(tmp_path: Path) -> None:
    dense = larger()
    pruned = half(dense)
    folders = {"dense": tmp_path / "dense", "pruned": tmp_path / "pruned"}
    headprune.save(dense, folders["dense"])
    headprune.save(pruned, folders["pruned"])
    seen = savings(dense, pruned, BATCH, folders=folders)
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert seen[name]["megabytes_on_disk"] == pytest.approx(size / 2**20, abs=0.005)
    assert seen["pruned"]["megabytes_on_disk"] < seen["dense"]["megabytes_on_disk"]


@pytest.mark.parametrize("name", ["albert", "gpt2", "llama-gqa", "t5", "vit"])
def test_every_kind_of_model(name: str) -> None:
    dense, batch = ZOO[name].build(), labelled(ZOO[name], 0)
    pruned = half(dense)
    seen = savings(dense, pruned, batch)
    assert seen["pruned"]["parameters"] < seen["dense"]["parameters"]
    assert seen["pruned"]["flops"] < seen["dense"]["flops"]
    task = headprune.task_of(dense)
    assert _peak_memory(pruned, batch, task) < _peak_memory(dense, batch, task)


def test_the_models_stay_as_they_were() -> None:
    dense = ZOO["bert"].build().train()
    pruned = half(dense)
    savings(dense, pruned, labelled(ZOO["bert"], 0))
    assert dense.training
    assert pruned.training
