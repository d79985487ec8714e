"""Layer-wise runs: written layer by layer, resumed at the layer where they stopped, and readable as every other run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as library
from headprune.checkpoint.layer_files import ONEDNN_CACHE
from headprune.runs import layerwise
from headprune.runs.experiment import run_experiment
from headprune.search.config import Experiment
from headprune.search.layerwise.prune_layer import PrunedLayer
from headprune.search.observers import Observer
from run_helpers import headprune, material, steps_of


def experiment(model: str | None = None, **settings: Any) -> Experiment:
    made = {
        "model": model or material().llama,
        "data": str(material().root / "words.txt"),
        "calibration_samples": 6,
        "evaluation_samples": 4,
        "max_length": 12,
        "batch_size": 4,
        "schedule": "layerwise",
        "units": "heads,neurons",
        "keep_flops": 0.7,
        "round_to": 2,
    }
    return Experiment(**{**made, **settings})


class _KilledError(Exception):
    pass


class KilledAfter(Observer):
    """Ends a run after so many layers."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        if done == self.layers:
            raise _KilledError


def same_runs(one: Path, other: Path) -> None:
    files = sorted(file.name for file in (one / "model").glob("*.safetensors"))
    assert files == sorted(file.name for file in (other / "model").glob("*.safetensors"))
    names = [f"model/{name}" for name in (*files, "config.json")]
    for name in ("steps.jsonl", "curve.csv", "layers/layers.jsonl", "layers/widths.json", *names):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_killed_run_resumes_at_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the first layer and again after the second, with activations in files in between: what comes out is
    that of one process, and no layer was pruned twice."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_experiment(experiment(), whole, publish=False)
    taken: list[str] = []
    kept = layerwise.LayerFolder.keep

    def keep(self: layerwise.LayerFolder, pruned: PrunedLayer) -> None:
        taken.append(pruned.layer)
        kept(self, pruned)

    monkeypatch.setattr(layerwise.LayerFolder, "keep", keep)
    for layers, more in ((1, {}), (2, {"activations_on_disk": True})):
        with pytest.raises(_KilledError):
            run_experiment(experiment(**more), parts, publish=False, observer=KilledAfter(layers))
        if layers == 1:
            (parts / "layers").rename(parts / "sweep")  # as earlier versions called it
    torn = parts / "layers" / "layers.jsonl"
    torn.write_text(torn.read_text() + '{"layer": "model.la')
    (parts / "layers" / "activations").mkdir()
    (parts / "layers" / "activations" / "dense-000000.safetensors").write_bytes(b"half")
    record = run_experiment(experiment(), parts, publish=False)
    same_runs(whole, parts)
    assert taken == list(dict.fromkeys(taken))
    assert len(taken) == len((whole / "layers" / "layers.jsonl").read_text().splitlines())
    assert not list(parts.glob("layers/*.safetensors"))
    assert not (parts / "sweep").exists()
    assert record["result"]["steps"] == 1
    assert run_experiment(experiment(), parts, publish=False) == record  # a finished run is left alone


def test_prune_with_the_layerwise_schedule(tmp_path: Path) -> None:
    """Everything that other runs have is there, and the model in the folder says what the journal measured."""
    out = tmp_path / "run"
    words = ["--schedule", "layerwise", "--keep-parameters", "0.9", "--round-to", "2", "--units", "heads,neurons"]
    data = str(material().root / "data.csv")
    done = headprune(
        "prune", material().bert, "--data", data, "--out", out, "--calibration-samples", "8", *words, "--json"
    )
    assert done.code == 0, done.err
    assert done.json["rule"] == "keep_parameters 0.9"
    dense, pruned = steps_of(out)
    assert pruned["parameters"] <= 0.9 * dense["parameters"]
    assert (out / "report.html").is_file()
    assert "elimination(metric=output" in (out / "model" / "README.md").read_text()
    again = headprune("score", str(out / "model"), "--data", data, "--criterion", "his", "--json")
    assert again.code == 0, again.err
    model = library.load(out / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == pruned["parameters"]
    record = json.loads((out / "run.json").read_text())
    assert record["settings"]["schedule"] == "layerwise"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_precision_of_the_checkpoint_is_kept(tmp_path: Path, stored: torch.dtype) -> None:
    """Computed in float32, stored as it was; and killed in between the same, since what goes on is what was stored."""
    from run_helpers import tokenizer
    from zoo import ZOO

    source = tmp_path / "half"
    ZOO["llama-gqa"].build().to(stored).save_pretrained(source)
    tokenizer(token_types=False).save_pretrained(source)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_experiment(experiment(str(source)), whole, publish=False)
    with pytest.raises(_KilledError):
        run_experiment(experiment(str(source)), parts, publish=False, observer=KilledAfter(1))
    run_experiment(experiment(str(source)), parts, publish=False)
    same_runs(whole, parts)
    model = library.load(whole / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {stored}


def test_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    out, words = tmp_path / "run", str(material().root / "words.txt")
    given = ["--schedule", "layerwise", "--keep-flops", "0.7", "--vocabulary", words]
    done = headprune("prune", material().bert, "--data", material().data_csv, "--out", out, *given)
    assert done.code == 2
    assert "--vocabulary" in done.err
    assert not out.exists()


def test_a_refused_command_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """A bad command, even with --overwrite, leaves the run as it was; another target needs --overwrite."""
    out, data = tmp_path / "run", material().data_csv
    words = [
        "prune",
        material().bert,
        "--data",
        data,
        "--out",
        out,
        "--calibration-samples",
        "8",
        "--schedule",
        "layerwise",
    ]
    assert headprune(*words, "--keep", "8").code == 0
    before = (out / "steps.jsonl").read_bytes(), (out / "run.json").read_bytes()
    for more in (
        ["--keep", "8", "--criterion", "gnorm"],
        ["--keep-parameters", "0.01"],
        ["--keep-flops", "0.7", "--knee"],
    ):
        done = headprune(*words, *more, "--overwrite")
        assert done.code == 2, done.out
    other = headprune(*words, "--keep", "6")
    assert other.code == 2
    assert "keep was 8" in other.err
    assert before == ((out / "steps.jsonl").read_bytes(), (out / "run.json").read_bytes())
    misplaced = headprune(*words[:-2], "--keep", "6", "--activations-on-disk")
    assert misplaced.code == 2
    assert "--schedule layerwise" in misplaced.err


def test_layers_without_their_weights_are_done_again(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_experiment(experiment(), whole, publish=False)
    with pytest.raises(_KilledError):
        run_experiment(experiment(), parts, publish=False, observer=KilledAfter(2))
    (parts / "layers" / "layer-00000.safetensors").unlink()
    run_experiment(experiment(), parts, publish=False)
    same_runs(whole, parts)


def test_programs_of_shapes_that_have_gone_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a program per shape, and every layer has its own; whoever has said how many is obeyed."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "to be taken away")
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    run_experiment(experiment(), tmp_path / "run")
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == str(ONEDNN_CACHE)
