"""Several processes train what one trains: gates, and the fine-tuning after them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from headprune import distributed
from headprune.runs import finetune, train_gates
from headprune.search.config import Experiment
from headprune.training.config import TrainConfig
from headprune.training.gate_config import GateConfig
from headprune.training.samplers import BatchShares, SimilarLengthSampler
from headprune.training.trainer import ResumableRun
from launch_processes import together
from run_helpers import material, steps_of


def trained(count: int, out: Path, *, dies: int | None = None) -> list[tuple[int, Any, str]]:
    """Gates and then a fine-tuning, in so many processes, one of which may die after its first checkpoint."""
    files = material()
    asked = train_gates.TrainRequest(
        experiment=Experiment(model=files.bert, data=files.data_csv, batch_size=4),
        gates=GateConfig(keep=6),
        config=TrainConfig(epochs=3, batch_size=5, learning_rate=1e-3),
    )
    save = ResumableRun.on_save

    def dying(self: Any, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def work(number: int) -> Any:
        distributed.start()
        with (
            mock.patch.object(ResumableRun, "on_save", dying if number == dies else save),
            # Pages and times are what other tests are about, and take longer than all the rest.
            mock.patch.object(train_gates, "publish_run"),
            mock.patch.object(finetune, "publish_run"),
            mock.patch.object(train_gates, "savings", return_value=None),
        ):
            record = train_gates.run_training(asked, out)
        return record["result"], record["gates"], record["recovery"]["recovered"]

    return together(count, work)


def test_every_step_sees_the_rows_of_one_process() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    order = SimilarLengthSampler(lengths, 5, seed=7)
    for processes in (2, 3):
        pieces = [list(BatchShares(order, 5, processes, rank)) for rank in range(processes)]
        rows = list(order)
        for number, whole in enumerate((rows[:5], rows[5:10])):
            assert [row for piece in pieces for row in piece[number]] == whole
        assert [piece[2] for piece in pieces] == [rows[10:]] * processes  # one row, which all of them get


def test_training_is_that_of_one_process_and_goes_on_in_another_number(tmp_path: Path) -> None:
    ((code, alone, said),) = trained(1, tmp_path / "one")
    assert code == 0, said
    actual = trained(2, tmp_path / "two")
    assert [code for code, _, _ in actual] == [0, 0], actual
    assert actual[0][1] == actual[1][1]
    codes = [code for code, _, _ in trained(2, tmp_path / "killed", dies=1)]
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert (tmp_path / "killed" / "training").is_dir()
    ((code, resumed, said),) = trained(1, tmp_path / "killed")  # what two began, one goes on with
    assert code == 0, said
    for name, record in (("two", actual[0][1]), ("killed", resumed)):
        assert record[0]["mask"] == alone[0]["mask"]
        assert steps_of(tmp_path / name)[1]["removed"] == steps_of(tmp_path / "one")[1]["removed"]
        ours, theirs = (_gates(tmp_path / which) for which in ("one", name))
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for own, line in zip(ours, theirs, strict=True):
            assert own["open"] == pytest.approx(line["open"], abs=2e-4)  # written with four digits
        for folder in ("model", "finetuned/model"):
            one, other = (load_file(tmp_path / which / folder / "model.safetensors") for which in ("one", name))
            for key, value in one.items():
                # Attention does not see the bias of keys, so its gradient is rounding, of which Adam makes whole steps.
                if not key.endswith("key.bias"):
                    torch.testing.assert_close(value, other[key], rtol=1e-5, atol=1e-6)


def _gates(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "gates.jsonl").read_text().splitlines()][1:]
