"""Models that accelerate keeps in the CPU's memory or on disk: the same numbers, the same removals, the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers

import headprune
from headprune.errors import UnsupportedModelError
from headprune.hooks.offload import input_device, is_offloaded, state_of
from headprune.surgery.remove_units import remove_units
from score_helpers import labelled
from zoo import ZOO

HEADS = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]  # all of a layer, and some of another
CPU = torch.device("cpu")


def in_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=CPU)


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device=CPU)


def split(model: Any, folder: Path) -> Any:
    """As from_pretrained does it: the first layer and all else in memory, the other layers on disk."""
    model.save_pretrained(folder)
    body, layers = ("model", "layers") if hasattr(model, "model") else ("bert", "encoder.layer")
    places = {name: "cpu" for name, _ in model.named_children() if name != body}
    places |= {f"{body}.{name}": "cpu" for name, _ in model.get_submodule(body).named_children()}
    del places[f"{body}.{layers.partition('.')[0]}"]
    places |= {f"{body}.{layers}.{layer}": "disk" if layer else "cpu" for layer in range(3)}
    return type(model).from_pretrained(folder, device_map=places, offload_folder=str(folder / "offloaded")).eval()


def placed(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, device_map={"": "cpu"}).eval()


WAYS: list[Callable[[Any, Path], Any]] = [in_memory, on_disk, split]


def same_state(one: Any, other: Any) -> bool:
    first, second = state_of(one), state_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("way", [*WAYS, placed])
@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_scores_of_an_offloaded_model_are_those_of_the_model(name: str, way: Any, tmp_path: Path) -> None:
    batch = labelled(ZOO[name], 0)
    criteria = ["residual-gradient", "residual-error", "hies", "his", "magnitude", "fluctuation", "wanda"]
    expected = headprune.score(ZOO[name].build(), [batch], criteria=criteria).scores
    model = way(ZOO[name].build(), tmp_path / "model")
    assert is_offloaded(model) == (way is not placed)
    assert input_device(model) == CPU
    actual = headprune.score(model, [batch], criteria=criteria).scores
    for criterion in criteria:
        assert torch.equal(actual[criterion], expected[criterion]), criterion
    assert all(parameter.requires_grad for parameter in model.parameters())  # as before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bert", "llama-gqa"])
def test_removal_and_saving(name: str, way: Any, tmp_path: Path) -> None:
    batch = labelled(ZOO[name], 0)
    expected, model = ZOO[name].build(), way(ZOO[name].build(), tmp_path / "model")
    for one in (expected, model):
        headprune.remove(one, HEADS, verify=batch)
    assert is_offloaded(model)
    assert same_state(expected, model)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    headprune.save(model, tmp_path / "saved")
    with torch.no_grad():
        logits = expected(**inputs).logits
        assert torch.equal(model(**inputs).logits, logits)
        assert torch.equal(headprune.load(tmp_path / "saved")(**inputs).logits, logits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {"keep": 0.75}),
        ("llama-gqa", {"keep": 0.5, "schedule": "one-shot", "criterion": "gnorm"}),
        ("bert", {"keep_parameters": 0.97, "criterion": "wanda", "rounds": 1}),
    ],
)
def test_prune(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    batches = [labelled(ZOO[name], 0)]
    expected, model = ZOO[name].build(), split(ZOO[name].build(), tmp_path / "model")
    one, other = (headprune.prune(own, batches, **options) for own in (expected, model))
    assert [step.removed for step in one.trajectory] == [step.removed for step in other.trajectory]
    assert len(one.trajectory) > 1
    assert same_state(expected, model)


def test_a_removal_that_fails_leaves_an_offloaded_model_as_it_was(tmp_path: Path) -> None:
    model, batch = on_disk(ZOO["bert"].build(), tmp_path), labelled(ZOO["bert"], 0)

    def fail() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        remove_units(model, HEADS, afterwards=fail)
    assert same_state(model, ZOO["bert"].build())
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, ZOO["bert"].build()(**batch).logits)


def test_tied_embeddings_are_saved_once(tmp_path: Path) -> None:
    config = ZOO["llama"].build().config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    expected = {path.name: path.stat().st_size for path in (tmp_path / "plain").glob("*.safetensors")}
    headprune.save(in_memory(plain, tmp_path), tmp_path / "saved")
    assert {path.name: path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")} == expected


@pytest.mark.parametrize(
    "work",
    [
        lambda model, batch: headprune.LearnedGates(model, keep=0.5),
        lambda model, batch: headprune.quantize(model, "int8"),
        lambda model, batch: headprune.shrink_vocabulary(model, object(), ["a text"]),
    ],
)
def test_what_needs_all_weights_at_once_is_refused(work: Any) -> None:
    model = in_memory(ZOO["bert"].build(), Path())
    with pytest.raises(UnsupportedModelError, match="offloaded, so it cannot be"):
        work(model, labelled(ZOO["bert"], 0))
