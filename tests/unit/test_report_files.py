"""What a report writes beside its page: figures, the command that repeats a run, the model card, errors."""

from __future__ import annotations

import io
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from huggingface_hub import ModelCard, ModelCardData
from rich.console import Console
from typer.testing import CliRunner

from headprune.cli import main as cli
from headprune.cli.run_summary import print_run
from headprune.errors import RunError
from headprune.measure.intervals import wilson
from headprune.reports.card import model_card, run_card
from headprune.reports.format import removed_text
from headprune.reports.page import charts, render, write_report
from headprune.reports.run_view import load_runs
from headprune.run_folder import Run
from headprune.runs.experiment import Experiment
from pictures import drawing
from synthetic_runs import EVIL, make_run

# --- what is shown ---


def test_comparison_leaves_out_what_a_run_did_not_reach(tmp_path: Path) -> None:
    """The area is that of the range that both cover; without one, areas do not compare."""
    falling = [0.9 - 0.02 * step for step in range(13)]
    make_run(tmp_path / "runs" / "long", values=falling, savings=False)
    make_run(tmp_path / "runs" / "short", steps=4, values=falling, savings=False)
    text = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    row = text.split('<td class="name">short</td>')[1].split("</tr>")[0]
    assert row.count("<td>\u2013</td>") == 2
    assert "\u2013" not in text.split('<td class="name">long</td>')[1].split("</tr>")[0]
    assert "<th>area to 33%</th>" in text
    assert "their areas cannot be compared" not in text
    make_run(tmp_path / "runs" / "other", measured="perplexity", savings=False)
    text = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    assert "their areas cannot be compared" in text
    assert "Best: " not in text


def test_heads_that_are_not_there_are_not_drawn(tmp_path: Path) -> None:
    """Padding of ragged sites, and heads that were gone before the run."""
    ragged = load_runs([make_run(tmp_path / "ragged", (2, 5, 3))])[0]
    assert [head.site for head in ragged.heads] == [0] * 2 + [1] * 5 + [2] * 3
    unfinished = load_runs([make_run(tmp_path / "unfinished", (2, 5, 3), stop=None, steps=1)])[0]
    assert unfinished.heads == ragged.heads


# --- compensation ---


def said_first(folder: Path) -> str:
    page = write_report([folder], folder / "report.html").read_text()
    return " ".join(page.split("<h1>")[1].split("</header>")[0].split())


def test_the_page_says_what_made_up_for_the_heads(tmp_path: Path) -> None:
    """The median of the removals up to the stop, the sixth of twelve; those after it do not count."""
    shares = [0.5, 0.9, 0.7, 0.8, 0.6, 0.75, *[0.0] * 6]
    text = said_first(make_run(tmp_path / "run", criterion="his", repair="lstsq", repaired=shares))
    assert "removed</strong> by his with least-squares repair: accuracy" in text
    assert "Repair undid 72.50% of the squared change of site outputs on the calibration data" in text
    text = said_first(make_run(tmp_path / "mean", criterion="his", repair="mean"))
    assert "removed</strong> by his with the mean moved into the bias: accuracy" in text
    assert "Repair undid" not in text


def test_the_page_of_a_run_without_compensation_says_nothing_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", criterion="gnorm", repair="none")
    text = said_first(folder)
    assert "removed</strong> by gnorm: accuracy" in text
    assert "ompensation" not in text
    forget_compensation(folder)
    assert said_first(folder) == text


def forget_compensation(folder: Path) -> None:
    """The run as it was written before there was any."""
    record = json.loads((folder / "run.json").read_text())
    del record["settings"]["repair"]
    (folder / "run.json").write_text(json.dumps(record))
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        del line["compensation"]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_site_that_could_not_be_measured_does_not_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", repaired=[0.5, 0.5, 0.5])
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines[4]["compensation"] = [{"site": 0, "kind": "none", "error_without": None, "error": None}]
    lines[5]["compensation"] = [{"site": 0, "kind": "lstsq", "error_without": 0.0, "error": 0.0}]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_runs([folder])[0].repaired_share == 0.5


def test_the_command_of_a_run_from_before_compensation_asks_for_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", criterion="gnorm", repair="none")
    forget_compensation(folder)
    words = shlex.split(load_runs([folder])[0].command)
    parsed = typer.main.get_command(cli.app).commands["prune"].make_context("prune", words[2:]).params  # type: ignore[attr-defined]
    assert (parsed["criterion"], parsed["repair"]) == ("gnorm", "none")


@pytest.mark.parametrize("repair", ["lstsq", "none", None])
def test_the_console_says_how_heads_were_compensated(tmp_path: Path, repair: str | None) -> None:
    folder = make_run(tmp_path / "run", criterion="hies(alpha=0.7)", repair=repair or "none")
    if repair is None:
        forget_compensation(folder)
    text = io.StringIO()
    print_run(folder, json.loads((folder / "run.json").read_text()), Console(file=text, width=160))
    assert f"Criterion hies(alpha=0.7), repair {repair or 'none'}." in text.getvalue()


# --- figures ---


def test_every_figure_is_written_in_every_format(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name, criterion=name) for name in ("gnorm", "his")]
    runs += [make_run(tmp_path / "runs" / f"r{seed}", seed=seed, criterion=f"random(seed={seed})") for seed in range(3)]
    page = write_report(runs, tmp_path / "report.html", figure_folder=tmp_path / "figures").read_text()
    made = charts(load_runs(runs))
    assert set(charts(load_runs(runs), saved=True)) == set(made)
    assert set(made) == {"metric", "agreement", "mask-gnorm", "scores-gnorm", "mask-his", "scores-his"}
    files = {file.name for file in (tmp_path / "figures").iterdir()}
    assert files == {f"{name}.{form}" for name in made for form in ("png", "svg", "pdf")}
    drawings = {name: drawing(tmp_path / "figures", name) for name in made}
    titles = {"metric": "accuracy while heads are removed", "agreement": "stability: agreement with the dense model"}
    for name, title in titles.items():
        assert {"gnorm", "his", "random (3 runs)", "share of heads removed", title} <= set(drawings[name].texts)
    for run in load_runs(runs[:2]):
        assert f"Heads left after step {run.stop}{run.name}" in drawings[f"mask-{run.name}"].texts
        assert f"Scores that led to step 1{run.name}" in drawings[f"scores-{run.name}"].texts
        labels = drawings[f"mask-{run.name}"].labels
        cells = {label.rsplit("; state: ")[0]: label for label in labels if label.startswith("head: ")}
        assert len(cells) == len(run.heads) == 12
        for head in run.heads:
            step = run.removed_at[head]
            state = "kept" if step > run.stop else "removed before" if step < run.stop else "removed in this step"
            cell = f"head: {head.index}; site: {head.site}"
            assert cells[cell] == f"{cell}; state: {state}"
    shown = json.loads(page.split("const specifications = ")[1].split(";\nconst runs")[0])
    assert shown["metric"] == made["metric"].to_dict()
    assert shown["agreement"] == made["agreement"].to_dict()
    assert shown["mask"] == made["mask-gnorm"].to_dict()
    assert shown["scores"] == made["scores-gnorm"].to_dict()


def test_a_saved_figure_marks_a_step_only_where_a_rule_chose_it(tmp_path: Path) -> None:
    """In the page there is a point beside the ring, which moves with the slider."""
    marks = 'aria-roledescription="point"'
    for rule, counted in (("keep 0.5", 1), ("the end of the curve", 0)):
        run = make_run(tmp_path / rule.split()[0])
        record = json.loads((run / "run.json").read_text())
        record["result"]["rule"] = rule
        (run / "run.json").write_text(json.dumps(record))
        write_report([run], tmp_path / "report.html", figure_folder=tmp_path / "figures")
        svg = (tmp_path / "figures" / "metric.svg").read_text()
        assert (svg.count(marks), "ring: where a run stopped" in svg) == (counted, counted > 0)
        names = {param["name"] for param in charts(load_runs([run]))["metric"].to_dict()["params"]}
        assert {"at_removed", "at_value", "at_colour"} <= names


def contents(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Of every file below a folder its bytes, and of every file and folder the time of its last change."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def test_a_report_leaves_the_folders_of_its_runs_as_they_are(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name, criterion=name) for name in ("gnorm", "his")]
    before = contents(tmp_path / "runs")
    assert {"gnorm/run.json", "gnorm/steps.jsonl", "his/run.json"} <= before.keys()
    result = CliRunner().invoke(
        cli.app,
        ["report", *map(str, runs), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "figures")],
    )
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "runs") == before
    assert (tmp_path / "r.html").is_file()


# --- bad input ---


def test_bad_input_is_one_sentence_and_writes_nothing(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", steps=1)
    (tmp_path / "empty").mkdir()
    with Run(tmp_path / "begun", Experiment(model="m", data="d").settings()):
        pass
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"settings": {"mod')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("[]")
    (tmp_path / "file").write_text("")
    out = tmp_path / "report.html"
    wrong: list[tuple[list[Path], Path, Path | None, str]] = [
        ([tmp_path / "nowhere"], out, None, "not a run directory"),
        ([tmp_path / "empty"], out, None, "not a run directory"),
        ([tmp_path / "begun"], out, None, "no step yet"),
        ([good, tmp_path / "torn"], out, None, "damaged"),
        ([tmp_path / "other"], out, None, "damaged"),
        ([], out, None, "at least one run"),
        ([good], tmp_path / "missing" / "report.html", None, "There is no directory"),
        ([good], tmp_path / "empty", None, "is a directory"),
        ([good], out, tmp_path / "file", "is a file"),
    ]
    for runs, to, figures, message in wrong:
        with pytest.raises(RunError, match=message) as caught:
            write_report(runs, to, figure_folder=figures)
        assert str(caught.value).count("\n") == 0
        assert str(caught.value).endswith(".")
        assert not out.exists()
    assert not (tmp_path / "missing").exists()


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_run(tmp_path / place / "x" / "run", steps=1) for place in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == ["a/x/run", "b/x/run"]
    assert len(load_runs([folders[0], folders[0]])) == 1
    monkeypatch.chdir(folders[0])
    here = load_runs(["."])[0]
    assert here.name == "run"
    assert here.command.endswith(f"--out {folders[0].resolve()}")  # "." would be another place for a reader


# --- intervals ---


def test_the_summary_has_intervals_and_says_why_it_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", values=[0.9] * 6 + [0.8] * 7, samples=200)
    text = io.StringIO()
    print_run(folder, json.loads((folder / "run.json").read_text()), Console(file=text, width=200))
    said = [f"[{100 * low:.1f}, {100 * high:.1f}]" for low, high in (wilson(180, 200), wilson(160, 200))]
    first = f"Removed 6 of 12 heads: accuracy 90.00% {said[0]} -> 80.00% {said[1]}, agreement"
    assert first in text.getvalue()
    assert "Stopped at step 6 of 12 by keep 0.5." in text.getvalue()
    page = said_first(folder)
    assert f"accuracy 90.00% {said[0]} \u2192 <strong>80.00% {said[1]}</strong>" in page
    assert "Stopped at step 6 of 12 by keep 0.5." in page
    body = model_card(json.loads((folder / "run.json").read_text()))
    cells = [one.replace("[", "\\[").replace("]", "\\]") for one in said]
    assert f"| accuracy | 90.00% {cells[0]} | 80.00% {cells[1]} |" in body
    assert "95% interval" in body


def test_bands_are_where_intervals_are(tmp_path: Path) -> None:
    known = make_run(tmp_path / "known", samples=64, criterion="gnorm")
    unknown = make_run(tmp_path / "unknown", criterion="his")
    drawn = charts(load_runs([known, unknown]))
    bands = next(layer for layer in drawn["metric"].to_dict()["layer"] if layer["mark"].get("type") == "area")
    steps = load_runs([known])[0].steps
    rows = bands["data"]["values"]
    assert [(row["low"], row["high"]) for row in rows] == [tuple(step.interval) for step in steps]  # type: ignore[arg-type]
    assert {row["run"] for row in rows} == {"known"}
    assert bands["mark"]["opacity"] == pytest.approx(0.12)
    assert all(layer["mark"].get("type") != "area" for layer in drawn["agreement"].to_dict()["layer"])
    alone = charts(load_runs([unknown]))["metric"].to_dict()
    assert all(layer["mark"].get("type") != "area" for layer in alone["layer"])


def test_one_wide_interval_does_not_flatten_the_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", values=[10.0 + step for step in range(13)], measured="perplexity")
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line["interval"] = [9.0, 1e9]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers = charts(load_runs([folder]))["metric"].to_dict()["layer"]
    (domain,) = {
        tuple(layer["encoding"]["y"]["scale"]["domain"]) for layer in layers if "scale" in layer["encoding"]["y"]
    }
    assert domain == pytest.approx((9.0, 22 + 0.2 * 12))


# --- how it was made ---


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"keep": 0.5, "same_data": True, "metric": "f1", "labels": "self", "min_per_site": 1},
        {"criterion": "gnorm", "repair": "none", "vocabulary": ("a text.txt", "b.csv")},
        {"max_drop": 0.01, "explore": True, "calibration": "train set.csv", "processor": "tok", "split": "test"},
        {"knee": True, "criterion": "hies(alpha=0.7)", "evaluation_samples": 10, "dtype": "bfloat16", "keep": None},
    ],
)
def test_the_command_parses_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    columns = {"text_column": "a text", "label_column": "y"} if settings else {}
    experiment = Experiment(model="org/tiny", data="data.csv", **{**columns, **settings})
    values = dict(experiment.explicit)
    run = load_runs([make_run(tmp_path / "my run", steps=1, **values)])[0]
    words = shlex.split(run.command)
    assert words[:3] == ["headprune", "prune", "org/tiny"]
    command = typer.main.get_command(cli.app).commands["prune"]  # type: ignore[attr-defined]
    parsed = command.make_context("prune", words[2:]).params
    assert parsed["out"] == tmp_path / "my run"
    assert (None if parsed["keep"] is None else float(parsed["keep"])) == experiment.keep
    for name, value in values.items():
        if name != "keep":
            # What may be given several times is parsed as all of them, none included.
            said = tuple(parsed[name]) or None if name == "vocabulary" else parsed[name]
            assert said == value, name


# --- the model card ---


def card(folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    make_run(folder, **options)
    text = model_card(json.loads((folder / "run.json").read_text()))
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


def test_model_card_says_what_how_and_costs(tmp_path: Path) -> None:
    header, body = card(tmp_path / "run", criterion="hies(alpha=0.7)", seed=3)
    assert header["library_name"] == "transformers"
    assert header["base_model"] == "org/tiny-bert"
    assert {"headprune", "pruned"} <= set(header["tags"])
    assert "# tiny-bert, 6 of 12 attention heads removed" in body
    assert "criterion `hies(alpha=0.7)`, repair `lstsq`, schedule `greedy`" in body
    assert "16 calibration samples, 64 evaluation samples" in body
    assert "| parameters | 1,120,000 | 1,060,000 |" in body
    assert "| milliseconds, batch of 32 | 4.0 | 3.0 |" in body
    assert "| MFLOPs, one sequence of 32 tokens | 9.000 | 9.000 |" in body
    mask = json.loads((tmp_path / "run" / "run.json").read_text())["result"]["mask"]
    for site, row in enumerate(mask):
        assert f"{site}: {[head for head, kept in enumerate(row) if not kept]}" in body


def evaluated(folder: Path, task: str = "sequence-classification", **options: Any) -> tuple[ModelCard, dict[str, Any]]:
    """The card as the hub's library reads it, and the result of the run."""
    record = json.loads((make_run(folder, **options) / "run.json").read_text())
    return ModelCard(model_card({**record, "task": task})), record["result"]


def test_the_model_index_has_what_was_measured(tmp_path: Path) -> None:
    read, result = evaluated(tmp_path / "run", data="/home/me/reviews.tsv", split="test")
    assert read.data.model_name == "tiny-bert-pruned"
    assert read.data.metrics == ["accuracy"]
    assert read.data.datasets is None  # which is for those of the hub
    (actual,) = read.data.eval_results
    assert (actual.task_type, actual.dataset_type, actual.dataset_name) == ("text-classification", "csv", "reviews.tsv")
    assert (actual.metric_type, actual.metric_value, actual.dataset_split) == ("accuracy", result["pruned"], "test")
    assert "/home/me" not in read.content
    assert ModelCardData(**yaml.safe_load(read.data.to_yaml())).eval_results == read.data.eval_results


def test_the_model_index_names_data_sets_and_metrics_as_the_hub_does(tmp_path: Path) -> None:
    read, _ = evaluated(tmp_path / "run", data="stanfordnlp/imdb", measured="matthews")
    (actual,) = read.data.eval_results
    assert (actual.dataset_type, actual.dataset_name) == ("stanfordnlp/imdb", "stanfordnlp/imdb")
    assert read.data.datasets == ["stanfordnlp/imdb"]
    assert (actual.metric_type, actual.metric_name) == ("matthews_correlation", "matthews")


def test_what_was_not_measured_is_not_in_the_model_index(tmp_path: Path) -> None:
    assert evaluated(tmp_path / "nan", values=[0.9] + [math.nan] * 12)[0].data.eval_results is None
    assert evaluated(tmp_path / "task", task="")[0].data.eval_results is None


def test_a_recovered_model_has_its_own_value(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    recovery = {
        "settings": {"distill": 1.0, "hidden": 0.0, "lora": 0, "epochs": 1, "learning_rate": 1e-4, "seed": 0},
        "samples": {"training": 100, "evaluation": 64},
        "metric": "accuracy",
        "steps": 7,
        "best_step": 7,
        **{name: {"value": value, "interval": None} for name, value in (("dense", 0.9), ("recovered", 0.875))},
    }
    record = json.loads((folder / "run.json").read_text())
    read = ModelCard(model_card({**record, "task": "sequence-classification"}, recovery=recovery))
    assert [one.metric_value for one in read.data.eval_results] == [0.875]
    assert "## Recovery\n\nTrained all weights on 100 samples from the dense model: 1 epoch," in read.content
    assert "\n\n| | dense | recovered |\n|---|---|---|\n| accuracy | 90.00% | 87.50% |\n\n## Use\n" in read.content
    assert "## Recovery" not in run_card(folder)
    assert "## Recovery" in run_card(folder, "finetuned/model", recovery=recovery)


def test_the_card_of_a_point_is_that_of_a_run_that_stops_there(tmp_path: Path) -> None:
    """The journal of the longer run says all of it."""
    options: dict[str, Any] = {"neurons": (1000, 1000, 2000), "samples": 64, "savings": False}
    folder = make_run(tmp_path / "run", stop=0.75, **options)
    record = json.loads((folder / "run.json").read_text())
    measured = {"metric": 0.8, "interval": None, "units": {"heads": 6}, "shares": {"flops": 0.8}}
    record["points"] = [{"label": "flops-0.8", "step": 6, "model": "models/flops-0.8", **measured}]
    (folder / "run.json").write_text(json.dumps(record))
    other = json.loads((make_run(tmp_path / "other", stop=0.5, **options) / "run.json").read_text())
    assert other["result"]["step"] == 6
    other["result"]["rule"] = "the point flops-0.8 of its budget"
    assert run_card(folder, "models/flops-0.8") == model_card(other)


def test_model_card_of_a_run_from_before_compensation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", criterion="gnorm")
    forget_compensation(folder)
    body = model_card(json.loads((folder / "run.json").read_text()))
    assert "criterion `gnorm`, repair `none`, schedule `greedy`" in body


def test_model_card_of_a_ragged_model_claims_no_padding(tmp_path: Path) -> None:
    _, body = card(tmp_path / "run", heads=(2, 5, 3), savings=False)
    mask = json.loads((tmp_path / "run" / "run.json").read_text())["result"]["mask"]
    assert "5 of 10 attention heads removed" in body
    for site, row in enumerate(mask):
        if any(row):
            assert f"{site}: {[head for head, kept in enumerate(row) if kept]}" in body.split("Kept heads")[1]


@pytest.mark.parametrize("name", ["/data/models/bert", "../bert", "models/of/mine", "./bert", EVIL])
def test_local_paths_are_no_base_model(tmp_path: Path, name: str) -> None:
    assert "base_model" not in card(tmp_path / "run", model=name)[0]


def test_a_folder_that_looks_like_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert "base_model" not in card(tmp_path / "run", model="org/model")[0]
    assert card(tmp_path / "other", model="bert-base-uncased")[0]["base_model"] == "bert-base-uncased"


def test_model_card_without_numbers(tmp_path: Path) -> None:
    _, body = card(tmp_path / "run", values=[0.9] + [math.nan] * 12, savings=False, model=EVIL)
    assert "| accuracy | 90.00% | - |" in body
    assert "\n# title\\>\\<img" in body  # escaped, so that it is text


def test_texts_of_a_run_of_heads_and_neurons_name_both(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "both", (4, 4, 4), neurons=(1000, 1000, 2000), stop=0.5)
    (run,) = load_runs([folder])
    assert run.result is not None
    gone = 4000 - run.steps[6].neurons
    assert removed_text(run.result) == f"6 of 12 heads and {gone:,} of 4,000 neurons"
    page = render([run])
    assert f"6 of 12 heads and {gone:,} of 4,000 neurons removed" in page
    assert "What removing heads and neurons does" in page
    assert "share of the FLOPs of heads and neurons removed" in page
    assert len(run.heads) == 12
    card = model_card(run.record)
    assert f"6 of 12 attention heads and {gone:,} of 4,000 neurons removed" in card
    assert f"| neurons | 4,000 | {4000 - gone:,} |" in card
    assert "Neurons left, by feed-forward site that lost some: 3: 200 of 1,000; " in card


def test_a_run_of_heads_alone_says_nothing_of_neurons(tmp_path: Path) -> None:
    (run,) = load_runs([make_run(tmp_path / "heads")])
    page = render([run]).partition("<script>")[0]
    assert "neuron" not in page
    assert "neuron" not in model_card(run.record)
    assert "widths" not in "".join(charts([run]))


def test_where_no_head_went_only_neurons_are_named() -> None:
    result = {"heads_before": 12, "heads_after": 12, "units": {"heads": [12, 12], "neurons": [4000, 3000]}}
    assert removed_text(result) == "1,000 of 4,000 neurons"
    assert removed_text({"heads_before": 12, "heads_after": 12}) == "0 of 12 heads"
