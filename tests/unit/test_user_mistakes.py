"""What users do by mistake, or by habit: each ends in a sentence, or is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.search.config import PruneConfig
from run_helpers import headprune as program
from run_helpers import material, prune_command

BUDGETS: list[dict[str, Any]] = [{"keep_flops": 0.6}, {"keep_parameters": 0.6}, {"keep_memory": 0.6}, {"speedup": 2}]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: next(iter(budget)))
@pytest.mark.parametrize("schedule", ["greedy", "one-shot"])
def test_a_budget_with_a_schedule_that_counts_heads_is_refused(schedule: str, budget: dict[str, Any]) -> None:
    """It was ignored, and everything was removed."""
    with pytest.raises(ScheduleError, match=f"The schedule {schedule} counts heads, .* leave the schedule out"):
        PruneConfig(schedule=schedule, **budget)
    PruneConfig(schedule=schedule, keep=0.5)
    PruneConfig(schedule="layerwise", **budget)


def test_the_command_line_refuses_it(tmp_path: Path) -> None:
    m = material()
    run = prune_command(m.bert, m.data_csv, tmp_path / "run", "--schedule", "one-shot", "--keep-flops", "0.6")
    compare = ["compare", m.bert, "--data", m.data_csv, "--out", str(tmp_path / "compare")]
    for command in (run, [*compare, "--criteria", "wanda@one-shot,his", "--keep-flops", "0.6"]):
        done = program(*command)
        assert done.code == 2
        assert "counts heads" in done.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "compare").exists()


def decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=16, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).double().eval()


def test_padding_on_the_left_predicts_nothing() -> None:
    """The prediction of the first token from a padding position counted, where there were labels."""
    model = decoder()
    texts = [torch.arange(5, 5 + length) for length in (3, 6, 9)]
    rows = {"input_ids": [], "attention_mask": [], "labels": []}  # type: ignore[var-annotated]
    for ids in texts:
        padding = torch.zeros(9 - len(ids), dtype=torch.long)
        rows["input_ids"].append(torch.cat([padding, ids]))
        rows["attention_mask"].append(torch.cat([padding, torch.ones_like(ids)]))
        rows["labels"].append(torch.cat([padding - 100, ids]))
    padded = {name: torch.stack(values) for name, values in rows.items()}
    alone = [{"input_ids": ids[None], "labels": ids[None]} for ids in texts]
    with torch.no_grad():  # position by position
        losses = [
            torch.nn.functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            for ids in texts
        ]
    expected = float(sum(losses) / sum(len(ids) - 1 for ids in texts))
    for batches in ([padded], alone):
        result = headprune.score(model, batches, criterion="his")
        assert result.token_loss == pytest.approx(expected, rel=1e-6)
    one, other = (headprune.score(model, batches, criterion="his").scores for batches in ([padded], alone))
    assert torch.allclose(one, other, rtol=1e-6)


def test_a_page_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    m = material()
    assert program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10")).code == 0
    page = tmp_path / "page.html"
    page.write_text("<html>my own</html>")
    done = program("report", tmp_path / "run", "--out", page)
    assert done.code == 2
    assert "page.html is there, and is no report of headprune; name another file." in " ".join(done.err.split())
    assert page.read_text() == "<html>my own</html>"
    page.unlink()
    for _ in range(2):  # its own page is
        assert program("report", tmp_path / "run", "--out", page).code == 0


def test_what_is_no_model_is_refused() -> None:
    for function in (headprune.score, headprune.inspect, headprune.prune):
        with pytest.raises(UnsupportedModelError, match="takes a model, not 'folder'; load it first"):
            function("folder", *([] if function is headprune.inspect else [[]]))
    with pytest.raises(UnsupportedModelError, match=r"evaluate takes a model of transformers, .* not a Linear"):
        headprune.evaluate(torch.nn.Linear(2, 2), [])  # type: ignore[arg-type]
