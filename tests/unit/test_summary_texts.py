"""Sentences that summaries, logs and pages share: counts, exact numbers, hints on calibration and training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.cli.progress import training_line
from headprune.display import counted
from headprune.errors import CriterionError
from headprune.measure.metrics import METRICS
from headprune.measure.predictions import Predictions
from headprune.reports.format import calibration_text, interval_text, measured_text
from headprune.reports.recovery import how
from headprune.reports.savings import how_timed
from headprune.tasks import task_of
from recovery_helpers import labelled, pair
from run_helpers import bert, material, prune_command, tokenizer
from run_helpers import headprune as program
from zoo import ZOO, text_batch


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        *((1, "epoch", "1 epoch"), (1.0, "epoch", "1 epoch"), (0.5, "epoch", "0.5 epochs"), (0, "step", "0 steps")),
        *((2, "pass", "2 passes"), (1, "batch", "1 batch"), (3, "batch", "3 batches"), (1200, "row", "1,200 rows")),
    ],
)
def test_a_count_agrees_with_its_noun(count: float, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_one_thread_is_singular() -> None:
    assert how_timed({"latency": {"repeats": 7, "threads": 1}}).endswith("1 CPU thread.")
    assert how_timed({"latency": {"repeats": 7, "threads": 4}}).endswith("4 CPU threads.")


def recovery(best: int, steps: int = 1) -> dict[str, Any]:
    settings = {"distill": 1.0, "hidden": 0.0, "lora": 0, "epochs": 1.0, "learning_rate": 5e-5, "seed": 0}
    history = [{"step": 1, "task_loss": 0.5}]
    samples = {"training": 1}
    return {"settings": settings, "history": history, "best_step": best, "steps": steps, "samples": samples}


def test_a_training_that_did_not_help_is_explained_in_a_sentence() -> None:
    assert how(recovery(best=0)) == (
        "Trained all weights on 1 sample from labels and the dense model: 1 epoch, learning rate 5e-05, seed 0. Kept "
        "the model as it was before training: on held-out training rows, no evaluation during its 1 step was better."
    )
    assert how(recovery(best=9, steps=9)).endswith("Kept the model after the last of its 9 steps.")
    assert "step 4 of 9, which was the best on held-out training rows" in how(recovery(best=4, steps=9))


def test_the_metric_is_in_every_line_of_a_training() -> None:
    first = {"step": 1, "steps": 9, "loss": 0.5, "metric": "accuracy", "before": 0.86}
    assert training_line(first) == "Training: step 1 of 9, loss 0.5, accuracy 0.86 before training"
    later = {**first, "step": 4, "eval_metric": 0.87, "evaluated_step": 3}
    assert training_line(later).endswith("accuracy 0.86 before training, accuracy 0.87 on held-out data at step 3")


class Logged(headprune.search.observers.Observer):
    def __init__(self) -> None:
        self.entries: list[Any] = []

    def log(self, entry: Any) -> None:
        self.entries.append(entry)


def test_the_log_of_a_recovery_has_the_metric_from_its_first_line(tmp_path: Path) -> None:
    """Also where nothing is evaluated during the training."""
    from headprune.runs.finetune import run_finetune
    from headprune.runs.recovery_job import RecoveryRequest
    from headprune.training.config import TrainConfig

    m, observer = material(), Logged()
    assert program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "6", "--every", "3")).code == 0
    config = TrainConfig(epochs=1, batch_size=8)
    record = run_finetune(RecoveryRequest(run=tmp_path / "run", data=m.data_csv, config=config), observer=observer)
    assert {entry["before"] for entry in observer.entries} == {record["pruned"]["value"]}
    assert {entry["metric"] for entry in observer.entries} == {"accuracy"}


def predictions(values: list[int]) -> Predictions:
    task = task_of(bert())
    result = Predictions(task)
    logits = torch.nn.functional.one_hot(torch.tensor(values), 3).float()
    result.add({"input_ids": torch.zeros(len(values), 2, dtype=torch.long)}, None, logits)
    return result


def test_the_fidelity_of_the_dense_model_to_itself_has_no_interval() -> None:
    dense, same = predictions([0, 1, 2, 0]), predictions([0, 1, 2, 0])
    exact, measured = METRICS["fidelity"].of(dense, dense), METRICS["fidelity"].of(same, dense)
    assert (exact.value, exact.interval) == (1.0, None)
    assert exact.per_sample is not None  # for differences that are paired over samples
    assert torch.equal(exact.per_sample, measured.per_sample)
    assert measured.value == 1.0
    assert measured.interval is not None  # of four samples, nobody knows the fifth
    assert measured.interval.low < 0.6


def test_an_interval_whose_ends_read_the_same_is_not_shown() -> None:
    assert measured_text("fidelity", 1.0, (1.0, 1.0)) == "100.00%"
    assert measured_text("fidelity", 0.99999, (0.99998, 1.0)) == "100.00%"
    assert interval_text("accuracy", (0.5, 0.6)) == "[50.0, 60.0]"


def test_a_sentence_encoder_is_pruned_on_lines_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    bert(transformers.BertModel).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (tmp_path / "texts.txt").write_text("\n".join(f"w{5 + number} w{6 + number}" for number in range(20)) + "\n")
    command = prune_command(str(folder), str(tmp_path / "texts.txt"), tmp_path / "run", "--keep", "6", "--every", "3")
    done = program(*command)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "fidelity 100.00% -> " in text


def run_record(rows: int, *, dense: float = 0.9, pruned: float = 0.8, repair: str = "dense") -> dict[str, Any]:
    result = {"dense": dense, "pruned": pruned, "higher_is_better": True}
    return {"result": result, "settings": {"repair": repair}, "samples": {"calibration": rows}}


def test_more_calibration_is_advised_where_it_can_help() -> None:
    assert "used 1 row; 256 or more may" in calibration_text(run_record(1))
    assert "--calibration FILE" in calibration_text(run_record(255))
    assert calibration_text(run_record(256)) == ""
    assert calibration_text(run_record(64, pruned=0.9)) == ""
    assert calibration_text(run_record(64, repair="none")) == ""
    worse = run_record(64, dense=10.0, pruned=12.0)
    worse["result"]["higher_is_better"] = False  # perplexity
    assert calibration_text(worse)


def test_training_shows_a_bar_and_has_a_frame(capsys: pytest.CaptureFixture[str]) -> None:
    model, dense = pair()
    options = {"epochs": 2, "batch_size": 4, "evaluation": labelled(1, seed=9), "progress": True}
    result = headprune.finetune(model, labelled(4), teacher=dense, **options)
    bar = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    assert "Training" in bar
    assert "8/8" in bar
    assert f"accuracy before={result.before.value:.4g}" in bar
    frame = result.to_frame()
    assert frame["step"].tolist()[0] == 0  # the evaluation before training
    assert frame["accuracy"].dropna().tolist() == [evaluation.value for evaluation in result.evaluations]
    assert frame["loss"].notna().sum() == len(result.history)
    page = result._repr_html_()
    for name, value in (("dense", result.dense), ("before", result.before), ("after", result.after)):
        ends = f"[{value.interval.low:.4g}, {value.interval.high:.4g}]"
        cells = "".join(f"<td style='text-align:right'>{cell}</td>" for cell in (f"{value.value:.4g}", ends))
        assert f"<td style='text-align:left'>{name}</td>{cells}" in page
    drawn = result.plot().to_dict()["data"]["values"]
    total = [(row["step"], row["loss"]) for row in drawn if row["part"] == "total"]
    assert total == [(entry["step"], entry["loss"]) for entry in result.history]
    unmeasured = headprune.finetune(model, labelled(4), batch_size=4, progress=False)._repr_html_()
    assert "evaluation=batches" in unmeasured
    assert ">before<" not in unmeasured


# --- what a run says of itself ---


def test_a_run_that_nothing_stops_says_so_and_one_that_is_resumed_or_finished_too(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    command = prune_command(m.bert, m.data_csv, out, "--every", "6")
    first = program(*command)
    assert "Nothing stopped the run before the last unit; give --keep, --max-drop" in " ".join(first.out.split())
    assert "Resuming" not in first.err
    again = program(*command)
    assert f"{out} is finished; it goes on only if other stopping rules are given." in again.err
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({name: record[name] for name in record if name != "result"}))
    lines = (out / "steps.jsonl").read_text().splitlines(keepends=True)
    (out / "steps.jsonl").write_text("".join(lines[:2]))
    resumed = program(*command)
    assert f"Resuming {out}: 1 step is repeated first, with its repairs." in resumed.err
    kept = program(*prune_command(m.bert, m.data_csv, tmp_path / "kept", "--keep", "0.5"))
    assert "Nothing stopped" not in kept.out


def test_a_misspelt_option_in_python_is_named() -> None:
    with pytest.raises(CriterionError, match="There is no option 'keep_flop'; did you mean 'keep_flops'"):
        headprune.prune(ZOO["bert"].build(), [text_batch(0)], keep_flop=0.9)


def test_a_wrong_value_of_an_option_that_exists_is_not_called_misspelt() -> None:
    with pytest.raises(CriterionError) as error:
        headprune.prune(ZOO["bert"].build(), [text_batch(0)], criterion="attribution", steps=0)
    assert "did you mean" not in str(error.value)
