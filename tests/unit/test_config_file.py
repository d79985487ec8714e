"""Options from a file: as on the command line, which wins, and refused in one sentence where they are wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from headprune.cli.main import app
from headprune.cli.option_tables import commands_of
from headprune.cli.options import FILE_FROM
from headprune.reports.gate_training import command_words
from headprune.search.config import Experiment
from headprune.training.config import TrainConfig
from headprune.training.gate_config import GateConfig
from run_helpers import headprune as program
from run_helpers import material

PROGRAM: Any = typer.main.get_command(app)


def parsed(verb: str, *words: object) -> dict[str, Any]:
    """The values of all options, as the verb would get them."""
    context = PROGRAM.commands[verb].make_context(verb, [str(word) for word in words])
    return {name: value for name, value in context.params.items() if name != "config"}


def sentence(done: Any) -> str:
    """What a refused command said, which must be one line."""
    (line,) = done.err.strip().splitlines()
    assert (done.code, done.out) == (2, "")
    return line


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("verb", "text", "words"),
    [
        (
            "prune",
            "model: m\ndata: d.csv\nout: run\nkeep: 0.5\nkeep-flops: [0.8, 0.5]\nrounds: 3\nknee: true\n"
            "max_drop: 1e-2\nexplore: false\nvocabulary: [a.txt, b.txt]\nplugin: mine.py\ndtype: null",
            "m --data d.csv --out run --keep 0.5 --keep-flops 0.8,0.5 --rounds 3 --knee --max-drop 0.01 --vocabulary "
            "a.txt --vocabulary b.txt --plugin mine.py",
        ),
        ("score", "data: d.csv\nunits: [heads, neurons]\njson: true", "m --data d.csv --units heads,neurons --json"),
        (
            "compare",
            "model: [a, b]\ndata: d.csv\ncriteria: [gnorm, his]\nout: o\nkeep_flops: [0.8, 0.5]\nseeds: 1",
            "a b --data d.csv --criteria gnorm,his --out o --keep-flops 0.8 --keep-flops 0.5 --seeds 1",
        ),
        ("finetune", "data: d.csv\nevals-per-epoch: 2\ncycles: 3", "m --data d.csv --evals-per-epoch 2 --cycles 3"),
        (
            "train",
            "data: d.csv\nout: o\nl0: 0.02\ngate_warmup: 0.2\nwarmup: 0.3\nrescale: false",
            "m --data d.csv --out o --l0 0.02 --gate-warmup 0.2 --warmup 0.3 --no-rescale",
        ),
        ("export", "to: onnx\nout: o\nthreads: 2", "m --to onnx --out o --threads 2"),
        ("inspect", "plan: yes\nmax-length: 64", "m --plan --max-length 64"),
        ("evaluate", "data: d.csv\nsamples: 4\nmetric: f1", "m --data d.csv --samples 4 --metric f1"),
    ],
)
def test_a_file_says_what_the_command_line_says(verb: str, text: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path / "options.yaml", text)
    model = [] if "model:" in text else ["m"]
    assert parsed(verb, *model, "--config", file) == parsed(verb, *words.split())


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = written(
        tmp_path / "options.yaml", "model: m\ndata: d.csv\nout: o\nkeep: 0.5\nvocabulary: [a.txt]\nknee: true"
    )
    values = parsed("prune", "other", "--keep", "8", "--vocabulary", "b.txt", "--config", file)
    assert (values["model"], values["keep"], values["vocabulary"]) == ("other", "8", ["b.txt"])
    assert (values["data"], values["knee"]) == ("d.csv", True)


def test_every_verb_with_many_options_takes_a_file() -> None:
    for verb, command in commands_of(PROGRAM).items():
        names = {parameter.name for parameter in command.params}
        assert ("config" in names) == (len(names - {"config"}) > FILE_FROM), verb


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("critrion: his", "has 'critrion', which is not an option of prune; did you mean 'criterion'?"),
        ("config: other.yaml", "has 'config', which is not an option of prune"),
        ("epochs: 3", "has 'epochs', which is not an option of prune"),
        ("3: his", "Names of options are texts"),
        ("- criterion", "must hold names and values in YAML, such as criterion: his."),
        ("criterion: [", "is not valid YAML"),
        ("keep: 0.5\nkeep: 0.7", "is not valid YAML: 'keep' is there twice"),
        ("batch-size: 8\nbatch_size: 9", "has 'batch_size' twice; keep one of them."),
        ("split: true", "--split takes a value, but"),
        ("knee: 3", "--knee takes true or false, but"),
        ("keep: {heads: 3}", "--keep takes a value, but"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    file = written(tmp_path / "options.yaml", text)
    assert said in sentence(program("prune", m.bert, "--data", m.data_csv, "--out", out, "--config", file))
    assert not out.exists()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = program("prune", "m", "--config", tmp_path / "no.yaml")
    assert "There is no file" in sentence(done)
    assert "Cannot read the file" in sentence(program("prune", "m", "--config", tmp_path))


def test_values_are_checked_as_those_of_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path / "options.yaml", "rounds: 2.5")
    command = ("prune", "m", "--data", "d.csv", "--out", tmp_path / "out")
    done = program(*command, "--config", file)
    assert (done.code, "--rounds" in done.err) == (2, True)
    assert done.err == program(*command, "--rounds", "2.5").err


def test_old_names_are_taken_with_a_word_about_the_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "options.yaml", "data: d.csv\nout: o\ncompensate: mean\nround: 4\nschedule: sweep")
    values = parsed("prune", "m", "--config", file)
    assert (values["repair"], values["round_to"], values["schedule"]) == ("mean", 4, "layerwise")
    assert capsys.readouterr().err.count("is called") == 3


def test_the_file_of_a_run_repeats_it(tmp_path: Path) -> None:
    m, first, second = material(), tmp_path / "first", tmp_path / "second"
    options = (
        "--calibration-samples",
        "8",
        "--criterion",
        "magnitude",
        "--repair",
        "none",
        "--keep",
        "8",
        "--every",
        "2",
    )
    assert program("prune", m.bert, "--data", m.data_csv, *options, "--out", first).code == 0
    assert program("prune", "--config", first / "run.json", "--out", second).code == 0
    settings = [json.loads((run / "run.json").read_text())["settings"] for run in (first, second)]
    assert settings[0] == settings[1]
    assert (first / "steps.jsonl").read_bytes() == (second / "steps.jsonl").read_bytes()
    said = sentence(program("train", "--data", m.data_csv, "--out", second, "--config", first / "run.json"))
    assert "is of a run of `prune`, whose options are not those of train" in said


@pytest.mark.parametrize(
    ("verb", "words", "expected"),
    [
        ("evaluate", "RUN --data d.csv", {"max_length": 64, "label_column": "class", "metric": "f1"}),
        ("export", "RUN --to onnx", {"max_length": 64, "label_column": "class", "metric": "f1"}),
        ("finetune", "RUN --data d.csv", {"label_column": "class"}),
    ],
)
@pytest.mark.parametrize("kind", ["prune", "train"])
def test_verbs_that_begin_with_a_run_read_data_as_another_run(
    verb: str, words: str, expected: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """The model and the data stay their own, and so do options of another meaning, such as the drop that a
    quantisation may cost and the seed of a training."""
    experiment = Experiment(
        model="m", data="dev.csv", max_length=64, label_column="class", metric="f1", max_drop=0.3, seed=7, threads=3
    )
    gates = {} if kind == "prune" else {"gates": dataclasses.asdict(GateConfig(keep=0.5)), "training": {"seed": 7}}
    settings = {"format": 1, "settings": {**experiment.settings(), **gates}}
    file = written(tmp_path / "run.json", json.dumps(settings))
    assert parsed(verb, *words.split(), "--config", file) == {**parsed(verb, *words.split()), **expected}


def test_the_file_of_a_training_is_the_command_that_a_report_shows(tmp_path: Path) -> None:
    gates = GateConfig(keep=0.5, warmup=0.25, group=16)
    config = TrainConfig(epochs=2.0, evaluations=3, learning_rate=1e-4)
    experiment = Experiment(model="m", data="dev.csv", calibration="d.csv", max_length=64, device="cpu")
    training = {"data": "d.csv", "evaluation": "dev.csv", "finetune_epochs": 0.5, "gate_rate": 7.0}
    settings = {
        **experiment.settings(),
        "gates": dataclasses.asdict(gates),
        "training": {**config.settings(), **training},
    }
    file = written(tmp_path / "run.json", json.dumps({"format": 1, "settings": settings}))
    words = command_words(settings)
    assert words[:3] == ["headprune", "train", "m"]
    expected = parsed("train", *words[2:], "--out", "o")
    values = parsed("train", "--config", file, "--out", "o")
    usual = GateConfig(l0=0.0)  # a run has what was decided where a command leaves it out
    for name in ("start", "straight_through", "rescale"):
        assert values.pop(name) == getattr(usual, name)
        assert expected.pop(name) is None
    assert values == expected
