"""lm-eval on a pruned causal model with a small task of its own: the same log-likelihoods as computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
import run_helpers
from helpers import first_site_and_some
from zoo import ZOO

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
QUESTIONS = [
    {"question": "w7 w8 w9", "choices": ["w10", "w11 w12"], "answer": 0},
    {"question": "w20 w21", "choices": ["w30 w31", "w6"], "answer": 1},
    {"question": "w40 w41 w42 w43", "choices": ["w5", "w50"], "answer": 1},
]
TASK = """
task: small_choice
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {file}}}
  cache_dir: {cache}
output_type: multiple_choice
validation_split: validation
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
metadata:
  version: 0
"""


def by_hand(model: Any, question: str, choice: str) -> float:
    """The log-likelihood of the tokens of the choice, after those of the question."""
    tokenizer = run_helpers.tokenizer(token_types=False)
    start = tokenizer(question, add_special_tokens=False)["input_ids"]
    end = tokenizer(choice, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*start, *end]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(float(scores[place - 1, ids[0, place]]) for place in range(len(start), ids.shape[1]))


def test_log_likelihoods_are_those_of_the_pruned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    model = ZOO["llama-gqa"].build()
    headprune.remove(model, first_site_and_some(headprune.resolve(model)))
    tokenizer = run_helpers.tokenizer(token_types=False)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    headprune.save(model, tmp_path / "model", processor=tokenizer)
    rows = tmp_path / "rows.json"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "small.yaml").write_text(TASK.format(file=rows, cache=tmp_path / "cache"))
    loaded = HFLM(
        pretrained=str(tmp_path / "model"),
        trust_remote_code=True,
        device="cpu",
        dtype="float32",
        batch_size=2,
        add_bos_token=False,
        max_length=40,
    )
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    actual = lm_eval.simple_evaluate(
        loaded, tasks=["small_choice"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    right = 0
    for sample in actual["samples"]["small_choice"]:
        asked = sample["doc"]
        said = [float(answer[0]) for answer in sample["filtered_resps"]]
        expected = [by_hand(model, asked["question"], choice) for choice in asked["choices"]]
        assert said == pytest.approx(expected, abs=1e-4)
        right += expected.index(max(expected)) == asked["answer"]
    assert len(actual["samples"]["small_choice"]) == len(QUESTIONS)
    assert actual["results"]["small_choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
