"""What hies has of its own in a run: the samples of its paper, and a definition that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headprune.criteria import make
from headprune.errors import CriterionError
from headprune.runs.experiment import Experiment, load
from headprune.search.settings import migrated
from run_helpers import classifier, headprune, material, mostly_right, prune_command, sentences, steps_of, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = sentences(160)
    rows = [{"text": t, "label": label} for t, label in zip(texts, mostly_right(classifier(), texts), strict=True)]
    return write_rows(tmp_path_factory.mktemp("data") / "data.csv", rows)


def samples(data: str, criterion: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """The calibration and the evaluation samples of a run."""
    _, calibration, evaluation = load(
        Experiment(model=material().bert, data=data, criterion=criterion, **{"repair": "none", **options})
    )
    return [str(row) for row in calibration.rows], [str(row) for row in (evaluation or calibration).rows]


def test_hies_scores_32_samples_and_evaluates_on_those_of_the_others(data: str) -> None:
    other, other_evaluation = samples(data, "his")
    own, evaluation = samples(data, "hies")
    assert (len(other), len(own)) == (80, 32)
    assert set(own) <= set(other)
    assert evaluation == other_evaluation
    assert samples(data, "inverse:hies")[0] == own


@pytest.mark.parametrize("options", [{"calibration_samples": 50}, {"repair": "lstsq"}, {"same_data": True}])
def test_a_number_a_repair_or_the_same_data_decide_instead(data: str, options: dict[str, Any]) -> None:
    assert samples(data, "hies", **options) == samples(data, "his", **options)


def test_the_number_of_samples_is_said(tmp_path: Path, data: str) -> None:
    out = tmp_path / "run"
    command = ["prune", material().bert, "--data", data, "--out", str(out), "--keep", "0.7"]
    done = headprune(*command, "--criterion", "hies", "--repair", "none")
    assert "hies scores 32 samples, as in its paper; --calibration-samples sets another number." in " ".join(
        done.out.split()
    )
    record = json.loads((out / "run.json").read_text())
    assert (record["settings"]["scored_samples"], record["samples"]["calibration"]) == (32, 32)


def test_a_run_of_an_earlier_definition_is_refused_and_goes_on_by_its_name(tmp_path: Path) -> None:
    """Its entropy was not divided by the log of the length, and its HIS was no mean over tokens."""
    out, raw = tmp_path / "run", "hies(entropy=raw,tokens=sum)"
    command = [*prune_command(material().bert, material().data_csv, out), "--repair", "none", "--criterion"]
    assert headprune(*command, raw).code == 0
    record, steps = json.loads((out / "run.json").read_text()), steps_of(out)
    record["settings"] |= {"criterion": "hies"}  # as an earlier version wrote it
    del record["settings"]["criterion_revision"]
    (out / "run.json").write_text(json.dumps(record))
    refused = headprune(*command, "hies")
    assert refused.code == 2
    assert f"criterion was '{raw}' and is now 'hies'" in refused.err
    assert headprune(*command, raw).code == 0
    assert steps_of(out) == steps


@pytest.mark.parametrize("spec", ["hies", "inverse:hies", "hies(alpha=0.7)", "his"])
def test_settings_are_migrated_once(spec: str) -> None:
    """Settings of today stay as they are, and those of an earlier version do not change a second time."""
    now = Experiment(model="m", data="d", criterion=spec).settings()
    assert migrated(now)["criterion"] == migrated(migrated(now))["criterion"] == spec
    before = {name: value for name, value in now.items() if name != "criterion_revision"}
    earlier = migrated(before)
    assert migrated(earlier) == earlier
    assert ("entropy=raw,tokens=sum" in earlier["criterion"]) == ("hies" in spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hies(entropy=log)", "entropy of hies must be one of normalized, raw, not 'log'"),
        ("hies(tokens=max)", "tokens of hies must be one of mean, sum"),
        ("hies(importance=wanda)", "importance of hies must be one of his, taylor, gnorm, magnitude, output-norm"),
        ("hies(importance=taylor,tokens=sum)", "tokens of hies goes with importance=his"),
        ("entropy(kind=hartley)", "kind of entropy must be one of shannon, renyi, tsallis"),
        ("entropy(order=2)", "order of entropy goes with kind=renyi or kind=tsallis"),
        ("entropy(kind=renyi,order=0)", "order of entropy must be above 0, but it is 0.0"),
        ("deficit(kind=tsallis,variant=A)", "variant and epsilon of deficit go with kind=shannon"),
    ],
)
def test_bad_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(CriterionError) as refused:
        make(spec)
    assert message in str(refused.value)


def test_what_hies_needs_is_what_its_signals_need() -> None:
    assert make("hies").needs_labels
    assert not make("hies(importance=gnorm)").needs_labels
    assert make("hies(importance=magnitude)").needs == ["attention probabilities"]
