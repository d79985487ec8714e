"""Comparing criteria: the numbers of the table, one run each, random trials, resuming, and the choice of alpha."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import headprune
from headprune.cli import main as cli
from headprune.criteria import REGISTRY, make
from headprune.criteria.registry import split_names
from headprune.errors import CriterionError, StudyError
from headprune.measure.curves import at_share, removable, signed_area, weighted_area
from headprune.measure.metrics import METRICS
from headprune.measure.trajectory import Step
from headprune.reports.format import verdict
from headprune.run_folder import read_run
from headprune.runs.alpha import hies_row, with_alpha
from headprune.runs.compare import compare
from headprune.runs.experiment import Experiment
from headprune.runs.studies.comparison import write_comparison
from headprune.runs.studies.run_study import SerialExecutor, run_study
from headprune.runs.studies.study_runs import expand, make_group, run_name
from headprune.search.observers import Observer
from helpers import contents
from run_helpers import headprune as program
from run_helpers import interrupt, material, trapezoids

ACCURACY, PERPLEXITY = METRICS["accuracy"], METRICS["perplexity"]


def curve(*values: float, start: int | None = None) -> list[Step]:
    first = len(values) - 1 if start is None else start
    return [
        Step(n, (), None, value, 1 - n / 100, None, {"heads": first - n}, {"heads": first - n}, 1, 1, None)
        for n, value in enumerate(values)
    ]


# --- the numbers ---


def test_the_area_of_perplexity_is_that_of_its_negative_logarithm() -> None:
    values = [math.e, math.e**2, math.e**4]
    assert signed_area(PERPLEXITY, curve(*values)) == pytest.approx(trapezoids([(0, -1), (0.5, -2), (1, -4)]))
    assert signed_area(ACCURACY, curve(1.0, 0.5, 0.0)) == pytest.approx(0.5)


def test_the_first_step_at_which_a_share_is_gone() -> None:
    steps = curve(*[0.9] * 13)
    assert [at_share(steps, share).step for share in (0.25, 0.5, 0.75)] == [3, 6, 9]
    assert at_share(curve(*[0.9] * 11), 0.25).step == 3  # two and a half heads: three
    assert at_share(curve(0.9, 0.8, start=12), 0.75) is None  # a curve that ends before


def test_heads_that_can_go_within_a_drop() -> None:
    steps = curve(0.90, 0.895, 0.86, 0.85, 0.84, 0.9, 0.1)
    assert removable(ACCURACY, steps, 0.01) == 1
    assert removable(ACCURACY, steps, 0.05) == 3  # the rise after the fall does not count
    assert removable(PERPLEXITY, curve(20.0, 20.9, 21.0, 21.1), 0.05) == 2
    assert removable(ACCURACY, curve(0.9, 0.2), 0.01) == 0


def test_a_weighted_area_counts_a_point_by_the_heads_that_are_left() -> None:
    assert weighted_area(ACCURACY, curve(1.0, 0.5, 0.0)) == pytest.approx((1 * 1.0 + 0.5 * 0.5 + 0 * 0.0) / 1.5)
    values = [math.e, math.e**2, math.e**9]
    assert weighted_area(PERPLEXITY, curve(*values)) == pytest.approx((1 * -1 + 0.5 * -2) / 1.5)


# --- names ---


def test_names_are_split_at_commas_outside_brackets() -> None:
    assert split_names("gnorm, his,hies(alpha=0.7,variant=B),inverse:gnorm,") == [
        *("gnorm", "his", "hies(alpha=0.7,variant=B)", "inverse:gnorm")
    ]


def names_of(criteria: list[str], *more: str) -> list[str]:
    return [each.name for each in expand(criteria, *more)]


def test_names_are_expanded_and_refused() -> None:
    assert names_of(["hies(alpha=0.5)", "inverse:his"]) == ["hies", "inverse:his"]
    with pytest.raises(CriterionError, match="'hies' is listed more than once"):
        expand(["hies", "hies(alpha=0.5)"])
    with pytest.raises(CriterionError, match="at least one"):
        expand([])


def test_a_name_may_bring_its_compensation() -> None:
    """It is part of the name where it differs from what all others have."""
    assert names_of(["gnorm", "gnorm+lstsq", "hies(alpha=0.5)+mean"]) == ["gnorm", "gnorm+lstsq", "hies+mean"]
    assert names_of(["gnorm+none", "gnorm+lstsq", "his+none"], "lstsq") == ["gnorm+none", "gnorm", "his+none"]
    large = "entropy(epsilon=1e+3)"  # whose plus sign is its own
    assert names_of([large, f"{large}+lstsq"]) == ["entropy(epsilon=1000.0)", "entropy(epsilon=1000.0)+lstsq"]
    assert split_names("his+lstsq,hies(alpha=0.7,variant=B)+mean") == ["his+lstsq", "hies(alpha=0.7,variant=B)+mean"]


@pytest.mark.parametrize("repair", ["none", "mean", "lstsq"])
def test_expanding_again_changes_nothing(repair: str) -> None:
    once = names_of(["gnorm", "his+none", "his+mean", "his+lstsq", "hies(alpha=0.7)+lstsq", "random+none"], repair)
    assert names_of(once, repair) == once


def test_a_compensation_does_not_hide_a_double() -> None:
    with pytest.raises(CriterionError, match="'gnorm' is listed more than once"):
        expand(["gnorm+none", "gnorm"])
    with pytest.raises(CriterionError, match="'hies\\+lstsq' is listed more than once"):
        expand(["hies+lstsq", "hies(alpha=0.5)+lstsq"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gnorm+lsq", "There is no repair 'lsq'; choose one of lstsq, mean, none."),
        ("gnorm+", "There is no repair ''; choose one of lstsq, mean, none."),
        ("gnorm+his", "There is no repair 'his'; choose one of lstsq, mean, none."),
        ("hies(alpha=0.7)+LSTSQ", "There is no repair 'LSTSQ'; choose one of lstsq, mean, none."),
        ("gnrm+lstsq", "There is no criterion 'gnrm'; did you mean 'gnorm'?"),
        ("his@once", "There is no schedule 'once'; choose one of greedy, one-shot, rounds, layerwise."),
        (
            "his@rounds",
            "Along curves the schedule is greedy or one-shot, not 'rounds'; give a budget for it, such as "
            "--keep-flops 0.5.",
        ),
        ("his@one-shot@greedy", "'his@one-shot@greedy' names two schedules; leave one of them out."),
        ("his+mean@greedy+lstsq", "'his+mean@greedy+lstsq' names two repairs; leave one of them out."),
    ],
)
def test_words_that_are_no_compensation_are_refused_in_one_sentence(spec: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(headprune.HeadpruneError) as caught:
        compare(experiment(), ["gnorm", spec], tmp_path / "runs")
    assert str(caught.value) == said
    assert not (tmp_path / "runs").exists()


def test_alpha_goes_into_the_name_and_the_rest_stays() -> None:
    assert with_alpha("hies@greedy+lstsq", 0.3) == "hies(alpha=0.3)@greedy+lstsq"
    assert with_alpha("hies(variant=B)", 0.3) == "hies(alpha=0.3,variant=B)"
    with pytest.raises(CriterionError, match="it is there 2 times"):
        hies_row(expand(["hies", "hies+lstsq"]))
    with pytest.raises(CriterionError, match="it is there 0 times"):
        hies_row(expand(["gnorm"]))
    row = hies_row(expand(["gnorm", "hies@greedy+lstsq"]))
    assert (row.schedule, row.repair) == ("greedy", "lstsq")


PUBLISHED = {
    **dict.fromkeys(("gnorm", "residual-gradient", "residual-error", "elimination"), "greedy"),
    **dict.fromkeys(("his", "tis", "hies", "entropy", "deficit", "taylor", "magnitude"), "one-shot"),
    **dict.fromkeys(("attribution", "fisher", "fluctuation", "wanda", "random"), "one-shot"),
}


def test_every_criterion_has_the_schedule_of_its_paper() -> None:
    assert {name: kind.schedule for name, kind in REGISTRY.items() if name in PUBLISHED} == PUBLISHED
    assert set(PUBLISHED) == {name for name, kind in REGISTRY.items() if kind.__module__.startswith("headprune.")}
    assert make("inverse:his").schedule == "one-shot"


def test_a_name_may_have_its_own_schedule() -> None:
    """It is part of the name where it differs from the one that the name has without it."""

    def schedules(names: list[str], *more: str | None, **options: Any) -> dict[str, str | None]:
        return {each.name: each.schedule for each in expand(names, "none", *more, **options)}

    names = ["his", "his@greedy", "gnorm", "gnorm@one-shot+lstsq", "inverse:gnorm@greedy"]
    published = {"his": "one-shot", "his@greedy": "greedy", "gnorm": "greedy", "gnorm@one-shot+lstsq": "one-shot"}
    assert schedules(names) == {**published, "inverse:gnorm": "greedy"}
    for_all = {"his": "greedy", "his@one-shot": "one-shot", "gnorm": "greedy"}
    assert schedules(["his", "his@one-shot", "gnorm@greedy"], "greedy") == for_all
    at_budget = {"his": None, "gnorm": "rounds", "his@one-shot": "one-shot"}
    assert schedules(["his", "gnorm@rounds", "his@one-shot"], budget=True) == at_budget
    with pytest.raises(CriterionError, match="'his' is listed more than once"):
        expand(["his", "his@one-shot"])


def test_folder_names_are_plain_and_differ() -> None:
    specs = [*REGISTRY, *(f"inverse:{name}" for name in REGISTRY), *(f"{name}+lstsq" for name in REGISTRY)]
    specs += [*(f"{name}@greedy" for name in REGISTRY), "his@one-shot+lstsq"]
    specs += ["gnorm+mean", "gnorm+none", "hies(alpha=0.7)+lstsq", "random(seed=1)+lstsq"]
    specs += ["hies(alpha=0.7)", "hies(alpha=0.07)", "random(seed=1)", "random(seed=11)", "entropy(variant=A)"]
    names = [run_name(spec) for spec in specs]
    assert len(set(names)) == len(names)
    assert all(not set(name) & set(':()=,/\\*? "') for name in names)


# --- real runs ---


def experiment(**options: Any) -> Experiment:
    m = material()
    settings = {"model": m.bert, "data": m.data_csv, "calibration_samples": 8, "batch_size": 8, "every": 2}
    return Experiment(**{**settings, **options})


CRITERIA = ["magnitude", "inverse:magnitude", "random"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("compared") / "runs"
    return out, compare(experiment(), CRITERIA, out, trials=3)


def test_a_row_says_what_its_curve_says(compared: tuple[Path, list[Any]]) -> None:
    out, rows = compared
    row = next(row for row in rows if row.name == "magnitude")
    steps = read_run(out / "magnitude")[1]
    points = [((12 - step.heads) / 12, step.metric) for step in steps]
    assert row.runs == ["magnitude"]
    assert row.area == pytest.approx(trapezoids(points))
    assert row.metric == {f"{share:.0%}": at_share(steps, share).metric for share in (0.25, 0.5, 0.75)}
    assert row.agreement == {f"{share:.0%}": at_share(steps, share).agreement for share in (0.25, 0.5, 0.75)}
    assert row.removable == {f"{drop:.0%}": removable(ACCURACY, steps, drop) for drop in (0.01, 0.05)}
    assert row.interval == {f"{share:.0%}": at_share(steps, share).interval for share in (0.25, 0.5, 0.75)}
    assert row.usable_area == pytest.approx(signed_area(ACCURACY, steps, row.usable_until or None))
    curves = [read_run(out / name)[1] for one in rows for name in one.runs]
    useful = [((12 - step.heads) / 12, curves[0][0].metric - step.metric) for steps in curves for step in steps[:2]]
    assert all(drop > 0.1 for share, drop in useful if share)  # the first step is already too much for all of them,
    assert row.usable_until == 0  # so the whole curve ranks
    assert all(one.usable_until == row.usable_until for one in rows)
    written = row.to_json()
    assert set(written) == {field.name for field in dataclasses.fields(row)}
    assert written["measured"] == "accuracy"
    assert all(end is not None for ends in written["interval"].values() for end in ends)


def test_the_best_comes_first(compared: tuple[Path, list[Any]]) -> None:
    _, rows = compared
    areas = [row.usable_area for row in rows]
    assert areas == sorted(areas, reverse=True)
    assert len(set(areas)) == 3


def test_runs_of_one_comparison_are_paired(compared: tuple[Path, list[Any]]) -> None:
    _, rows = compared
    assert [ahead.of for ahead in rows[0].ahead] == [row.name for row in rows[1:]]
    for row in rows[1:]:
        ahead = next(one for one in rows[0].ahead if one.of == row.name)
        assert ahead.unpaired is None
        assert ahead.usable_area.value == pytest.approx(rows[0].usable_area - row.usable_area)
        assert ahead.area.value == pytest.approx(rows[0].area - row.area)
        for share, gap in ahead.metric.items():
            assert gap.value == pytest.approx(rows[0].metric[share] - row.metric[share])


def test_what_is_written_beside_the_runs(compared: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """The rows, what they mean, and what was compared, so that the page names the command of the comparison."""
    out = tmp_path / "all of them"
    shutil.copytree(compared[0], out)
    before = (out / "comparison.json").read_text()
    write_comparison(make_group(experiment(), CRITERIA, out, trials=3), compared[1])
    assert (out / "comparison.json").read_text() == before  # as `compare` wrote it
    written = json.loads((out / "comparison.json").read_text())
    assert written["criteria"] == [row.to_json() for row in compared[1]]
    names = [row.name for row in compared[1]]
    options = {"trials": 3, "at": [0.25, 0.5, 0.75], "repair": "lstsq", "schedule": None, "rescore": "every"}
    assert written["compared"] == {"criteria": names, **options}
    assert written["verdict"] == verdict(compared[1])
    assert written["usable_until"] == compared[1][0].usable_until
    assert len(written["verdict"]) >= 3
    page = (out / "report.html").read_text()
    (command,) = [html.unescape(text.split("</pre>")[0]) for text in page.split("<script>")[0].split("<pre>")[1:]]
    words = shlex.split(command)
    assert words[:2] == ["headprune", "compare"]
    parsed = typer.main.get_command(cli.app).commands["compare"].make_context("compare", words[2:]).params
    assert split_names(parsed["criteria"]) == names
    assert (parsed["trials"], parsed["repair"], Path(parsed["out"])) == (3, "lstsq", out)
    expected = experiment()
    assert (parsed["model"], parsed["data"]) == ([expected.model], [expected.data])
    for name in ("calibration_samples", "batch_size", "every", "schedule", "seed"):
        assert parsed[name] == expected.explicit[name]


@pytest.mark.parametrize("schedule", [None, "greedy"])
def test_rows_have_their_schedules(schedule: str | None, tmp_path: Path) -> None:
    """Scored once or again and again: the same first scores, and others after a removal. The output names each."""
    m, out = material(), tmp_path / "runs"
    criteria = "his,his@greedy,gnorm" if schedule is None else "his,his@one-shot,gnorm"
    words = ["--criteria", criteria, *([] if schedule is None else ["--schedule", schedule])]
    words += ["--calibration-samples", "8", "--batch-size", "8", "--every", "3"]
    done = program("compare", m.bert, "--data", m.data_csv, "--out", str(out), *words)
    assert done.code == 0, done.err
    expected = {"his": "one-shot", "his@greedy": "greedy", "gnorm": "greedy"}
    if schedule is not None:
        expected = {"his": "greedy", "his@one-shot": "one-shot", "gnorm": "greedy"}
    content = json.loads((out / "comparison.json").read_text())
    assert {row["name"]: row["schedule"] for row in content["criteria"]} == expected
    assert content["verdict"][-1].startswith("Scored once, on the dense model (one-shot): ")
    assert content["compared"]["schedule"] == schedule
    for name, used in expected.items():
        record, steps = read_run(out / name)
        assert record["settings"]["schedule"] == used
        left = ~steps[2].scores.isnan()
        assert torch.equal(steps[1].scores[left], steps[2].scores[left]) == (used == "one-shot")
    table = " ".join(done.out.split())
    assert all(word in table for word in ("one-shot", "greedy"))
    page = (out / "report.html").read_text()
    command = html.unescape(page.split("<script>")[0].split("<pre>")[1].split("</pre>")[0])
    assert ("--schedule" in command) == (schedule is not None)
    assert program(*shlex.split(command)[1:]).out == done.out  # and nothing runs again


def test_points_of_ones_own(compared: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Other columns of the same runs, which do not run again; the page has them, and the command names them."""
    out = tmp_path / "runs"
    shutil.copytree(compared[0], out)
    at = (0.1, 0.125, 0.3, 0.5, 0.9)
    texts = ["10%", "12.5%", "30%", "50%", "90%"]
    (result,) = run_study([make_group(experiment(), CRITERIA, out, trials=3, at=at)], SerialExecutor())
    assert [row.name for row in result.rows] == [row.name for row in compared[1]]  # ranked by the same areas
    for row in result.rows:
        curves = [read_run(out / name)[1] for name in row.runs]
        for share, text in zip(at, texts, strict=True):
            expected = [at_share(steps, share).metric for steps in curves]
            assert row.metric[text] == pytest.approx(sum(expected) / len(expected))
        assert [list(part) for part in (row.metric, row.interval, row.agreement, row.spread)] == [texts] * 4
    assert list(result.rows[0].ahead[0].metric) == texts
    page = (out / "report.html").read_text()
    assert "".join(f"<th>{text}</th>" for text in texts) in page
    assert "--at 10,12.5,30,50,90" in html.unescape(page)
    m = material()
    words = ["--criteria", ",".join(CRITERIA), "--trials", "3", "--calibration-samples", "8", "--batch-size", "8"]
    words += ["--every", "2", "--repair", "lstsq", "--at", "10,12.5,30,50,90", "--json"]
    done = program("compare", m.bert, "--data", m.data_csv, "--out", str(out), *words)
    assert done.json["criteria"] == [row.to_json() for row in result.rows]


@pytest.mark.parametrize("at", ["0,10", "10;20", "101", "ten", "", "nan"])
def test_bad_points_are_refused(at: str, tmp_path: Path) -> None:
    m = material()
    done = program(
        "compare", m.bert, "--data", m.data_csv, "--criteria", "his", "--at", at, "--out", str(tmp_path / "runs")
    )
    assert (done.code, "--at takes percentages of heads removed" in done.err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_a_comparison_of_an_earlier_version_is_refused_or_goes_on(tmp_path: Path) -> None:
    """It had one schedule for all."""
    compare(experiment(schedule="greedy"), ["magnitude"], tmp_path)
    with pytest.raises(headprune.HeadpruneError, match="schedule was 'greedy' and is now 'one-shot'"):
        compare(experiment(), ["magnitude"], tmp_path)
    (row,) = compare(experiment(schedule="greedy"), ["magnitude"], tmp_path)
    assert (row.name, row.schedule) == ("magnitude", "greedy")


def test_random_is_the_mean_of_its_trials(compared: tuple[Path, list[Any]]) -> None:
    out, rows = compared
    row = next(row for row in rows if row.name == "random")
    assert row.runs == [f"random-seed{seed}" for seed in range(3)]
    curves = [read_run(out / name)[1] for name in row.runs]
    orders = {tuple(head for step in steps for head in step.removed) for steps in curves}
    assert len(orders) == 3
    areas = [trapezoids([((12 - step.heads) / 12, step.metric) for step in steps]) for steps in curves]
    assert row.area == pytest.approx(sum(areas) / 3)
    assert row.metric["50%"] == pytest.approx(sum(at_share(steps, 0.5).metric for steps in curves) / 3)


def test_all_runs_start_from_the_same_model_on_the_same_data(compared: tuple[Path, list[Any]]) -> None:
    out, rows = compared
    records = [read_run(out / name) for row in rows for name in row.runs]
    assert len({json.dumps(steps[0].to_json()) for _, steps in records}) == 1
    assert len({json.dumps({**record["settings"], "criterion": ""}) for record, _ in records}) == 1
    assert all(steps[-1].heads == 0 for _, steps in records)


def test_an_interrupted_comparison_goes_on(compared: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """One run is half done, one has not begun; the others are left as they are."""
    original, rows = compared
    out = tmp_path / "runs"
    shutil.copytree(original, out)
    interrupt(out / "random-seed1", 3)
    shutil.rmtree(out / "random-seed2")
    others = {name: (out / name / "steps.jsonl").stat().st_mtime_ns for name in ("magnitude", "random-seed0")}
    again = compare(experiment(), CRITERIA, out, trials=3)
    assert [row.to_json() for row in again] == [row.to_json() for row in rows]
    for name in [name for row in rows for name in row.runs]:
        assert (out / name / "steps.jsonl").read_bytes() == (original / name / "steps.jsonl").read_bytes()
    assert others == {name: (out / name / "steps.jsonl").stat().st_mtime_ns for name in others}


def test_a_journal_that_lost_its_end_is_not_compared_as_it_is(compared: tuple[Path, list[Any]], tmp_path: Path) -> None:
    original, rows = compared
    out = tmp_path / "runs"
    shutil.copytree(original, out)
    journal = out / "magnitude" / "steps.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:3]))
    try:
        again = compare(experiment(), CRITERIA, out, trials=3)
    except headprune.HeadpruneError as error:
        assert "magnitude" in str(error)  # noqa: PT017  (it may refuse, or do the missing steps again)
    else:
        assert [row.to_json() for row in again] == [row.to_json() for row in rows]


def test_a_comparison_with_other_settings_is_refused(compared: tuple[Path, list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "runs"
    shutil.copytree(compared[0], out)
    with pytest.raises(headprune.HeadpruneError, match="seed was 0 and is now 1"):
        compare(experiment(seed=1), ["magnitude"], out)
    (row,) = compare(experiment(seed=1), ["magnitude"], out, overwrite=True)
    assert row.name == "magnitude"


# --- compensation ---


@pytest.mark.parametrize("text", ['{"criteria": "none"}', "[1]", "notes", None])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_another_program_are_not_replaced(text: str | None, overwrite: bool, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "comparison.json").write_text(text)
    (tmp_path / "report.html").write_text("a report of mine")
    before = contents(tmp_path)
    with pytest.raises(StudyError, match=r"would be replaced, and is not of an earlier comparison; choose another"):
        compare(experiment(), ["random"], tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def compensated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[str]]:
    out = tmp_path_factory.mktemp("compensated") / "runs"
    told: list[str] = []

    class Names(Observer):
        def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
            told.append(name)
            return self

    names = ["magnitude", "magnitude+lstsq", "magnitude+mean", "random+lstsq"]
    one = experiment(repair="none", every=4)
    return out, compare(one, names, out, trials=2, observer=Names()), told


def test_a_criterion_with_its_own_compensation_has_a_run_of_its_own(compensated: Any) -> None:
    out, rows, told = compensated
    runs = {row.name: row.runs for row in rows}
    assert runs == {
        "magnitude": ["magnitude"],
        "magnitude+lstsq": ["magnitude+lstsq"],
        "magnitude+mean": ["magnitude+mean"],
        "random+lstsq": ["random-seed0+lstsq", "random-seed1+lstsq"],
    }
    trials = [f"random(seed={seed})+lstsq" for seed in range(2)]
    assert told == ["magnitude", "magnitude+lstsq", "magnitude+mean", *trials]
    used = {"magnitude": set(), "magnitude+mean": {"mean"}, "random-seed1+lstsq": {"lstsq", "mean"}}
    for name, kinds in used.items():
        record, steps = read_run(out / name)
        assert record["settings"]["repair"] == (name.partition("+")[2] or "none")
        assert record["settings"]["criterion"] == ("random(seed=1)" if "random" in name else "magnitude")
        assert {repair["kind"] for step in steps for repair in step.repairs} == kinds


def test_compensation_changes_the_model_and_nothing_before_it(compensated: Any) -> None:
    """The first removal is that of the same scores; what it does to the model is not."""
    out, _, _ = compensated
    plain, repaired = (read_run(out / name)[1] for name in ("magnitude", "magnitude+lstsq"))
    assert plain[0].to_json() == repaired[0].to_json()
    assert plain[1].removed == repaired[1].removed
    assert plain[1].loss != repaired[1].loss
    assert plain[-1].parameters == repaired[-1].parameters


def test_a_comparison_with_another_compensation_for_all(compensated: Any, tmp_path: Path) -> None:
    """Its names say what differs from it, and its runs are the same ones under other names."""
    rows = compare(experiment(repair="lstsq", every=4), ["magnitude", "magnitude+none"], tmp_path / "runs")
    assert {row.name for row in rows} == {"magnitude", "magnitude+none"}
    before = {row.name: row.area for row in compensated[1]}
    actual = {row.name: row.area for row in rows}
    assert actual == {"magnitude": before["magnitude+lstsq"], "magnitude+none": before["magnitude"]}


# --- tables ---


def replace_points(row: Any) -> Any:
    """The row with its first point at ten shares."""

    def repeated(part: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys([f"{share}%" for share in range(5, 55, 5)], part["25%"])

    names = ("metric", "interval", "agreement", "spread")
    return dataclasses.replace(row, **{name: repeated(getattr(row, name)) for name in names})


@pytest.mark.parametrize("width", [160, 80])
def test_the_table(compared: tuple[Path, list[Any]], width: int) -> None:
    import io

    from rich.console import Console

    from headprune.cli.comparison_table import print_comparison

    out, rows = compared
    text = io.StringIO()
    print_comparison(out, rows, Console(file=text, width=width))
    assert "\u2026" not in text.getvalue()  # nothing is cut
    assert max(map(len, text.getvalue().splitlines()[:-1])) <= width
    table = " ".join(text.getvalue().split())
    for heading in ("criterion", "area", "25% gone", "50% gone", "75% gone", "1% / 5%"):
        assert heading in table
    low, high = rows[0].interval["25%"]
    assert f"[{100 * low:.1f}, {100 * high:.1f}]" in table
    for sentence in verdict(rows):
        assert sentence in table
    many = [replace_points(row) for row in rows]
    print_comparison(out, many, Console(file=(wide := io.StringIO()), width=width))
    assert "\u2026" not in wide.getvalue()
    assert max(map(len, wide.getvalue().splitlines()[:-1])) <= width
    assert all(f"{share} gone" in " ".join(wide.getvalue().split()) for share in many[0].metric)
    if width == 160:
        places = [table.index(f" {row.name} ") for row in rows]
        assert places == sorted(places)
        assert "random (3 runs)" in table
        random = next(row for row in rows if row.name == "random").spread["50%"]
        assert f"{100 * random.low:.1f}..{100 * random.high:.1f}" in table
