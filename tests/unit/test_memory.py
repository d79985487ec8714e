"""One budget of memory for the caches of a run: read from text, divided, and without influence on results."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headprune.errors import ScheduleError
from headprune.measure.evaluator import CACHE_BYTES
from headprune.repair.dense_targets import TARGET_BYTES, DenseTargets
from headprune.runs.experiment import run_experiment
from headprune.search.config import Experiment, PruneConfig
from headprune.search.memory import DEFAULT, cache_bytes, parse_memory, target_bytes, token_bytes
from headprune.search.pruner import Pruner
from headprune.signals.tokens import TOKEN_BYTES
from headprune.tasks import task_of
from headprune.units import all_sites
from run_helpers import material
from score_helpers import labelled
from zoo import ZOO


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 << 30), ("4GiB", 4 << 30), ("0.5 gb", 1 << 29), ("300M", 300 << 20), ("17", 17), (1 << 20, 1 << 20)],
)
def test_sizes_are_read(text: Any, size: int) -> None:
    assert parse_memory(text) == PruneConfig(memory=text).memory == size


@pytest.mark.parametrize("text", ["much", "-1GB", "0", "4 PB", "", "GB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="memory takes a size such as 4GB"):
        PruneConfig(memory=text)


def test_the_default_is_what_each_cache_had() -> None:
    assert PruneConfig().memory == DEFAULT
    assert (token_bytes(DEFAULT), target_bytes(DEFAULT), cache_bytes(DEFAULT)) == (
        TOKEN_BYTES,
        TARGET_BYTES,
        CACHE_BYTES,
    )
    assert token_bytes(9000) + target_bytes(9000) + cache_bytes(9000) == 9000


@pytest.mark.parametrize("options", [{"rescore": "every", "keep": 9}, {"keep_flops": 0.9, "rounds": 2, "round_to": 2}])
def test_less_memory_takes_more_passes_to_the_same_steps(options: dict[str, Any]) -> None:
    data = [labelled(ZOO["bert"], seed) for seed in (0, 1)]

    def run(memory: int) -> tuple[list[str], int]:
        model, ran = ZOO["bert"].build(), list[int]()
        model.bert.encoder.layer[0].register_forward_hook(lambda *_: ran.append(1))
        config = PruneConfig(memory=memory, **options)
        steps = list(Pruner(model, data, config, evaluation=[labelled(ZOO["bert"], 2)]))
        return [json.dumps([step.removed, round(step.metric, 6)]) for step in steps], len(ran)

    (much, few), (little, many) = run(DEFAULT), run(1)
    assert little == much
    assert many > few


def test_a_run_goes_on_with_another_limit(tmp_path: Path) -> None:
    m = material()
    asked = Experiment(model=m.bert, data=m.data_csv, calibration_samples=8, keep=9)
    record = run_experiment(asked, tmp_path / "run", measure=False, publish=False)
    assert "memory" not in record["settings"]
    again = run_experiment(asked.with_options(memory="1GB"), tmp_path / "run", measure=False, publish=False)
    assert again == record


def test_targets_beyond_the_limit_are_read_from_files() -> None:
    """The same tensors whether none, some or all fit into memory, and nothing left behind."""
    entry = ZOO["bert"]
    model, data = entry.build(), [labelled(entry, seed) for seed in (0, 1)]
    sites = all_sites(model)
    every = DenseTargets(model, sites, data, task_of(model))
    size = sum(tensor.nbytes for target in every.targets.values() for tensor in target.outputs)
    for memory in (0, size):
        some = DenseTargets(model, sites, data, task_of(model), memory=memory)
        folder = Path(some._folder.name)
        files = len(list(folder.iterdir()))
        assert files == 2 * len(sites) * len(data) if memory == 0 else 0 < files < 2 * len(sites) * len(data)
        for index, target in every.targets.items():
            for ours, theirs in (
                (target.outputs, some.targets[index].outputs),
                (target.streams, some.targets[index].streams),
            ):
                assert ours is not None
                assert theirs is not None
                assert all(map(torch.equal, ours, theirs))
        del some, theirs
        gc.collect()
        assert not folder.exists()
