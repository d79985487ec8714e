"""The choice of alpha for a comparison: its samples, its schedule and repair, and the file that it is kept in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import headprune
from headprune.errors import HeadpruneError
from headprune.measure.curves import weighted_area
from headprune.runs import alpha as module
from headprune.runs.alpha import choose_alpha
from headprune.runs.experiment import Experiment, load
from headprune.runs.splits import validation_examples
from run_helpers import headprune as program
from run_helpers import material, steps_of

ALPHAS = (0.0, 0.5, 0.9)


def experiment(**options: Any) -> Experiment:
    m = material()
    settings = {"criterion": "hies", "repair": "none", "schedule": "one-shot", "calibration_samples": 8}
    return Experiment(**{"model": m.bert, "data": m.data_csv, "batch_size": 8, **settings, **options})


def refuse_to_prune(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a finished choice is read")


@pytest.mark.parametrize(("schedule", "repair"), [("one-shot", "none"), ("one-shot", "lstsq"), ("greedy", "none")])
def test_the_largest_weighted_area_on_validation_samples(schedule: Any, repair: str) -> None:
    """Under the schedule and the repair of the run that it is for."""
    one = experiment(schedule=schedule, repair=repair, validation_samples=12, every=2)
    choice = choose_alpha(one, ALPHAS)
    inputs, calibration, _ = load(one)
    validation = validation_examples(one, inputs.examples)
    expected = {}
    for alpha in ALPHAS:
        result = headprune.prune(
            copy.deepcopy(inputs.model),
            calibration.batches(8),
            evaluation=validation.batches(8),
            criterion=f"hies(alpha={alpha})",
            repair=repair,
            schedule=schedule,
            every=2,
        )
        expected[alpha] = weighted_area(result.metric, result.trajectory)
    assert choice.areas == pytest.approx(expected)
    assert choice.areas[choice.alpha] == max(choice.areas.values())
    assert choice.alpha == min(alpha for alpha in ALPHAS if choice.areas[alpha] == choice.areas[choice.alpha])
    assert (choice.schedule, choice.repair) == (schedule, repair)
    assert (choice.calibration, choice.validation) == (8, 12)
    assert len(set(choice.areas.values())) > 1


@pytest.mark.parametrize("apart", [False, True])
def test_the_three_parts_of_the_data_share_no_row(apart: bool) -> None:
    one = experiment(validation_samples=10, calibration=material().data_csv if apart else None)
    inputs, calibration, evaluation = load(one)
    validation = validation_examples(one, inputs.examples)
    numbers = [
        [next(n for n, other in enumerate(inputs.examples.rows) if other is row) for row in part.rows]
        for part in ([validation, evaluation] if apart else [calibration, validation, evaluation])
    ]
    flat = [number for part in numbers for number in part]
    assert sorted(flat) == list(range(len(inputs.examples)))
    _, without, _ = load(one.with_options(validation_samples=None))
    assert [str(row) for row in without.rows] == [str(row) for row in calibration.rows]  # the same as without a choice


def test_too_many_validation_samples_are_refused() -> None:
    with pytest.raises(
        HeadpruneError, match=r"28 validation samples leave none of the 28 rows of .* calibrated on; use"
    ):
        load(experiment(validation_samples=28))
    with pytest.raises(HeadpruneError, match="neither scored nor evaluated; leave out --same-data"):
        load(experiment(validation_samples=2, same_data=True))


def test_an_interrupted_choice_goes_on_and_a_finished_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, one = tmp_path / "alpha.json", experiment(every=4)
    whole = choose_alpha(one, ALPHAS, record=record)
    content = json.loads(record.read_text())
    assert content["alpha"] == whole.alpha
    assert content["samples"] == {"calibration": 8, "validation": 8}
    assert {float(alpha): area for alpha, area in content["areas"].items()} == whole.areas
    assert (content["settings"]["seed"], content["settings"]["schedule"]) == (0, "one-shot")

    begun = {**content, "alpha": None, "areas": {"0": content["areas"]["0"]}}
    record.write_text(json.dumps(begun))
    pruned: list[str] = []
    monkeypatch.setattr(
        module,
        "prune",
        lambda *args, **more: pruned.append(str(more["config"].criterion)) or headprune.prune(*args, **more),
    )
    assert choose_alpha(one, ALPHAS, record=record) == whole
    assert pruned == ["hies", "hies(alpha=0.9)"]
    assert json.loads(record.read_text()) == content

    monkeypatch.setattr(module, "prune", refuse_to_prune)
    assert choose_alpha(one, ALPHAS, record=record) == whole
    for changed in ({"seed": 1}, {"repair": "lstsq"}, {"schedule": "greedy"}, {"validation_samples": 4}):
        with pytest.raises(HeadpruneError, match="belongs to a choice of alpha with other settings: ") as refused:
            choose_alpha(one.with_options(**changed), ALPHAS, record=record)
        assert next(iter(changed)) in str(refused.value)
    assert json.loads(record.read_text()) == content


def test_a_file_of_another_program_stays(tmp_path: Path) -> None:
    record = tmp_path / "alpha.json"
    record.write_text('{"alpha": 0.3}')
    for overwrite in (False, True):
        with pytest.raises(HeadpruneError, match="was written by another program"):
            choose_alpha(experiment(), ALPHAS, record=record, overwrite=overwrite)
    assert record.read_text() == '{"alpha": 0.3}'


def test_the_program_chooses_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m, out = material(), tmp_path / "runs"
    words = ["compare", m.bert, "--data", m.data_csv, "--criteria", "hies@greedy+lstsq,magnitude", "--alpha", "auto"]
    words += ["--out", str(out), "--calibration-samples", "8", "--every", "6", "--json"]
    done = program(*words)
    assert done.code == 0, done.err
    chosen = done.json["alpha"]
    assert (chosen["schedule"], chosen["repair"], chosen["validation"]) == ("greedy", "lstsq", 8)
    name = f"hies(alpha={chosen['alpha']})" if chosen["alpha"] != 0.5 else "hies"
    assert {row["name"]: row["schedule"] for row in done.json["criteria"]} == {
        f"{name}@greedy+lstsq": "greedy",
        "magnitude": "one-shot",
    }
    assert f"alpha of hies = {chosen['alpha']:g}, by weighted area on 8 validation samples, greedy, repair lstsq" in (
        " ".join(done.err.split())
    )
    for row in done.json["criteria"]:
        (run,) = row["runs"]
        record = json.loads((out / run / "run.json").read_text())
        assert record["settings"]["validation_samples"] == 8
        assert record["samples"] == {"calibration": 8, "evaluation": 20}
        assert len(steps_of(out / run)) == 3
    monkeypatch.setattr(module, "prune", refuse_to_prune)
    again = program(*words)
    assert again.json == done.json
    compared = headprune.compare(
        *(m.bert, m.data_csv, ["hies@greedy+lstsq", "magnitude"]),
        out=out,
        alpha="auto",
        calibration_samples=8,
        every=6,
        progress=False,
    )
    assert compared.to_json()["alpha"] == chosen


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--alpha", "0.5"], "--alpha takes only auto, not '0.5'"),
        (["--alpha", "auto", "--seeds", "0,1"], "--alpha auto is for one comparison along curves"),
        (["--alpha", "auto", "--same-data"], "--alpha auto needs samples that are neither scored nor evaluated"),
        (
            ["--alpha", "auto", "--criteria", "his"],
            "--alpha auto needs hies once among the criteria, but it is there 0",
        ),
    ],
)
def test_choices_that_cannot_be_made_are_refused(more: list[str], message: str, tmp_path: Path) -> None:
    m, out = material(), tmp_path / "runs"
    done = program("compare", m.bert, "--data", m.data_csv, "--criteria", "hies", "--out", out, *more)
    assert (done.code, message in " ".join(done.err.split())) == (2, True)
    assert not out.exists()
