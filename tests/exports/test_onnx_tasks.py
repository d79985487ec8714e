"""Models of every task of the table compute in ONNX Runtime what they compute in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import headprune
from export_helpers import CPU, said, smaller
from headprune.exports.onnx.run import open_folder
from headprune.exports.onnx.write import write_programs
from headprune.exports.programs import programs_of
from headprune.exports.runtime import Source
from headprune.tasks import TASKS, task_of
from task_models import CASES
from zoo import ZOO

ELSEWHERE = {"sequence-classification", "image-classification", "causal-lm", "seq2seq-lm"}  # test_onnx_openvino.py
BUILT = {case.task: case for case in reversed(CASES) if case.task not in ELSEWHERE}
BUILT |= {"similarity": ZOO["clip"], "features": ZOO["clip-text"]}  # type: ignore[dict-item]
# A video is a batch of pixel values like an image; there is no tiny model of one here.
LEFT_OUT = {"video-classification"}


def test_no_task_is_forgotten() -> None:
    assert {kind.name for kind in TASKS} == set(BUILT) | ELSEWHERE | LEFT_OUT


@pytest.mark.parametrize("name", BUILT)
def test_outputs_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    case = BUILT[name]
    model = smaller(case.build, num_hidden_layers=1)  # layers are alike in every task
    headprune.remove(model, headprune.resolve(model)[0].units()[0])
    task = task_of(model)
    assert task.name == name
    given = Source(model, task, task.prepare(case.batch(0), CPU))
    write_programs(programs_of(given), tmp_path)
    runner = open_folder(tmp_path, threads=1)
    for batch in (case.batch(1), {key: value[:1] for key, value in case.batch(2).items()}):
        expected = said(given, model, batch)
        assert (said(given, runner, batch) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
