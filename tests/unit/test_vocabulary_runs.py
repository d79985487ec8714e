"""`prune --vocabulary`: the run, its record, its resumption, and what is refused."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest
import torch
import transformers

import headprune
from headprune.search.config import Experiment
from headprune.search.settings import command_words
from run_helpers import COLOURS, interrupt, material, prune_command, same_but_timing, steps_of
from run_helpers import headprune as program
from zoo import VOCAB

SPECIAL = 5


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Data with the words w10 to w29, a text with w31 and w33, and nothing with any other."""
    rng = random.Random(0)
    rows = [f"{' '.join(f'w{rng.randrange(10, 30)}' for _ in range(5))},{COLOURS[n % 3]}" for n in range(24)]
    (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    (tmp_path / "more.txt").write_text("w31 w33\n")
    (tmp_path / "table.csv").write_text("text\nw40 w31\n")
    return tmp_path


def kept_words(*numbers: int) -> list[int]:
    return [*range(SPECIAL), *range(10, 30), *numbers]


def test_the_run_has_the_tokens_of_its_texts(files: Path) -> None:
    out, data = files / "run", str(files / "data.csv")
    given = [*("--vocabulary", str(files / "more.txt")), *("--vocabulary", str(files / "table.csv"))]
    done = program(*prune_command(material().bert, data, out, "--keep", "9", *given))
    assert done.code == 0, done.err
    kept = kept_words(31, 33, 40)
    assert json.loads((out / "model" / "kept_tokens.json").read_text()) == kept
    model, tokenizer = headprune.load(out), transformers.AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.get_vocab().keys() == {
        *("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
        *(f"w{n}" for n in kept[5:]),
    }
    rows = model.get_input_embeddings().weight
    assert rows.shape[0] == len(kept) == len(tokenizer)
    dense = transformers.AutoModel.from_pretrained(material().bert).get_input_embeddings().weight
    assert torch.equal(rows, dense[kept])

    record = json.loads((out / "run.json").read_text())
    gone = (VOCAB - len(kept)) * rows.shape[1]
    assert record["vocabulary"] == {"before": VOCAB, "after": len(kept), "parameters": gone}
    full = sum(p.numel() for p in headprune.load(material().bert).parameters())
    assert steps_of(out)[0]["parameters"] == full - gone
    assert steps_of(out)[-1]["parameters"] == sum(p.numel() for p in model.parameters())
    said = f"The vocabulary was shrunk to {len(kept)} of {VOCAB} tokens first, which removed {gone:,} parameters"
    assert said in (out / "model" / "README.md").read_text()
    assert said in " ".join(done.out.split())
    inspected = program("inspect", out, "--json").json
    assert inspected["parameters"]["total"] == steps_of(out)[-1]["parameters"]


def test_a_classifier_is_pruned_as_with_all_its_tokens(files: Path) -> None:
    """Its outputs are the same, so scores, repairs, removals and the metric are, too. (Not with the default criterion,
    which draws signs by the content of a row: with other ids it is another draw.)"""
    data, how = str(files / "data.csv"), ("--keep", "6", "--criterion", "gnorm")
    for name, given in (("full", []), ("small", ["--vocabulary", str(files / "more.txt")])):
        done = program(*prune_command(material().bert, data, files / name, *how, *given))
        assert done.code == 0, done.err
    for one, other in zip(steps_of(files / "full"), steps_of(files / "small"), strict=True):
        assert {**one, "parameters": 0} == {**other, "parameters": 0}
        assert one["parameters"] > other["parameters"]


def test_calibration_data_is_covered_as_well(files: Path) -> None:
    (files / "calibration.csv").write_text("text,label\n" + "\n".join(f"w5{n} w10,red" for n in range(9)) + "\n")
    given = ["--calibration", str(files / "calibration.csv"), "--vocabulary", str(files / "more.txt")]
    done = program(*prune_command(material().bert, str(files / "data.csv"), files / "run", "--keep", "9", *given))
    assert done.code == 0, done.err
    kept = json.loads((files / "run" / "model" / "kept_tokens.json").read_text())
    assert kept == kept_words(31, 33, *range(50, 59))


@pytest.mark.parametrize("model", ["masked", "llama"])
def test_language_models(files: Path, model: str) -> None:
    words = [f"w{number % 20 + 10}" for number in range(120)]
    (files / "text.txt").write_text(" ".join(words) + "\n")
    given = ["--vocabulary", str(files / "more.txt"), "--max-length", "8"]
    command = prune_command(getattr(material(), model), str(files / "text.txt"), files / "run", "--keep", "0.5", *given)
    done = program(*command)
    assert done.code == 0, done.err
    kept = json.loads((files / "run" / "model" / "kept_tokens.json").read_text())
    assert set(kept) >= set(kept_words(31, 33))
    saved = headprune.load(files / "run")
    assert saved.get_output_embeddings().weight.shape[0] == saved.config.vocab_size == len(kept)


def test_an_interrupted_run_goes_on(files: Path) -> None:
    data, given = str(files / "data.csv"), ["--keep", "6", "--vocabulary", str(files / "more.txt")]
    for name in ("whole", "torn"):
        assert program(*prune_command(material().bert, data, files / name, *given)).code == 0
    interrupt(files / "torn", 3)
    done = program(*prune_command(material().bert, data, files / "torn", *given))
    assert done.code == 0, done.err
    same_but_timing(files / "whole", files / "torn")
    for name in ("tokenizer.json", "kept_tokens.json"):
        assert (files / "whole" / "model" / name).read_bytes() == (files / "torn" / "model" / name).read_bytes()


def test_other_texts_are_another_run(files: Path) -> None:
    data, given = str(files / "data.csv"), ["--keep", "9", "--vocabulary", str(files / "more.txt")]
    assert program(*prune_command(material().bert, data, files / "run", *given)).code == 0
    (files / "more.txt").write_text("w31 w35\n")
    done = program(*prune_command(material().bert, data, files / "run", *given))
    assert (done.code, "vocabulary_fingerprint was" in done.err) == (2, True)
    done = program(*prune_command(material().bert, data, files / "run", "--keep", "9"))
    assert (done.code, "other settings: vocabulary was" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("model", "data", "texts", "said"),
    [
        ("bert", "data_csv", "nowhere.txt", "There is no file"),
        ("bert", "data_csv", "empty.txt", "has no text"),
        ("vit", "pictures_npz", "more.txt", "no table of token embeddings"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(files: Path, model: str, data: str, texts: str, said: str) -> None:
    (files / "empty.txt").write_text("\n")
    command = prune_command(getattr(material(), model), getattr(material(), data), files / "run")
    done = program(*command, "--keep", "0.5", "--vocabulary", str(files / texts))
    assert done.code == 2
    assert said in done.err.splitlines()[-1]
    assert not (files / "run").exists()


def test_the_command_of_a_run_names_every_file() -> None:
    experiment = Experiment(model="m", data="d.csv", vocabulary=("a.txt", "b c.csv"))
    settings = json.loads(json.dumps(experiment.settings()))
    words = command_words(settings)
    assert shlex.join(words) == "headprune prune m --data d.csv --vocabulary a.txt --vocabulary 'b c.csv'"
    assert Experiment(model="m", data="d.csv", vocabulary="a.txt").vocabulary == ("a.txt",)  # type: ignore[arg-type]
    assert "--vocabulary" not in command_words(Experiment(model="m", data="d", vocabulary=()).settings())
