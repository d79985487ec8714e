"""Recovery of runs by the command line: what it writes, that it goes on after kills, rounds, and what it refuses."""

from __future__ import annotations

import functools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
import headprune.cli.finetune
import headprune.runs.finetune
from headprune.checkpoint.fingerprint import fingerprint
from headprune.cli import progress
from headprune.data import load_examples
from headprune.reports.recovery import losses
from headprune.runs.cycle_targets import split_target
from headprune.runs.experiment import experiment_of
from headprune.search.config import Experiment
from helpers import contents
from kill_commands import die, dying
from recovery_helpers import MOMENTS, killed
from run_helpers import (
    COLOURS,
    Done,
    classifier,
    in_fork,
    interrupt,
    material,
    mostly_right,
    prune_command,
    sentences,
    write_rows,
)
from run_helpers import headprune as program

QUICK = ("--batch-size", "8", "--learning-rate", "1e-3", "--warmup", "0")


@functools.cache
def training() -> str:
    """Rows that no run is evaluated on."""
    texts = sentences(24, seed=5)
    named = [COLOURS[label] for label in mostly_right(classifier(), texts, seed=5)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, named, strict=True)]
    write_rows(material().root / "more_texts.csv", [{"text": row["text"]} for row in rows])
    return write_rows(material().root / "more.csv", rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    m, out = material(), tmp_path_factory.mktemp("original") / "run"
    done = program(*prune_command(m.bert, m.data_csv, out, "--keep", "8", "--evaluation-samples", "20"))
    assert done.code == 0, done.err
    return out


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def own(original: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run with a dense model and data of its own, to be moved and changed."""
    run, model, data = (tmp_path / name for name in ("run", "bert", "data.csv"))
    shutil.copytree(original, run)
    shutil.copytree(material().bert, model)
    shutil.copy(material().data_csv, data)
    known = json.loads((run / "run.json").read_text())
    known["settings"].update(model=str(model), data=str(data))
    known["settings"].update(model_fingerprint=fingerprint(str(model)), data_fingerprint=fingerprint(str(data)))
    (run / "run.json").write_text(json.dumps(known))
    return run, model, data


def finetune(run: Path, *more: str, data: str | None = None) -> Done:
    return program("finetune", run, "--data", data or training(), *QUICK, *more)


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "finetuned" / "finetune.json").read_text())


def weights_of(run: Path) -> bytes:
    return (run / "finetuned" / "model" / "model.safetensors").read_bytes()


def sentence(done: Done) -> str:
    assert done.code == 2, done
    assert done.out == ""
    return " ".join(done.err.split())


def test_what_a_recovery_writes(run: Path) -> None:
    done = finetune(run, "--json")
    assert done.code == 0, done.err
    said, record = done.json, record_of(run)
    assert said["model"] == str(run / "finetuned" / "model")
    for name in ("dense", "pruned", "recovered"):
        assert record[name] == {"value": said[name], "interval": said[f"{name}_interval"]}
    known = json.loads((run / "run.json").read_text())["result"]
    assert (said["dense"], said["pruned"]) == (known["dense"], known["pruned"])
    assert said["samples"] == {"training": 24, "evaluation": 20}
    assert said["steps"] == said["best_step"] == 3
    assert [entry["step"] for entry in record["history"]] == [1, 2, 3]
    assert set(record["history"][0]) >= {"loss", "task_loss", "logits_loss", "hidden_loss"}
    model = headprune.load(run / "finetuned" / "model")
    assert model.config.pruned_heads == headprune.load(run / "model").config.pruned_heads
    assert _accuracy(model, run) == said["recovered"]
    assert not torch.equal(model.classifier.weight, headprune.load(run / "model").classifier.weight)
    assert sorted(entry.name for entry in (run / "finetuned").iterdir() if entry.is_dir()) == ["model"]
    assert (run / "finetuned" / "model" / "tokenizer.json").is_file()
    card = (run / "finetuned" / "model" / "README.md").read_text()
    assert "## Recovery" in card
    assert "from labels and the dense model: 1 epoch," in card
    assert losses(record).to_dict()["mark"]["type"] == "line"  # checked against the schema
    page = (run / "report.html").read_text()
    assert '<h2 id="recovered">Recovery</h2>' in page
    assert "chart-losses-0" in page


def _accuracy(model: Any, run: Path) -> float:
    """On the run's evaluation rows, drawn as a run draws them, one sample at a time."""
    settings = json.loads((run / "run.json").read_text())["settings"]
    examples = load_examples(model, settings["data"], processor=settings["model"])
    _, rest = examples.split(8, settings["seed"])
    rows = rest.sample(20, settings["seed"]).rows
    right = 0
    with torch.no_grad():
        for row in rows:
            inputs = {name: value[None] for name, value in row.items() if name != "labels"}
            right += int(model(**inputs).logits.argmax() == row["labels"])
    return right / 20


def test_a_finished_recovery_says_its_result_again(own: tuple[Path, Path, Path]) -> None:
    run, model, _ = own
    first = finetune(run, "--json")
    before = contents(run)
    shutil.rmtree(model)
    assert finetune(run, "--json").json == first.json
    assert contents(run) == before
    assert "accuracy" in finetune(run).out


def test_other_settings_need_to_overwrite(run: Path) -> None:
    finetune(run)
    before = weights_of(run)
    said = sentence(finetune(run, "--epochs", "2"))
    assert "epochs was 1.0 and is now 2.0; use the same settings, or --overwrite." in said
    assert weights_of(run) == before
    assert finetune(run, "--seed", "3", "--overwrite").code == 0
    assert weights_of(run) != before
    (run / "finetuned" / "finetune.json").write_text("{")
    assert "finetune.json is damaged, or was written by another program" in sentence(finetune(run, "--overwrite"))


def test_lora_and_labels_alone(own: tuple[Path, Path, Path]) -> None:
    """Without a teacher the dense model may be gone; what it was worth, the run knows."""
    run, model, _ = own
    shutil.rmtree(model)
    done = finetune(run, "--no-distill", "--lora", "2", "--json")
    refused = finetune(run, "--overwrite")
    assert done.code == 0, done.err
    assert done.json["dense"] == json.loads((run / "run.json").read_text())["result"]["dense"]
    assert "logits_loss" not in record_of(run)["history"][0]
    assert "does not exist any more; restore it, or leave it out with --no-distill." in sentence(refused)
    assert record_of(run)["recovered"]  # and what was there still is


def test_texts_without_labels_are_enough(run: Path) -> None:
    training()
    done = finetune(run, "--json", data=str(material().root / "more_texts.csv"))
    assert done.code == 0, done.err
    assert "task_loss" not in record_of(run)["history"][0]
    assert done.json["metric"] == "accuracy"


def test_evaluation_rows_are_not_trained_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = finetune(run, "--json", data=material().data_csv)
    assert done.code == 0, done.err
    assert done.json["samples"] == {"training": 16, "evaluation": 20}
    shared = f"20 of the 36 rows of {material().data_csv} are evaluation rows of {run}"
    assert done.json["notes"] == [f"{shared}; they are left out, and the other 16 are trained on."]
    assert done.json["notes"][0] in caplog.text


def test_neither_are_the_same_rows_in_another_file(run: Path, tmp_path: Path) -> None:
    header, *rows = Path(material().data_csv).read_text().splitlines()
    mixed = tmp_path / "mixed.csv"
    mixed.write_text("\n".join([header, *Path(training()).read_text().splitlines()[1:], *reversed(rows)]) + "\n")
    done = finetune(run, "--json", data=str(mixed))
    assert done.code == 0, done.err
    assert done.json["samples"] == {"training": 40, "evaluation": 20}
    assert done.json["notes"][0].startswith("20 of the 60 rows of")


def test_points_of_a_budget(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    budget = ("--keep-parameters", "0.95,0.9", "--evaluation-samples", "20", "--rounds", "2", "--units", "heads")
    assert program(*prune_command(m.bert, m.data_csv, out, *budget)).code == 0
    assert "has no point 'x'; there are: parameters-0.9, parameters-0.95." in sentence(finetune(out, "--point", "x"))
    assert "leave out --point, or --cycles." in sentence(finetune(out, "--point", "parameters-0.95", "--cycles", "2"))
    assert finetune(out, "--point", "parameters-0.95").code == 0
    model, point = (headprune.load(out / name) for name in ("finetuned/model", "models/parameters-0.95"))
    assert model.config.pruned_heads == point.config.pruned_heads
    turns = finetune(out, "--cycles", "2", "--overwrite", "--json")
    assert turns.code == 0, turns.err
    parameters = [headprune.load(place).num_parameters() for place in (m.bert, out / "finetuned" / "model")]
    assert parameters[1] <= 0.9 * parameters[0]
    assert len(turns.json["rounds"]) == 2


# --- kills ---


def test_a_killed_recovery_goes_on_to_the_same_weights(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    options = ("--epochs", "2", "--evals-per-epoch", "2", "--save-steps", "1")
    assert finetune(run, *options).code == 0
    for number, moment in enumerate(MOMENTS):
        killed(lambda: finetune(other, *options), moment, 1 + number % 2)
        assert not list((other / "finetuned").glob("model"))
    assert _killed_at("write_text", lambda: finetune(other, *options))
    assert finetune(other, *options).code == 0
    assert weights_of(other) == weights_of(run)
    one, two = (record_of(folder) for folder in (run, other))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    assert not (other / "finetuned" / "trainer").exists()


def _killed_at(name: str, work: Callable[[], Any]) -> bool:
    """Killed when the model is saved, but not yet written down."""

    def dying_work() -> None:
        setattr(headprune.runs.finetune, name, lambda *_, **__: die())
        work()

    return in_fork(dying_work) == -signal.SIGKILL


def test_rounds_reach_the_target_of_the_run_and_go_on_after_kills(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    done = finetune(run, "--cycles", "2", "--json")
    assert done.code == 0, done.err
    assert [one["left"] for one in done.json["rounds"]] == ["10 of 12 heads", "8 of 12 heads"]
    model = headprune.load(run / "finetuned" / "model")
    first = headprune.load(run / "finetuned" / "round-1" / "recovered")
    assert sum(len(heads) for heads in model.config.pruned_heads.values()) == 4
    for site, heads in first.config.pruned_heads.items():
        assert set(heads) <= set(model.config.pruned_heads[site])
    assert [entry["step"] for entry in record_of(run)["history"]] == [1, 2, 3, 4, 5, 6]
    card = (run / "finetuned" / "model" / "README.md").read_text()
    assert "in 2 cycles of pruning and training" in card
    for site, heads in model.config.pruned_heads.items():
        assert f"{site}: {sorted(heads)}" in card
    assert "10 of 12 heads" in (run / "report.html").read_text()

    for moment, work in (("torn", 1), ("after", 0)):  # in the journal of the first round
        assert _killed_in_journal(lambda: finetune(other, "--cycles", "2"), moment, work)
    killed(lambda: finetune(other, "--cycles", "2"), "weights", 1)
    killed(lambda: finetune(other, "--cycles", "2"), "marked", 2)  # in the second round
    assert _killed_at("save", lambda: finetune(other, "--cycles", "2"))
    assert finetune(other, "--cycles", "2").code == 0
    assert weights_of(other) == weights_of(run)
    assert record_of(other)["rounds"] == record_of(run)["rounds"]


def _killed_in_journal(work: Callable[[], Any], moment: str, steps: int) -> bool:
    from headprune.run_folder import Run

    def dying_work() -> None:
        Run.write_line = dying(Run.write_line, moment, steps)  # type: ignore[method-assign]
        work()

    return in_fork(dying_work) == -signal.SIGKILL


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--epochs", "0"), "epochs must be a number above 0, not 0.0."),
        (("--cycles", "5"), "The run removed 4 of 12 heads, too few for 5 cycles; use fewer."),
        (("--point", "x"), "has no point 'x'; it has none; leave --point out."),
        (("--label-column", "nothing"), "nothing"),
    ],
)
def test_bad_options_write_nothing(options: tuple[str, ...], said: str, run: Path) -> None:
    before = contents(run)
    assert said in sentence(finetune(run, *options))
    assert contents(run) == before


@pytest.mark.parametrize("what", ["data", "unlabelled", "no-run", "unfinished", "dense", "evaluation"])
def test_bad_input_writes_nothing(
    what: str, own: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, data = own
    source, options = training(), []
    if what == "data":
        source, said = str(tmp_path / "nothing.csv"), "There is no file"
    elif what == "unlabelled":
        source, options = str(material().root / "more_texts.csv"), ["--no-distill"]
        said = "There is nothing to learn from"
    elif what == "no-run":
        run, said = model, "is not a run directory: it has no run.json."
    elif what == "unfinished":
        interrupt(run, 2)
        said = "is not finished, so it has no model; resume it first."
    elif what == "dense":
        (model / "config.json").write_text((model / "config.json").read_text() + " ")
        said = "has changed since, so it cannot be the teacher; restore it, or leave it out with --no-distill."
    else:
        data.write_text(data.read_text() + "w9 w8,red\n")
        said = "has changed since, so its numbers cannot be compared; restore it."
    before = contents(tmp_path)
    assert said in sentence(finetune(run, *options, data=source))
    assert contents(tmp_path) == before


def test_a_run_that_evaluates_on_everything_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    assert program(*prune_command(m.bert, m.data_csv, out, "--keep", "11", "--calibration", training())).code == 0
    assert "so none is left to train on; use other data" in sentence(finetune(out, data=m.data_csv))


def test_a_run_that_went_on_shows_no_recovery_of_what_it_was(run: Path) -> None:
    finetune(run)
    command = prune_command(material().bert, material().data_csv, run, "--keep", "7", "--evaluation-samples", "20")
    assert program(*command).code == 0
    assert "Recovery</h2>" not in (run / "report.html").read_text()
    assert "model_fingerprint was" in sentence(finetune(run))


# --- the parts of a target ---


def test_progress_says_the_loss_and_the_last_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", -1)  # every line
    with progress.live_curve("Pruning") as observer:
        for logs in (
            {"step": 1, "loss": 0.5},
            {"step": 2, "eval_metric": 0.75, "eval_loss": 0.4},
            {"step": 3, "loss": 0.25},
            {"step": 3, "train_runtime": 1.0},
            {"step": 1, "loss": 0.125},  # of a second training
        ):
            observer.log({**logs, "steps": 3, "metric": "accuracy"})
    assert capsys.readouterr().err.splitlines() == [
        "Training: step 1 of 3, loss 0.5",
        "Training: step 2 of 3, loss 0.5, accuracy 0.75 on held-out data at step 2",
        "Training: step 3 of 3, loss 0.25, accuracy 0.75 on held-out data at step 2",
        "Training: step 1 of 3, loss 0.125",
    ]


def test_parts_of_a_target() -> None:
    heads = Experiment(model="m", data="d", keep=0.5, max_drop=0.1)
    plan = split_target(heads, {"units": {"heads": [12, 6]}}, 3)
    assert [part["keep"] for part in plan] == [10, 8, 6]
    assert all(part["max_drop"] is None for part in plan)
    left = 1.0
    for part in split_target(Experiment(model="m", data="d", keep_flops=(0.8, 0.4)), {}, 3):
        left *= part["keep_flops"][0]
    assert left == pytest.approx(0.4)
    fast = 1.0
    for part in split_target(Experiment(model="m", data="d", speedup=3.0), {}, 4):
        fast *= part["speedup"][0]
    assert fast == pytest.approx(3.0)


def test_an_experiment_comes_back_from_its_record() -> None:
    for options in ({"keep": 0.5}, {"keep_parameters": (0.8, 0.5)}, {"method": "kwon", "keep_flops": 0.5}):
        experiment = Experiment(model="m", data="d", **options)
        settings = json.loads(json.dumps(experiment.settings()))
        assert experiment_of({"settings": settings}).settings() == experiment.settings()
