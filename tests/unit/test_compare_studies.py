"""Studies: laid out as runs, from files and from options, compared at budgets, ranked over all comparisons."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headprune.cli.progress import Display, ProgressTable
from headprune.cli.study_tables import print_at_budget
from headprune.criteria import make
from headprune.errors import DataError, HeadpruneError, RunError, ScheduleError, StudyError
from headprune.measure.compare_at_budget import AtBudget, Lead
from headprune.measure.curves import at_share
from headprune.measure.intervals import Interval
from headprune.measure.metrics import METRICS
from headprune.measure.trajectory import Step
from headprune.run_folder import read_run
from headprune.runs.studies import run_study
from headprune.runs.studies.comparison import compare_group, refuse_other_files
from headprune.runs.studies.run_study import SerialExecutor, run_jobs
from headprune.runs.studies.spec import Study, parse_seeds, read_study, study_of
from headprune.runs.studies.study_runs import Group, Job, make_group, make_groups, short_names
from headprune.runs.studies.summary import GroupResult, standings, write_index
from headprune.search.config import Experiment
from headprune.search.observers import Observer
from run_helpers import headprune as program
from run_helpers import material

ACCURACY = METRICS["accuracy"]

# --- the plan ---


def test_a_study_is_the_product_of_its_lists() -> None:
    study = study_of(
        {
            "models": ["models/a", "models/b"],
            "data": ["x/dev.tsv", {"data": "y/dev.tsv", "max_length": 64}],
            "criteria": ["magnitude", "gnorm+lstsq", "random"],
            "seeds": [0, 7],
            "keep_flops": [0.5, "0.8,0.3"],
            "keep_parameters": [0.7],
            "trials": 2,
            "batch_size": 5,
        }
    )
    groups = make_groups(study, Path("out"))
    actual = {
        (
            one.model,
            one.data,
            one.max_length,
            one.seed,
            one.keep_flops,
            one.keep_parameters,
            str(one.criterion),
            one.repair,
        )
        for group in groups
        for one in (job.experiment for job in group.jobs)
    }
    expected = set()
    for model, (data, length), seed, budget in itertools.product(
        ("models/a", "models/b"),
        (("x/dev.tsv", 128), ("y/dev.tsv", 64)),
        (0, 7),
        (((0.5,), None), ((0.8, 0.3), None), (None, (0.7,))),
    ):
        chance = [(str(make(f"random(seed={seed + trial})")), "none") for trial in range(2)]
        for criterion in [("magnitude", "none"), ("gnorm", "lstsq"), *chance]:
            expected.add((model, data, length, seed, *budget, *criterion))
    assert actual == expected
    jobs = [job for group in groups for job in group.jobs]
    assert len(jobs) == len(expected) == 2 * 2 * 2 * 3 * 4
    assert len({job.folder for job in jobs}) == len(jobs)
    assert Path("out/b/y-dev.tsv/seed7/flops-0.8-0.3/random-seed8") in {job.folder for job in jobs}
    assert all(job.experiment.batch_size == 5 and not job.experiment.explore for job in jobs)
    assert (
        len(
            {
                (job.experiment.model, job.experiment.data)
                for job in jobs
                if job.subject_number == jobs[0].subject_number
            }
        )
        == 1
    )
    assert study.size == len(groups) == 24


def test_one_comparison_stays_in_its_directory() -> None:
    study = study_of({"models": ["m"], "data": ["d.csv"], "criteria": ["magnitude"]})
    (group,) = make_groups(study, Path("out"))
    assert (group.folder, group.jobs[0].folder) == (Path("out"), Path("out/magnitude"))
    assert group.experiment.repair == "none"  # as published, which is what compare does
    assert group.jobs[0].experiment.explore


def test_pairs_are_not_crossed() -> None:
    pairs = [{"model": "a", "data": "x.csv"}, {"model": "b", "data": "y.csv", "split": "test"}]
    groups = make_groups(study_of({"pairs": pairs, "criteria": ["magnitude"]}), Path("out"))
    assert [(one.experiment.model, one.experiment.data, one.experiment.split) for one in groups] == [
        *(("a", "x.csv", None), ("b", "y.csv", "test"))
    ]


def test_places_have_names_of_their_own() -> None:
    assert short_names(["a/b/one", "a/b/two", "a/b/one"]) == {"a/b/one": "one", "a/b/two": "two"}
    assert short_names(["x/dev.tsv", "y/dev.tsv"]) == {"x/dev.tsv": "x-dev.tsv", "y/dev.tsv": "y-dev.tsv"}
    assert short_names(["org/name with spaces"]) == {"org/name with spaces": "name-with-spaces"}
    assert len(set(short_names(["a/b", "a-b", "c/a-b"]).values())) == 3
    same = [{"model": "m", "data": "d.csv", "split": split} for split in ("one", "two")]
    groups = make_groups(study_of({"pairs": same, "criteria": ["magnitude"]}), Path("out"))
    assert [group.folder.parts[2] for group in groups] == ["d.csv", "d.csv-2"]


# --- files ---

GOOD = """
models: m
data: [d.csv, {data: e.csv, label-column: gold}]
criteria: "magnitude,hies(alpha=0.3,variant=B)"
seeds: [0, 1]
keep-flops: [0.7, 0.5]
trials: 3
at: [10, 30]
schedule: one-shot
calibration_samples: 64
same_data: true
"""


def test_a_file_asks_for_what_options_ask_for(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(GOOD)
    assert study_of(read_study(tmp_path / "study.yaml")) == Study(
        subjects=({"model": "m", "data": "d.csv"}, {"model": "m", "data": "e.csv", "label_column": "gold"}),
        criteria=("magnitude", "hies(alpha=0.3,variant=B)"),
        seeds=(0, 1),
        budgets=({"keep_flops": 0.7}, {"keep_flops": 0.5}),
        trials=3,
        settings={
            "repair": "none",
            "rescore": "every",
            "schedule": "one-shot",
            "calibration_samples": 64,
            "same_data": True,
        },
        at=(0.1, 0.3),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modles: [m]", "has 'modles', which is not an option of a study; did you mean 'models'?"),
        ("criterion: gnorm", "did you mean 'criteria'?"),
        ("batchsize: 4", "did you mean 'batch_size'?"),
        ("- one\n- two", "must hold names and values"),
        ("models: [m", "is not valid YAML"),
        ("seed: 1\nseeds: [2]", "has both seed and seeds"),
        ("models: m\ndata: d.csv", "at least one criterion"),
        ("models: m\ncriteria: gnorm", "Name data as well"),
        ("criteria: gnorm", "Name a model as well"),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nseeds: [one]", "A seed is a whole number, not 'one'."),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nseeds: [1, 1]", "There is a seed twice: 1"),
        ("models: [m, m]\ndata: d.csv\ncriteria: gnorm", "There is a model with this data twice: model m, data d.csv"),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nbatch_size: many", "batch_size is a whole number, not 'many'."),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nbatch_size: 0", "batch_size must be at least 1, but it is 0."),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nsame_data: 1", "same_data is true or false, not 1."),
        ("models: m\ndata: d.csv\ncriteria: gnorm\ntrials: 0", "trials is a whole number of at least 1, not 0."),
        ("models: m\ndata: d.csv\ncriteria: gnorm\nunits: neurons", "Neurons are compared at a budget"),
        ("models: m\ndata: [{data: d.csv, splt: a}]\ncriteria: gnorm", "did you mean 'split'?"),
        ("models: m\ndata: [{split: a}]\ncriteria: gnorm", "An entry of data lacks its data"),
        ("models: [3]\ndata: d.csv\ncriteria: gnorm", "An entry of models has to name model, not 3."),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    done = program("compare", "--study", tmp_path / "study.yaml", "--out", tmp_path / "out")
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "1,x"], "--seeds takes whole numbers"),
        (["--seeds", "1", "--seed", "2"], "--seed and --seeds are both given"),
        (["--workers", "2"], "--workers needs --on ray"),
        (["--on", "spark"], "--on takes ray, ray://HOST:PORT, HOST:PORT or auto, not 'spark'."),
        (["--seeds", "0,1", "--alpha", "auto"], "--alpha auto is for one comparison"),
        (["--keep-flops", "2"], "keep_flops must be between 0 and 1"),
        (["--keep-flops", "0.5", "--study", "nowhere.yaml"], "There is no study file nowhere.yaml"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    m = material()
    done = program(
        "compare", m.bert, "--data", m.data_csv, "--criteria", "magnitude", "--out", tmp_path / "out", *words
    )
    assert (done.code, said in done.err) == (2, True), done.err
    assert not (tmp_path / "out").exists()


def test_seeds_are_parsed() -> None:
    assert parse_seeds("0,1, -2") == [0, 1, -2]
    with pytest.raises(StudyError):
        parse_seeds("")


# --- doing them ---


def experiment(**options: Any) -> Experiment:
    m = material()
    settings = {"model": m.bert, "data": m.data_csv, "calibration_samples": 8, "batch_size": 8, "repair": "none"}
    return Experiment(**{**settings, **options})


def test_what_a_later_run_would_refuse_is_refused_before_the_first(tmp_path: Path) -> None:
    """The second criterion needs labels, which the data does not have."""
    one = experiment(data=material().unlabelled_csv)
    group = make_group(one, ["magnitude", "his"], tmp_path / "out")
    with pytest.raises(DataError, match="'his' needs labels"):
        run_jobs(group.jobs, SerialExecutor(), observer=Observer())
    assert not (tmp_path / "out").exists()


def test_a_budget_that_cannot_be_met_is_refused_before_the_first(tmp_path: Path) -> None:
    group = make_group(experiment(keep_parameters=0.01), ["magnitude"], tmp_path / "out")
    with pytest.raises(ScheduleError, match="with nothing but the vocabulary left it would still be"):
        run_jobs(group.jobs, SerialExecutor(), observer=Observer())
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_run_is_refused_before_the_first(tmp_path: Path) -> None:
    group = make_group(experiment(), ["magnitude", "random"], tmp_path / "out")
    (tmp_path / "out" / "random-seed0").mkdir(parents=True)
    (tmp_path / "out" / "random-seed0" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="something that is not a run"):
        run_jobs(group.jobs, SerialExecutor(), observer=Observer())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["random-seed0"]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(experiment: Experiment, folder: Path, **_: Any) -> None:
        ran.append(folder.name)
        if "magnitude" in folder.name:
            raise DataError(f"{folder.name} is bad.")

    monkeypatch.setattr(run_study, "run_experiment", run)
    monkeypatch.setattr(run_study, "check_model_and_data", lambda jobs: None)
    group = make_group(experiment(), ["magnitude", "random", "inverse:magnitude"], tmp_path / "out")
    with pytest.raises(RunError) as caught:
        run_jobs(group.jobs, SerialExecutor(), observer=Observer())
    assert ran == ["magnitude", "random-seed0", "inverse-magnitude"]
    first = tmp_path / "out" / "magnitude"
    assert str(caught.value) == f"2 of 3 runs failed, the others are finished; the first is {first}: magnitude is bad."
    with pytest.raises(DataError, match=r"^magnitude is bad\.$"):
        run_jobs(group.jobs[:2], SerialExecutor(), observer=Observer())


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two criteria at two budgets, by the program."""
    m = material()
    out = tmp_path_factory.mktemp("budgeted") / "out"
    done = program(
        *("compare", m.bert, "--data", m.data_csv, "--criteria", "magnitude,random", "--trials", "2", "--rounds", "1"),
        *("--keep-flops", "0.8", "--keep-parameters", "0.9", "--calibration-samples", "8", "--round-to", "1"),
        *("--out", out, "--json"),
    )
    assert done.code == 0, done.err
    return out, done


def test_at_a_budget_the_models_at_the_end_are_compared(budgeted: tuple[Path, Any]) -> None:
    folder = budgeted[0] / "bert" / "data.csv" / "seed0" / "flops-0.8"
    written = json.loads((folder / "comparison.json").read_text())
    assert written["budget"] == "keep_flops 0.8"
    assert (folder / "report.html").is_file()
    rows = {row["name"]: row for row in written["criteria"]}
    record, steps = read_run(folder / "magnitude")
    result = record["result"]
    own, last = rows["magnitude"], steps[result["step"]]
    assert (own["metric"], own["interval"], own["agreement"]) == (
        *(result["pruned"], result["pruned_interval"], result["agreement"]),
    )
    assert own["shares"]["flops"] == last.model_flops / steps[0].model_flops <= 0.8
    assert own["shares"]["parameters"] == last.parameters / steps[0].parameters
    assert own["units"] == {kind: left for kind, (_, left) in result["units"].items()}
    trials = [read_run(folder / name)[0]["result"]["pruned"] for name in ("random-seed0", "random-seed1")]
    assert rows["random"]["metric"] == pytest.approx(sum(trials) / 2)
    assert rows["random"]["spread"] == ([min(trials), max(trials)])
    values = [row["metric"] for row in written["criteria"]]
    assert values == sorted(values, reverse=True)
    (lead,) = written["criteria"][0]["ahead"]
    assert lead["metric"]["value"] == pytest.approx(values[0] - values[1])
    assert any(lead["of"] in sentence for sentence in written["verdict"])


def test_an_index_of_another_program_is_not_replaced(budgeted: tuple[Path, Any], tmp_path: Path) -> None:
    out, _ = budgeted
    refuse_other_files([out, tmp_path], "study.json", "study.csv")
    (tmp_path / "study.csv").write_text("mine")
    with pytest.raises(StudyError, match=r"study\.csv would be replaced, and is not of an earlier comparison"):
        refuse_other_files([out, tmp_path], "study.json", "study.csv")


def test_the_index_has_every_comparison(budgeted: tuple[Path, Any]) -> None:
    out, done = budgeted
    written = json.loads((out / "study.json").read_text())
    assert done.json == {"runs": str(out), **written}
    assert [group["budget"] for group in written["groups"]] == ["keep_parameters 0.9", "keep_flops 0.8"]
    for group in written["groups"]:
        rows = json.loads((out / group["folder"] / "comparison.json").read_text())["criteria"]
        assert [(one["name"], one["value"]) for one in group["criteria"]] == [(r["name"], r["metric"]) for r in rows]
    lines = list(csv.DictReader(io.StringIO((out / "study.csv").read_text())))
    assert [(line["Budget"], line["Criterion"], float(line["Value"])) for line in lines] == [
        (group["folder"].split("/")[-1], one["name"], one["value"])
        for group in written["groups"]
        for one in group["criteria"]
    ]


def test_seeds_have_a_mean_a_deviation_and_a_range_at_every_share(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "out"
    words = ["--criteria", "his@greedy,magnitude", "--seeds", "0,1,2", "--at", "30,50", "--every", "3"]
    words += ["--calibration-samples", "8", "--batch-size", "8", "--out", str(out)]
    done = program("compare", m.bert, "--data", m.data_csv, *words)
    assert done.code == 0, done.err
    written = json.loads((out / "study.json").read_text())
    assert written["study"]["at"] == [0.3, 0.5]
    lines = list(csv.DictReader(io.StringIO((out / "study.csv").read_text())))
    assert len(lines) == (3 + 1) * 2 * 3  # seeds and all of them, criteria, the area and two shares
    for name, schedule in (("his@greedy", "greedy"), ("magnitude", "one-shot")):
        (over,) = [line for line in written["over_seeds"] if line["name"] == name]
        for share, at in {"30%": 0.3, "50%": 0.5}.items():
            runs = [read_run(out / "bert" / "data.csv" / f"seed{seed}" / "curve" / name)[1] for seed in range(3)]
            values = [at_share(steps, at).metric for steps in runs]
            expected = [statistics.fmean(values), statistics.stdev(values), min(values), max(values)]
            part = over["at"][share]
            assert [part["mean"], part["sd"], part["lowest"], part["highest"]] == pytest.approx(expected)
            own = [line for line in lines if (line["Criterion"], line["At"]) == (name, share)]
            assert [line["Seed"] for line in own] == ["0", "1", "2", "all"]
            assert [float(line["Value"]) for line in own] == pytest.approx([*values, expected[0]])
            assert [float(own[-1][key]) for key in ("SD", "Lowest", "Highest")] == pytest.approx(expected[1:])
            assert f"{100 * expected[0]:.1f} ± {100 * expected[1]:.1f}" in done.out
        assert {line["Schedule"] for line in lines if line["Criterion"] == name} == {schedule}
    assert "Over 3 seeds" in done.out


def test_a_table_at_a_budget(budgeted: tuple[Path, Any]) -> None:
    m = material()
    one = Experiment(model=m.bert, data=m.data_csv, repair="none", keep_flops=0.8)
    folder = budgeted[0] / "bert" / "data.csv" / "seed0" / "flops-0.8"
    rows: Any = compare_group(make_group(one, ["magnitude", "random"], folder, trials=2))
    text = io.StringIO()
    print_at_budget(folder, rows, Console(file=text, width=100))
    table = " ".join(text.getvalue().split())
    for row in rows:
        assert f"{row.metric:.2%} [{100 * row.interval.low:.1f}, {100 * row.interval.high:.1f}]" in table
        assert f"{row.shares['flops']:.1%}" in table


# --- ranks ---


def row(name: str, value: float) -> AtBudget:
    return AtBudget(name, [name], ACCURACY, value, Interval(0.0, 1.0), None, {}, {}, None)


def comparison(values: dict[str, float], place: tuple[str, ...], **options: Any) -> GroupResult:
    rows = [row(name, value) for name, value in sorted(values.items(), key=lambda item: -item[1])]
    rows[0].ahead.append(Lead(rows[1].name, None, "made up"))
    shared = experiment(keep_flops=0.5, **options)
    return GroupResult(Group(shared, Path("out", *place), {}, place), list(rows))


def test_mean_ranks_with_ties(tmp_path: Path) -> None:
    actual = [
        comparison({"a": 0.9, "b": 0.8, "c": 0.1}, ("m", "d", "seed0", "flops-0.5")),
        comparison({"a": 0.7, "b": 0.7, "c": 0.6}, ("m", "d", "seed1", "flops-0.5"), seed=1),
        comparison({"a": 0.2, "b": 0.8, "c": 0.1}, ("n", "d", "seed0", "flops-0.5")),
    ]
    assert [one.ranks for one in actual] == [
        {"a": 1, "b": 2, "c": 3},
        {"a": 1.5, "b": 1.5, "c": 3},
        {"b": 1, "a": 2, "c": 3},
    ]
    assert [(s.name, s.mean_rank, s.groups) for s in standings(actual)] == [("a", 1.5, 3), ("b", 1.5, 3), ("c", 3, 3)]
    assert sum(standing.best_in for standing in standings(actual)) == 3
    study = Study(subjects=({"model": "m", "data": "d"},), criteria=("a",))
    groups = [dataclasses.replace(one, group=dataclasses.replace(one.group, folder=tmp_path)) for one in actual]
    over = write_index(study, tmp_path, groups)["over_seeds"]
    (own,) = [line for line in over if (line["model"], line["name"]) == ("m", "a")]
    assert (own["seeds"], own["mean"], own["lowest"], own["highest"]) == (2, pytest.approx(0.8), 0.7, 0.9)
    assert own["sd"] == pytest.approx(statistics.stdev([0.9, 0.7]))
    assert own["mean_rank"] == 1.25


def test_rows_that_cannot_be_ranked_have_no_rank() -> None:
    rows: list[Any] = [row("a", 0.9), row("b", 0.8)]  # metrics differ, so none is ahead of another
    one = GroupResult(Group(experiment(), Path("out"), {}, ("m", "d", "seed0", "curve")), rows)
    assert (one.ranks, one.best, standings([one])) == ({}, None, [])


# --- progress ---


def step(number: int, metric: float) -> Step:
    return Step(number, (), None, metric, None, None, {"heads": 1}, {"heads": 1}, 1, 1, None)


def test_all_runs_are_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("bert", "d.csv", "seed3", "curve")
    jobs = [Job(experiment(seed=number), Path(f"run{number}"), f"criterion{number}", place) for number in range(4)]
    console = Console(file=io.StringIO(), width=120, height=40)
    table = ProgressTable(Display(console, None))
    table.study(jobs, [])
    table.run(jobs[0].name, jobs[0]).step(step(5, 0.75), {})
    table.run(jobs[1].name, jobs[1], again=True)
    table.run(jobs[2].name, jobs[2]).end(HeadpruneError("It is bad."))
    console.print(table.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in text.splitlines()]
    assert ["bert", "d.csv", "3", "curve", "criterion0", "5", "0.7500", "runs"] in rows
    assert ["bert", "d.csv", "3", "curve", "criterion1", "runs", "again"] in rows
    assert ["bert", "d.csv", "3", "curve", "criterion3", "waits"] in rows
    assert "criterion2 on bert, d.csv, seed3, curve: failed: It is bad." in text
    assert "1 waits, 1 failed, 1 runs again, 1 runs" in text


def test_runs_that_are_finished_are_not_run_again(budgeted: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    m = material()
    one = Experiment(
        model=m.bert, data=m.data_csv, repair="none", keep_flops=0.8, rounds=1, round_to=1, calibration_samples=8
    )
    group = make_group(one, ["magnitude", "random"], budgeted[0] / "bert/data.csv/seed0/flops-0.8", trials=2)

    class Refuses(SerialExecutor):
        def __enter__(self) -> SerialExecutor:
            raise AssertionError("There is nothing to do.")

    monkeypatch.setattr(run_study, "write_comparison", lambda *_: None)
    (actual,) = run_study.run_study([group], Refuses())
    assert {row.name for row in actual.rows} == {"magnitude", "random"}
    with pytest.raises(AssertionError, match="nothing to do"):
        run_study.run_study([make_group(one, ["inverse:magnitude"], group.folder)], Refuses())
