"""Exports in reports and cards: the numbers of every runtime, and code that runs the model there."""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from browser import Browser, find_browser
from headprune.errors import RunError
from headprune.reports.card import run_card
from headprune.reports.exports import NO_VALUE, columns, exports_of, rows, uses
from headprune.reports.page import write_report
from headprune.reports.recovery import origin
from headprune.reports.run_view import load_runs
from headprune.run_folder.exports import NAME
from run_helpers import headprune as program
from run_helpers import material, prune_command
from snippets import executed
from synthetic_runs import EVIL, make_run

READY = "document.body && document.body.dataset.ready === 'yes'"
ONNX: dict[str, Any] = {
    "format": 1,
    "runtime": "onnx",
    "quantize": None,
    "model": "runs/one/model",
    "task": "sequence-classification",
    "versions": {"headprune": "0.1", "onnxruntime": "1.2"},
    "check": {
        "samples": 872,
        "difference": 3.14e-07,
        "tolerance": 1e-4,
        "tokens": None,
        "metric": "accuracy",
        "pytorch": {"value": 0.9151, "interval": [0.8946, 0.9318]},
        "exported": {"value": 0.9162, "interval": [0.8958, 0.9328]},
        "agreement": 0.9989,
    },
    "latency": {
        "threads": 1,
        "repeats": 9,
        "batch_1": {"dense": 14.102, "pruned": 9.416, "speedup": 1.4977},
        "batch_32": {"dense": 402.5, "pruned": 251.25, "speedup": 1.602},
    },
    "megabytes": {"dense": 418.11, "pruned": 301.02},
    "of": "model",
    "out": "exports/onnx",
    "snippet": 'print("onnx", "DIR/model.onnx", DIRECTION)\n',
    "install": "onnxruntime numpy",
    "title": "ONNX Runtime",
    "created": "2026-01-01T00:00:00+00:00",
}
GGUF: dict[str, Any] = {
    **ONNX,
    "runtime": "gguf",
    "title": "llama.cpp",
    "quantize": "int8",
    "task": "causal-lm",
    "check": {
        "samples": 4,
        "difference": 0.0821,
        "tolerance": None,
        "tokens": 19,
        "metric": "perplexity",
        "pytorch": {"value": 21.336, "interval": [20.11, 22.64]},
        "exported": {"value": 21.401, "interval": [20.17, 22.71]},
        "agreement": 0.97,
    },
    "latency": {"threads": 2, "repeats": 9, "generate_20": {"pruned": 88.4}},
    "megabytes": {"pruned": 71.5},
    "of": "finetuned/model",
    "out": "exports/gguf",
    "snippet": 'load("DIR")\n',
    "install": "llama-cpp-python",
}


def exported(folder: Path, *records: dict[str, Any]) -> Path:
    """The run as it is after these exports."""
    (folder / NAME).write_text(json.dumps({"format": 1, "exports": list(records)}))
    return folder


def told(run: Path, *more: Path) -> str:
    """What the page says, without its tags and its scripts."""
    text = write_report([run, *more], run.parent / "report.html").read_text().split("<script>")[0].split("</style>")[1]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def without(record: dict[str, Any], *path: str) -> dict[str, Any]:
    actual = copy.deepcopy(record)
    inner = actual
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return actual


# --- the table ---


def test_the_page_has_every_number(tmp_path: Path) -> None:
    text = told(exported(make_run(tmp_path / "run"), ONNX, {**GGUF, "check": ONNX["check"]}))
    table = text.split("In other runtimes")[1].split("How to use the model")[0]
    assert (
        "time and size runtime MB milliseconds, batch of 1 milliseconds, batch of 32 milliseconds, 20 tokens generated "
        f"ONNX Runtime 418.11 → 301.02 14.10 → 9.42 1.50x 402.50 → 251.25 1.60x {NO_VALUE} "
        f"llama.cpp, int8 recovered 71.50 {NO_VALUE} {NO_VALUE} 88.40 "
    ) in table
    assert (
        "compared with PyTorch runtime accuracy in PyTorch accuracy exported agreement largest difference "
        "ONNX Runtime 91.51% [89.5, 93.2] 91.62% [89.6, 93.3] 99.89% 3.1e-07 of 0.0001 allowed "
        "llama.cpp, int8 recovered 91.51%"
    ) in table
    assert "on 872 samples" in table
    assert "median of 9 repetitions, CPU threads: 1 or 2;" in table
    assert "95% interval" in table


def test_writing_and_other_metrics_have_their_columns() -> None:
    assert columns([ONNX])[-1] == "largest difference"
    assert columns([GGUF])[-4:] == [
        *("perplexity exported", "agreement", "largest difference", "tokens equal to PyTorch"),
    ]
    assert [tuple(cell) for cell in rows([GGUF])[0]] == [
        ("llama.cpp, int8", "recovered"),
        ("71.50", ""),
        ("88.40", ""),
        ("21.34", "[20.11, 22.64]"),
        ("21.4", "[20.17, 22.71]"),
        ("97.00%", ""),
        ("0.082", "quantised"),
        ("19 of 20", ""),
    ]
    both = rows([ONNX, GGUF])
    assert "metric in PyTorch" in columns([ONNX, GGUF])
    assert [cell.text for cell in both[0]][-5:] == [
        *("accuracy 91.51%", "accuracy 91.62%", "99.89%", "3.1e-07", NO_VALUE),
    ]
    assert all(len(row) == len(columns([ONNX, GGUF])) for row in both)
    point = rows([{**ONNX, "of": "models/speedup-1.5"}])
    assert tuple(point[0][0]) == ("ONNX Runtime", "speedup-1.5")


def test_data_without_a_metric_has_no_column_for_it() -> None:
    silent = {**ONNX, "check": {**ONNX["check"], "metric": None, "pytorch": None, "exported": None}}
    assert columns([silent])[-2:] == ["milliseconds, batch of 32", "largest difference"]
    assert len(rows([silent])[0]) == len(columns([silent]))


def test_a_run_that_was_not_exported_says_nothing_of_runtimes(tmp_path: Path) -> None:
    text = told(make_run(tmp_path / "run"))
    assert "In other runtimes" not in text
    assert "How to use the model" not in text  # it has no model either
    assert exports_of(tmp_path / "run") == []


DAMAGED = {
    "no json": "{",
    "no list": '{"exports": 3}',
    "a list of words": '{"exports": ["onnx"]}',
    "a list": "[]",
    "a binary file": "\x00",
}
PARTS = (("check",), ("check", "difference"), ("latency",), ("megabytes", "pruned"), ("title",), ("of",), ("snippet",))


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (make_run(tmp_path / "run") / NAME).write_text(text)
    with pytest.raises(RunError, match=r"exports\.json is damaged; delete it and export the run again\."):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("path", PARTS, ids=".".join)
def test_a_record_without_a_part_is_damaged(tmp_path: Path, path: tuple[str, ...]) -> None:
    with pytest.raises(RunError, match="is damaged"):
        exports_of(exported(tmp_path, without(ONNX, *path)))


def test_exports_of_one_model(tmp_path: Path) -> None:
    exported(tmp_path, ONNX, GGUF)
    assert [one["runtime"] for one in exports_of(tmp_path)] == ["onnx", "gguf"]
    assert [one["runtime"] for one in exports_of(tmp_path, "finetuned/model")] == ["gguf"]


# --- the card ---


def test_the_card_has_the_table_before_its_use(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = run_card(folder)
    card = run_card(exported(folder, ONNX, GGUF))  # of which one is of another model
    assert "\n\n## Runtimes\n\n| runtime | MB |" in card
    assert (
        "| ONNX Runtime | 418.11 → 301.02 | 14.10 → 9.42 1.50x | 402.50 → 251.25 1.60x "
        "| 91.51% \\[89.5, 93.2\\] | 91.62% \\[89.6, 93.3\\] | 99.89% | 3.1e-07 of 0.0001 allowed |\n"
    ) in card
    assert card.index("## Runtimes") < card.index("\n\n## Use\n")
    section = card[card.index("## Runtimes") : card.index("## Use\n")]
    assert "llama.cpp" not in section
    assert card.replace(section, "") == before
    (folder / NAME).unlink()
    assert run_card(folder) == before


def test_folders_of_a_machine_are_not_in_the_card(tmp_path: Path) -> None:
    card = run_card(exported(make_run(tmp_path / "run"), ONNX))
    assert "exports/onnx" not in card
    assert "runs/one" not in card


# --- how it is used ---


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a classifier, as the program leaves it, whose checkpoint brings its code."""
    run = tmp_path_factory.mktemp("real") / "run"
    done = program(
        *prune_command(material().bert, material().data_csv, run, "--keep", "0.7", "--criterion", "magnitude")
    )
    assert done.code == 0, done.err
    headprune.save(headprune.load(run / "model"), run / "model", portable=True)
    return run


def shown_uses(page: Path) -> dict[str, list[str]]:
    """The line that installs and the code, by the title of their tab, as they stand on a page."""
    text = page.read_text()
    tabs = re.findall(r"<label for=\"use-0-\d\">(.*?)</label>\n<div class=\"tab\">(.*?)</div>", text, re.DOTALL)
    inside = {title: re.findall(r"<pre.*?>(.*?)</pre>", tab, re.DOTALL) for title, tab in tabs}
    return {title: list(map(html.unescape, actual)) for title, actual in inside.items()}


def test_the_code_on_the_page_runs(real: Path, tmp_path: Path) -> None:
    """As it stands on the page: with transformers where headprune is missing, and with headprune. Both say the same."""
    exported(real, ONNX)
    shown = shown_uses(write_report([real], tmp_path / "report.html"))
    assert list(shown) == ["transformers", "headprune", "ONNX Runtime"]
    assert shown["transformers"][0] == "pip install transformers torch"
    assert shown["headprune"][0] == "pip install headprune"
    assert shown["ONNX Runtime"] == [
        "pip install onnxruntime numpy",
        'print("onnx", "exports/onnx/model.onnx", DIRECTION)\n',
    ]
    assert "trust_remote_code=True" in shown["transformers"][1]
    alone = executed({"it": shown["transformers"][1]}, tmp_path, missing=["headprune"])
    assert re.fullmatch(r"\[{'label': '(red|green|blue)', 'score': [\d.]+}\]\n", alone["it"])
    assert executed({"it": shown["headprune"][1]}, tmp_path) == alone


def test_an_export_as_it_is_made(real: Path, tmp_path: Path) -> None:
    """What an export measures is what a page reads, and the code there needs neither headprune nor PyTorch."""
    pytest.importorskip("onnxruntime")
    from headprune.exports.export_model import export
    from headprune.exports.runtime import RUNTIMES

    model = headprune.load(real / "model")
    batch = {"input_ids": torch.randint(5, 60, (4, 9)), "labels": torch.tensor([0, 1, 2, 0])}
    record = export(model, tmp_path / "onnx", [batch], to="onnx", dense=headprune.load(material().bert))
    runtime = RUNTIMES["onnx"]
    more = {"of": "model", "out": str(tmp_path / "onnx"), "install": runtime.install, "title": runtime.title}
    exported(real, {**record, **more})
    text = told(real)
    size, quick = record["megabytes"], record["latency"]["batch_4"]
    assert f"{runtime.title} {size['dense']:.2f} → {size['pruned']:.2f}" in text
    assert f"{quick['dense']:.2f} → {quick['pruned']:.2f} {quick['speedup']:.2f}x" in text
    snippet = shown_uses(real.parent / "report.html")[runtime.title][1]
    assert "logits (" in executed({"it": snippet}, tmp_path, missing=["headprune", "torch"])["it"]


def test_a_checkpoint_that_only_headprune_loads(real: Path, tmp_path: Path) -> None:
    """Code that cannot run is not shown."""
    run = load_runs([real])[0]
    file = real / "model" / "config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps(without(json.loads(before), "auto_map")))
        assert [use.title for use in uses(run, [])] == ["headprune"]
    finally:
        file.write_text(before)
    assert [use.title for use in uses(run, [])] == ["transformers", "headprune"]


def test_a_recovered_model_is_the_one_to_use(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = load_runs([folder])[0]
    config = json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    for place in ("model", "finetuned/model"):
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text(config)
    assert f'"{folder}/model"' in uses(run)[0].snippet
    value = {"value": 0.8, "interval": None}
    record = {
        "settings": {"distill": 1.0, "hidden": 0.0, "lora": 0, "epochs": 1.0, "learning_rate": 1e-4, "seed": 0},
        "of": origin(run.record),
        "metric": "accuracy",
        "samples": {"training": 100, "evaluation": 64},
        **dict.fromkeys(("dense", "pruned", "recovered"), value),
        "steps": 7,
        "best_step": 7,
    }
    (folder / "finetuned" / "finetune.json").write_text(json.dumps(record))
    assert f'"{folder}/finetuned/model"' in uses(run)[0].snippet


def test_the_folder_of_an_export_is_quoted(tmp_path: Path) -> None:
    folder = 'a "b" \\1'
    run = load_runs([exported(make_run(tmp_path / "run"), {**GGUF, "out": folder, "snippet": 'print("DIR")'})])[0]
    actual = uses(run)[0]
    assert actual.title == "llama.cpp, int8 (recovered)"
    assert executed({"it": actual.snippet}, tmp_path) == {"it": f"{folder}\n"}


def test_each_run_of_a_page_has_its_own(tmp_path: Path) -> None:
    """Trials of random that are drawn together are not for use, unless somebody exported one."""
    folder = tmp_path / "runs"
    for name in ("gnorm", "his"):
        exported(make_run(folder / name, criterion=name, savings=False), {**ONNX, "out": f"to/{name}"})
    for seed in range(3):
        run = make_run(folder / f"r{seed}", seed=seed, criterion=f"random(seed={seed})", savings=False)
        (run / "model").mkdir()
        (run / "model" / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    text = told(folder)
    used = text.split("How to use the model")[1].split("How it was made")[0]
    assert text.split("In other runtimes")[1].split("How to use the model")[0].count("ONNX Runtime 418.11") == 2
    assert '"to/gnorm/model.onnx"' in used
    assert '"to/his/model.onnx"' in used
    assert "r0" not in used
    exported(folder / "r0", ONNX)
    assert "r0/model" in told(folder).split("How to use the model")[1].split("How it was made")[0]


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    actual, reason = find_browser()
    if actual is None:
        pytest.skip(reason)
    with Browser(actual) as running:
        yield running


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        '{"architectures": ["BertForMaskedLM"], "model_type": "bert", '
        '"auto_map": {"AutoModelForMaskedLM": "a.BertForMaskedLM"}}'
    )
    odd = {**GGUF, "title": EVIL, "install": EVIL, "snippet": EVIL, "out": EVIL, "check": ONNX["check"]}
    return write_report([exported(folder, ONNX, {**GGUF, "of": "model"}, odd)], tmp_path / "report.html")


@pytest.mark.parametrize("width", [1280, 390])
def test_tabs_work_without_scripts(browser: Browser, page_file: Path, width: int) -> None:
    with browser.page() as page:
        page.emulate(width=width)
        page.open(page_file, READY)
        shown = "[...document.querySelectorAll('.tab')].map(tab => tab.checkVisibility())"
        assert page.evaluate(shown) == [True, False, False, False, False]
        page.evaluate("document.querySelector('label[for=use-0-2]').click()")
        assert page.evaluate(shown) == [False, False, True, False, False]
        page.evaluate("document.getElementById('use-0-2').focus()")
        page.press("ArrowLeft")
        assert page.evaluate(shown) == [False, True, False, False, False]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert EVIL in page.evaluate("document.querySelector('.runtimes').innerText")
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.evaluate(shown) == [True] * 5
        assert (page.errors, page.warnings, page.dialogs, len(set(page.requests))) == ([], [], [], 1)
