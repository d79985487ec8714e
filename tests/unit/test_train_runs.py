"""`headprune train`: what a run of learned gates writes, that it goes on after kills, and what it refuses."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import headprune
import headprune.runs.train_gates
from headprune.reports import gate_training as pictured
from headprune.reports.run_view import load_runs
from headprune.units import all_sites
from helpers import contents
from recovery_helpers import MOMENTS, killed
from run_helpers import Done, material, prune_command
from run_helpers import headprune as program

QUICK = ("--batch-size", "8", "--learning-rate", "1e-3", "--epochs", "2", "--evaluation-samples", "12")


def train(out: Path, *more: str, keep: tuple[str, ...] = ("--keep", "0.5"), data: str | None = None) -> Done:
    return program("train", material().bert, "--data", data or material().data_csv, *QUICK, *keep, *more, "--out", out)


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def weights_of(run: Path) -> tuple[bytes, ...]:
    return tuple((run / part / "model.safetensors").read_bytes() for part in ("model", "finetuned/model"))


def sentence(done: Done) -> str:
    assert done.code == 2, done
    assert done.out == ""
    return " ".join(done.err.split())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = train(out)
    assert done.code == 0, done.err
    return out


def test_what_a_training_writes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(out, "--json")
    assert done.code == 0, done.err
    record, said = record_of(out), done.json
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    dense, pruned = (headprune.load(place) for place in (material().bert, out / "model"))
    heads = sum(site.size for site in headprune.resolve(dense))
    assert said["units"] == {"heads": [heads, heads // 2]}
    assert sum(site.size for site in headprune.resolve(pruned)) == heads // 2
    gone = [[site.index, head] for site in headprune.resolve(pruned) for head in site.removed]
    assert sorted(steps[1]["removed"]) == sorted(gone)
    # What went has the lowest scores, which are log alpha.
    table = steps[1]["scores"]
    kept = [table[site.index][head] for site in headprune.resolve(pruned) for head in site.kept]
    assert max(table[site][head] for site, head in gone) <= min(kept)
    final = headprune.load(out / "finetuned" / "model")
    assert final.config.pruned_heads == pruned.config.pruned_heads
    assert said["model"] == str(out / "finetuned" / "model")
    assert said["recovered"] == json.loads((out / "finetuned" / "finetune.json").read_text())["recovered"]["value"]
    assert record["samples"] == {"training": 24, "evaluation": 12}
    assert record["gates"]["open_units"] == heads // 2
    assert record["gates"]["expected_units"] == pytest.approx(heads / 2, rel=1e-3)
    assert not (out / "training").exists()
    assert "learned gates (keep 0.5, setting shim)" in (out / "model" / "README.md").read_text()
    page = (out / "report.html").read_text()
    for part in ("Gates during training", "chart-gates-0", '<h2 id="recovered">Recovery</h2>'):
        assert part in page


def test_gates_over_time(original: Path) -> None:
    lines = [json.loads(line) for line in (original / "gates.jsonl").read_text().splitlines()]
    whose, values = lines[0]["gates"], lines[1:]
    assert [line["step"] for line in values] == list(range(7))  # 24 rows in batches of 8, twice
    assert {line["open"][0] for line in values[:1]} == {0.8808}  # sigmoid(2)
    assert len(whose) == len(values[0]["open"])
    cells, rows = pictured.values(load_runs([original])[0])
    assert len(rows) == len(whose)
    assert len(cells) == 7 * len(rows)
    assert cells[0] == {"step": 0, "until": 1, "gate": "0.0", "open": 0.881}


def test_the_command_in_the_report_repeats_the_run(original: Path) -> None:
    before = contents(original)
    words = shlex.split(load_runs([original])[0].command)
    assert words[:2] == ["headprune", "train"]
    done = program(*words[1:])
    assert done.code == 0, done.err
    assert contents(original) == before


def test_options_that_are_not_the_default_are_in_the_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ("--setting", "voita", "--start", "1.5", "--gate-rate", "20", "--gate-warmup", "0.25", "--difference", "0.5")
    done = train(out, *more, "--finetune-epochs", "0", "--warmup", "0", "--rescale", keep=("--l0", "0.2"))
    assert done.code == 0, done.err
    gates = record_of(out)["settings"]["gates"]
    assert gates["rescale"]  # said, so that the setting does not decide it
    assert (gates["rate"], gates["warmup"], gates["straight_through"], gates["l0"]) == (20.0, 0.25, False, 0.2)
    assert not (out / "finetuned").exists()
    before = contents(out)
    done = program(*shlex.split(load_runs([out])[0].command)[1:])
    assert done.code == 0, done.err
    assert contents(out) == before


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_training_goes_on_to_the_same_weights(original: Path, tmp_path: Path, moment: str) -> None:
    """Killed while its first checkpoint is written, then while that of the fine-tuning is."""
    out = tmp_path / "run"
    killed(lambda: train(out), moment, 1)
    assert "result" not in record_of(out)
    killed(lambda: train(out), moment, 2 if moment in ("marked", "tidied") else 3)
    done = train(out)
    assert done.code == 0, done.err
    assert weights_of(out) == weights_of(original)
    for name in ("steps.jsonl", "gates.jsonl"):
        assert (out / name).read_text() == (original / name).read_text()


def test_a_kill_between_the_removal_and_the_result(original: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "run"

    def stop(*parts: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(headprune.runs.train_gates, "_finish", stop)
    assert train(out).code == 130
    monkeypatch.undo()
    done = train(out)
    assert done.code == 0, done.err
    assert weights_of(out) == weights_of(original)
    assert (out / "steps.jsonl").read_text() == (original / "steps.jsonl").read_text()


def test_other_settings_need_to_overwrite(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, "--finetune-epochs", "0").code == 0
    assert "belongs to a run with other settings: gates was" in sentence(train(out, keep=("--keep", "0.75")))
    done = train(out, "--overwrite", keep=("--keep", "0.75"))
    assert done.code == 0, done.err
    heads = record_of(out)["result"]["units"]["heads"]
    assert heads[1] == 0.75 * heads[0]


def test_heads_and_neurons_under_a_budget(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(out, "--group", "4", "--finetune-epochs", "0", "--json", keep=("--keep-parameters", "0.8"))
    assert done.code == 0, done.err
    dense, model = headprune.load(material().bert), headprune.load(out / "model")
    left = {kind: sum(s.size for s in all_sites(model) if s.kind == kind) for kind in ("heads", "neurons")}
    assert {kind: count for kind, (_, count) in done.json["units"].items()} == left
    assert model.num_parameters() <= 0.8 * dense.num_parameters()
    assert record_of(out)["savings"]["shares"]["parameters"] <= 0.8
    assert "widths" in record_of(out)["result"]
    cells, rows = pictured.values(load_runs([out])[0])
    assert any("neurons" in row for row in rows)  # groups of neurons are shown by site
    assert all(0 <= cell["open"] <= 1 for cell in cells)


def test_other_data_evaluates(tmp_path: Path) -> None:
    """A row that is in both is not trained on."""
    out, other = tmp_path / "run", tmp_path / "other.csv"
    lines = Path(material().data_csv).read_text().splitlines(keepends=True)
    other.write_text("".join(lines[:21]))
    done = train(out, "--eval-data", str(other))
    assert done.code == 0, done.err
    samples = record_of(out)["samples"]
    assert samples["evaluation"] == 12
    assert samples["training"] <= 36 - 12
    assert json.loads((out / "finetuned" / "finetune.json").read_text())["samples"] == samples


def test_runs_of_gates_beside_others(original: Path, tmp_path: Path) -> None:
    other, page = tmp_path / "other", tmp_path / "page.html"
    m = material()
    assert program(*prune_command(m.bert, m.data_csv, other, "--keep", "6", "--evaluation-samples", "12")).code == 0
    done = program("report", original, other, "--out", page, "--figures", tmp_path / "figures")
    assert done.code == 0, done.err
    assert "chart-gates-0" in page.read_text()
    assert (tmp_path / "figures" / "gates-0.png").is_file()
    said = sentence(program("finetune", original, "--data", m.data_csv, "--cycles", "2"))
    assert "leave out --cycles" in said
    again = sentence(program(*prune_command(m.bert, m.data_csv, original, "--keep", "6")))
    assert "belongs to a run with other settings" in again


@pytest.mark.parametrize(
    "wrong",
    [("--metric", "nonsense"), ("--finetune-epochs", "inf"), ("--start", "nan"), ("--zeta", "inf")],
    ids=lambda words: words[0],
)
def test_a_wrong_option_leaves_a_finished_run_as_it_is(original: Path, wrong: tuple[str, str]) -> None:
    before = contents(original)
    assert sentence(train(original, *wrong, "--overwrite"))
    assert contents(original) == before


def test_an_adapter_in_the_way_leaves_a_finished_run_as_it_is(original: Path, tmp_path: Path) -> None:
    """It was refused after the run had been cleared."""
    run = Path(shutil.copytree(original, tmp_path / "run"))
    (run / "finetuned" / "model").mkdir(parents=True, exist_ok=True)
    (run / "finetuned" / "model" / "adapter_config.json").write_text("{}")
    before = contents(run)
    assert "holds an adapter" in sentence(train(run, "--overwrite"))
    assert contents(run) == before


def test_nothing_to_learn_from_is_said_before_anything_is_written(tmp_path: Path) -> None:
    out, texts = tmp_path / "run", tmp_path / "texts.csv"
    lines = Path(material().data_csv).read_text().splitlines()
    column = lines[0].split(",").index("text")
    assert column == 0
    texts.write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    said = sentence(train(out, "--distill", "0", "--hidden", "0", "--metric", "fidelity", data=str(texts)))
    assert "nothing to learn from" in said
    assert not out.exists()


def test_a_text_that_evaluates_is_not_trained_on_though_it_stands_twice(tmp_path: Path) -> None:
    data = tmp_path / "twice.csv"
    head, *lines = Path(material().data_csv).read_text().splitlines(keepends=True)
    data.write_text("".join([head, *lines, *lines]))
    assert train(tmp_path / "run", "--finetune-epochs", "0", data=str(data)).code == 0
    samples = record_of(tmp_path / "run")["samples"]
    assert samples["evaluation"] == 12
    assert samples["training"] < 2 * len(lines) - 12  # doubles of what evaluates are out as well


def test_what_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "one of l0, keep" in sentence(train(out, keep=()))
    assert "keep and l0" in sentence(train(out, "--l0", "0.1"))
    assert "0.01" in sentence(train(out, keep=("--keep-parameters", "0.01")))
    assert "leave none to train on" in sentence(train(out, "--evaluation-samples", "36"))
    assert "nothing.csv" in sentence(train(out, data="nothing.csv"))
    assert "nothing.csv" in sentence(train(out, "--eval-data", "nothing.csv"))
    assert "learning_rate must be" in sentence(train(out, "--learning-rate", "-1"))
    assert "no setting 'other'" in sentence(train(out, "--setting", "other"))
    assert not out.exists()
