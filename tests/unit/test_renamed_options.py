"""Names that options had in earlier versions are taken, and the new ones said."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headprune
from headprune.cli.main import app
from headprune.cli.renamed_options import current_words
from headprune.criteria import make
from headprune.errors import HeadSelectionError, StudyError
from headprune.former_names import FORMER_NAMES
from headprune.reports.run_view import load_runs
from headprune.runs.experiment import experiment_of, run_experiment
from headprune.runs.studies.spec import read_study
from headprune.search.config import Experiment, PruneConfig
from headprune.search.methods import Method
from headprune.search.settings import migrated
from run_helpers import material
from score_helpers import labelled
from zoo import ZOO


def test_a_config_takes_the_old_names_and_says_the_new_ones() -> None:
    with pytest.warns(FutureWarning, match="compensate is called repair now") as said:
        config = PruneConfig(compensate="mean")
    assert (config.repair, len(said)) == ("mean", 1)
    with pytest.warns(FutureWarning, match="'sweep' is called 'layerwise' now") as said:
        config = PruneConfig(schedule="sweep", keep=0.5)
    assert (config.schedule, len(said)) == ("layerwise", 1)
    with pytest.warns(FutureWarning, match="repair"):
        assert Method("mine", "", "", "his", compensate="mean").repair == "mean"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.with_options(keep=0.4).schedule == "layerwise"  # which nobody is told of twice
        assert PruneConfig(repair="mean", schedule="layerwise", keep=0.5).repair == "mean"


def test_remove_takes_the_old_name() -> None:
    with pytest.warns(FutureWarning, match="repair"), pytest.raises(HeadSelectionError, match="does not exist"):
        headprune.remove(ZOO["bert"].build(), [(9, 9)], compensate="mean")


def test_attributes_of_results_have_their_old_names() -> None:
    model, batches = ZOO["bert"].build().eval(), [labelled(ZOO["bert"], 0)]
    result = headprune.score(model, batches, criterion="gnorm")
    (dense,) = headprune.prune(model, batches, criterion="gnorm", keep=1.0).trajectory
    with pytest.warns(FutureWarning, match=r"ScoreResult\.measured is called metric_value now"):
        assert result.measured.value == result.metric_value.value
    with pytest.warns(FutureWarning, match="per_sample"):
        assert result.metric_value.outcomes.equal(result.metric_value.per_sample)
    with pytest.warns(FutureWarning, match="values"):
        assert result.quality.predictions.equal(result.quality.values)
    with pytest.warns(FutureWarning, match="sample_ids"):
        assert result.quality.owners.equal(result.quality.sample_ids)
    with pytest.warns(FutureWarning, match="repairs"):
        assert dense.compensation == dense.repairs == ()
    with pytest.warns(FutureWarning, match="per_sample"):
        assert dense.outcomes.equal(dense.per_sample)


@pytest.mark.parametrize(
    ("old", "new"),
    [("repair", "residual-gradient"), ("lstsq", "residual-error"), ("inverse:repair", "residual-gradient")],
)
def test_criteria_have_their_old_names(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"Criterion '{old[-6:]}' is called '{new}' now") as warned:
        assert str(make(old)).endswith(new)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(new)


@pytest.mark.filterwarnings("error")
def test_records_with_former_names_of_criteria_are_read_without_a_warning() -> None:
    assert migrated({"criterion": "repair"})["criterion"] == str(make("residual-gradient"))


def test_the_error_of_studies_has_its_old_name() -> None:
    with pytest.warns(FutureWarning, match="SweepError is called StudyError now") as warned:
        from headprune.errors import SweepError  # type: ignore[attr-defined]
    assert (SweepError, len(warned)) == (StudyError, 1)


# What pages of documentation imported before rooms got their names of today.
DOCUMENTED_IMPORTS = """
from headprune.runs.journal import read_run
from headprune.runs.journal import Run
from headprune.runs.compare import sweep_alpha
from headprune.runs.studies.asked import study_of
from headprune.runs.studies.plan import plan_study
from headprune.runs.studies.summary import run_study
from headprune.runs.studies.running import OneAfterTheOther
from headprune.runs.studies.on_ray import OnRay
from headprune.runtimes.gguf import Gguf
from headprune.recovery import fit
from headprune.ranks import alone
from headprune.task import own_batches
"""


@pytest.mark.parametrize("line", DOCUMENTED_IMPORTS.strip().splitlines())
def test_an_import_that_was_documented_works_and_warns_once(line: str) -> None:
    _, module, _, name = line.split()
    vars(importlib.import_module(module)).pop(name, None)  # of an earlier import in this process
    scope: dict[str, object] = {}
    with pytest.warns(FutureWarning, match=f"{module}.{name} is called ") as warned:
        exec(line, scope)
    place, _, attribute = FORMER_NAMES[f"{module}.{name}"].rpartition(".")
    assert scope[name] is getattr(importlib.import_module(place), attribute)
    assert [str(one.message) for one in warned] == [
        f"{module}.{name} is called {place}.{attribute} now; use that, as the old name will go."
    ]


def test_every_former_name_was_documented() -> None:
    documented = {".".join(line.split()[1::2]) for line in DOCUMENTED_IMPORTS.strip().splitlines()}
    assert documented == FORMER_NAMES.keys()


@pytest.mark.parametrize("name", ["headprune.store", "headprune.runs.journals", "headprune.ranked"])
def test_modules_that_were_never_documented_are_gone(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert name not in sys.modules
    with pytest.raises(ImportError):
        exec("from headprune.ranks import rank")


def test_a_file_of_a_study_takes_the_old_name(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("criteria: [gnorm]\ncompensate: mean\n")
    with pytest.warns(FutureWarning, match="repair"):
        assert read_study(tmp_path / "study.yaml") == {"criteria": ["gnorm"], "repair": "mean"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prune M --compensate none --round 4 --rounds 2", "prune M --repair none --round-to 4 --rounds 2"),
        ("prune M --compensate=none --round=4", "prune M --repair=none --round-to=4"),
        ("prune M --schedule sweep", "prune M --schedule layerwise"),
        ("prune M --schedule=sweep", "prune M --schedule=layerwise"),
        ("compare --sweep s.yaml --alpha sweep", "compare --study s.yaml --alpha auto"),
        ("compare --study sweep --out sweep", "compare --study sweep --out sweep"),
        ("finetune R --rounds 3 --evaluations 2", "finetune R --cycles 3 --evals-per-epoch 2"),
        ("train M --evaluation dev.csv --evaluations=2", "train M --eval-data dev.csv --evals-per-epoch=2"),
        ("prune M --repair none --schedule greedy", "prune M --repair none --schedule greedy"),
    ],
)
def test_commands_take_the_old_names(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert current_words(old.split()) == new.split()
    assert capsys.readouterr().err.count("is called") == sum(word not in new.split() for word in old.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--compensate site --keep-flops 0.5", "--repair lstsq --keep-flops 0.5"),
        ("--compensate lstsq --keep-flops=0.5", "--repair dense --keep-flops=0.5"),
        ("--schedule rounds --compensate=lstsq", "--schedule rounds --repair=dense"),
        ("--method kwon --compensate lstsq", "--method kwon --repair dense"),
        ("--compensate lstsq --keep 0.5", "--repair lstsq --keep 0.5"),
    ],
)
def test_least_squares_by_its_old_name_is_the_computation_that_it_was(old: str, new: str) -> None:
    """With a budget `compensate` aimed at the dense model, and by `site` at what the site gave."""
    assert current_words(["prune", "M", *old.split()]) == ["prune", "M", *new.split()]


def test_least_squares_by_its_old_name_in_python_and_in_settings() -> None:
    with pytest.warns(FutureWarning, match="repair"):
        assert PruneConfig(compensate="lstsq", keep_flops=0.5).repair == "dense"
    with pytest.warns(FutureWarning, match="repair"):
        assert PruneConfig(compensate="lstsq", keep=0.5).repair == "lstsq"
    with pytest.warns(FutureWarning, match="repair"):
        assert PruneConfig(compensate="site", keep_flops=0.5).repair == "lstsq"
    assert migrated({"compensate": "lstsq", "schedule": "sweep", "criterion": "his"})["repair"] == "dense"
    assert migrated({"compensate": "lstsq", "schedule": "greedy", "criterion": "his"})["repair"] == "lstsq"
    assert (PruneConfig(keep_flops=0.5).repair, PruneConfig(keep=0.5).repair) == ("dense", "lstsq")


def test_the_program_says_the_new_name_on_stderr() -> None:
    done = CliRunner().invoke(app, ["prune", "nowhere", "--data", "none.csv", "--out", "out", "--compensate", "none"])
    assert done.stderr.count("--compensate is called --repair now") == 1


def test_a_run_of_an_earlier_version_goes_on_and_is_reported(tmp_path: Path) -> None:
    """As it wrote its settings: compensate, and sweep."""
    m, out = material(), tmp_path / "run"
    asked = Experiment(model=m.bert, data=m.data_csv, calibration_samples=8, repair="mean", keep=8, rescore="every")
    run_experiment(asked, out, measure=False)
    record = json.loads((out / "run.json").read_text())
    assert record["settings"]["repair"] == "mean"
    record["settings"]["compensate"] = record["settings"].pop("repair")
    (out / "run.json").write_text(json.dumps(record))
    steps = (out / "steps.jsonl").read_text()
    (run,) = load_runs([out])
    assert run.settings["repair"] == "mean"
    assert experiment_of(record) == asked
    run_experiment(asked.with_options(keep=6), out, measure=False)
    assert (out / "steps.jsonl").read_text().startswith(steps)
    assert migrated({"model": "m", "data": "d", "schedule": "sweep"})["schedule"] == "layerwise"
