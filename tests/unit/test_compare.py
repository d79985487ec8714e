"""Comparing criteria: the numbers of the table, one run each, random trials, resuming, and the choice of alpha."""

from __future__ import annotations

import copy
import dataclasses
import html
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

import headprune
from headprune.cli import main as cli
from headprune.criteria import REGISTRY
from headprune.criteria.registry import split_names
from headprune.errors import CriterionError, StudyError
from headprune.measure.curves import at_share, removable, signed_area, weighted_area
from headprune.measure.metrics import METRICS
from headprune.measure.trajectory import Step
from headprune.reports.format import verdict
from headprune.run_folder import read_run
from headprune.runs.compare import (
    check_alpha_choice,
    choose_alpha,
    compare,
    with_alpha,
)
from headprune.runs.experiment import Experiment, load
from headprune.runs.studies.comparison import write_comparison
from headprune.runs.studies.study_runs import expand, run_name
from headprune.search.observers import Observer
from helpers import contents
from run_helpers import headprune as program
from run_helpers import interrupt, material, steps_of, trapezoids

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


def test_names_are_expanded_and_refused() -> None:
    assert expand(["hies(alpha=0.5)", "inverse:his"]) == ["hies", "inverse:his"]
    with pytest.raises(CriterionError, match="'hies' is listed more than once"):
        expand(["hies", "hies(alpha=0.5)"])
    with pytest.raises(CriterionError, match="at least one"):
        expand([])


def test_a_name_may_bring_its_compensation() -> None:
    """It is part of the name where it differs from what all others have."""
    assert expand(["gnorm", "gnorm+lstsq", "hies(alpha=0.5)+mean"]) == ["gnorm", "gnorm+lstsq", "hies+mean"]
    assert expand(["gnorm+none", "gnorm+lstsq", "his+none"], "lstsq") == ["gnorm+none", "gnorm", "his+none"]
    large = "entropy(epsilon=1e+3)"  # whose plus sign is its own
    assert expand([large, f"{large}+lstsq"]) == ["entropy(epsilon=1000.0)", "entropy(epsilon=1000.0)+lstsq"]
    assert split_names("his+lstsq,hies(alpha=0.7,variant=B)+mean") == ["his+lstsq", "hies(alpha=0.7,variant=B)+mean"]


@pytest.mark.parametrize("repair", ["none", "mean", "lstsq"])
def test_expanding_again_changes_nothing(repair: str) -> None:
    once = expand(["gnorm", "his+none", "his+mean", "his+lstsq", "hies(alpha=0.7)+lstsq", "random+none"], repair)
    assert expand(once, repair) == once


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
    ],
)
def test_words_that_are_no_compensation_are_refused_in_one_sentence(spec: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(headprune.HeadpruneError) as caught:
        compare(experiment(), ["gnorm", spec], tmp_path / "runs")
    assert str(caught.value) == said
    assert not (tmp_path / "runs").exists()


def test_alpha_goes_into_the_name_and_the_compensation_stays() -> None:
    names = ["hies+lstsq", "gnorm+mean", "his", "hies(variant=B)"]
    assert with_alpha(names, 0.3) == ["hies(alpha=0.3)+lstsq", "gnorm+mean", "his", "hies(alpha=0.3,variant=B)"]
    with pytest.raises(CriterionError, match="it is there 2 times"):
        check_alpha_choice(["hies", "hies+lstsq"], "none")
    assert check_alpha_choice(["gnorm", "hies+lstsq"], "none") == "lstsq"
    assert check_alpha_choice(["gnorm+lstsq", "hies"], "mean") == "mean"


def test_folder_names_are_plain_and_differ() -> None:
    specs = [*REGISTRY, *(f"inverse:{name}" for name in REGISTRY), *(f"{name}+lstsq" for name in REGISTRY)]
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
    write_comparison(out, compared[1])
    assert (out / "comparison.json").read_text() == before  # as `compare` wrote it
    written = json.loads((out / "comparison.json").read_text())
    assert written["criteria"] == [row.to_json() for row in compared[1]]
    names = [row.name for row in compared[1]]
    assert written["compared"] == {"criteria": names, "trials": 3, "repair": "lstsq"}
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


# --- alpha ---


@pytest.mark.parametrize("repair", ["none", "lstsq"])
def test_alpha_auto_takes_the_largest_weighted_area(repair: Any) -> None:
    one = experiment(criterion="hies", repair=repair)
    alphas = (0.0, 0.5, 0.9)
    best, areas = choose_alpha(one, alphas)
    task, calibration, _ = load(one)
    expected = {}
    for alpha in alphas:
        result = headprune.prune(
            copy.deepcopy(task.model),
            calibration.batches(8),
            criterion=f"hies(alpha={alpha})",
            repair=repair,
            schedule="one-shot",
        )
        expected[alpha] = weighted_area(result.metric, result.trajectory)
    assert areas == pytest.approx(expected)
    assert areas[best] == max(areas.values())
    assert best == min(alpha for alpha in alphas if areas[alpha] == areas[best])  # of equal ones the lowest
    assert len(set(areas.values())) > 1


def test_the_program_says_which_alpha_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = material()
    monkeypatch.setattr("headprune.runs.compare.choose_alpha", lambda experiment: (0.3, {0.3: 0.71, 0.6: 0.5}))
    done = program(
        *("compare", m.bert, "--data", m.data_csv, "--criteria", "hies,magnitude", "--alpha", "auto"),
        *("--out", tmp_path / "runs", "--calibration-samples", "8", "--every", "6", "--json"),
    )
    assert done.code == 0, done.err
    assert "alpha of hies = 0.3, by weighted area on the calibration data" in " ".join(done.err.split())
    assert {row["name"] for row in done.json["criteria"]} == {"hies(alpha=0.3)", "magnitude"}
    assert len(steps_of(tmp_path / "runs" / "hies-alpha0.3")) == 3


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
    if width == 160:
        places = [table.index(f" {row.name} ") for row in rows]
        assert places == sorted(places)
        assert "random (3 runs)" in table
        random = next(row for row in rows if row.name == "random").spread["50%"]
        assert f"{100 * random.low:.1f}..{100 * random.high:.1f}" in table
