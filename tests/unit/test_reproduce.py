"""`headprune reproduce greedy-gnorm`: tables with the published integers, figures with the published points."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import runpy
import shlex
import statistics
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import torch
from rich.console import Console
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from headprune.cli.main import app
from headprune.errors import HeadpruneError
from headprune.papers import ReproductionError, gradients, langid, reproduce_greedy_gnorm
from headprune.papers.evidence import size_findings
from headprune.papers.figure_data import CRITERIA, Panel
from headprune.papers.figures import box_rows, figure3, figure4, figure5
from headprune.papers.panels_from_runs import run_panels
from headprune.papers.paper_models import MODELS, find_model
from headprune.papers.protocol import PROTOCOLS, comparisons, find_protocol, prepare_data, run_protocol
from headprune.papers.published import (
    mask_of_order,
    published_panels,
    read_curve,
    read_masks,
    read_orders,
    read_sheet,
    read_trials,
)
from headprune.papers.published_sizes import PUBLISHED, compare_sizes
from headprune.papers.tables import make_tables
from headprune.run_folder import read_run
from headprune.runs.studies.study_runs import make_group
from headprune.runs.studies.summary import GroupResult
from helpers import SHARED
from pictures import drawing

FOLDER = SHARED / "reference" / "greedy-gnorm"
needs_published = pytest.mark.skipif(not FOLDER.is_dir(), reason="the authors' files of ../shared are not here")

# Heads, removed, accuracy before and after, parameters before and after, MB before and after.
SUMMARY = {
    "BERT-base": ["144", "117", "96.82", "90.08", "102269955", "79244355", "390.13", "302.29"],
    "ALBERT-base-v2": ["12", "3", "84.48", "77.76", "11685891", "11095491", "44.58", "42.33"],
    "RoBERTa-large": ["384", "245", "87.80", "86.40", "355361794", "291089474", "1355.60", "1110.42"],
    "XLM-RoBERTa-base": ["144", "105", "99.73", "90.97", "278059028", "257395028", "1060.71", "981.88"],
}
# Derived: heads removed in per cent, change of the accuracy in points, parameters removed in per cent.
DERIVED = {
    "BERT-base": ["81.25", "-6.74", "22.51"],
    "ALBERT-base-v2": ["25.00", "-6.72", "5.05"],
    "RoBERTa-large": ["63.80", "-1.40", "18.09"],
    "XLM-RoBERTa-base": ["72.92", "-8.76", "7.43"],
}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


@pytest.fixture(scope="module")
def tables() -> list[Any]:
    return make_tables()


# --- tables ---


def test_table_1_equals_the_published_one(tables: list[Any]) -> None:
    headings, *rows = rows_of(tables[0].csv())
    derived = [3, 6, 9]
    assert [headings[column] for column in derived] == ["Heads removed (%)", "Change of it", "Parameters removed (%)"]
    shown = {row[0]: [cell for column, cell in enumerate(row) if column and column not in derived] for row in rows}
    assert shown == SUMMARY
    assert {row[0]: [row[column] for column in derived] for row in rows} == DERIVED
    assert "as published" in tables[0].note
    assert "not measured" in tables[0].note


@pytest.mark.parametrize("place", range(4), ids=[model.key for model in MODELS])
def test_tables_2_to_5_equal_the_published_ones(tables: list[Any], place: int) -> None:
    """Every row: parameters exactly, shares and MB to the two decimals that are published."""
    table = tables[place + 1]
    assert table.number == place + 2
    shown = []
    for name, before, share_before, after, share_after, removed, *sizes in table.rows:
        numbers = [(before, share_before, sizes[0]), (after, share_after, sizes[1])]
        shown.append((name, *((count, round(share, 2), round(size, 2)) for count, share, size in numbers)))
        assert removed == pytest.approx(100 * (1 - after / before))
    assert shown == PUBLISHED[MODELS[place].key]


def test_the_ledger_compares_every_published_row(monkeypatch: pytest.MonkeyPatch) -> None:
    models = compare_sizes()["models"]
    assert [model["title"] for model in models] == [model.title for model in MODELS]
    assert all(row["counted"] == row["published"] for model in models for row in model["rows"])
    assert {finding.verdict for finding in size_findings({"models": models})} == {"equal"}
    # One parameter more is noticed.
    name, before, after = PUBLISHED["albert"][3]
    changed = [*PUBLISHED["albert"][:3], (name, before, (after[0] + 1, *after[1:])), *PUBLISHED["albert"][4:]]
    monkeypatch.setitem(PUBLISHED, "albert", changed)
    verdicts = {(f.claim, f.subject): f.verdict for f in size_findings(compare_sizes())}
    assert [key for key, verdict in verdicts.items() if verdict != "equal"] == [
        ("gnorm-module-sizes", "ALBERT-base-v2")
    ]


def test_all_published_rows_are_there(tables: list[Any]) -> None:
    assert sum(len(table.rows) for table in tables[1:]) == sum(map(len, PUBLISHED.values())) == 30


def test_csv_and_markdown_hold_the_same_cells(tables: list[Any]) -> None:
    for table in tables:
        lines = [line for line in table.markdown().splitlines() if line.startswith("| ")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        plain = [[cell.replace(",", "") for cell in row] for row in cells]
        assert plain == rows_of(table.csv())


# --- the authors' files ---


@needs_published
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_final_masks_are_the_beginnings_of_the_orders(model: Any) -> None:
    masks, orders = read_masks(FOLDER), read_orders(FOLDER)
    assert masks is not None
    assert orders is not None
    mask, order = masks[model.key], orders[model.key]
    assert sum(not bit for row in mask for bit in row) == model.removed
    assert len(order) == len(set(order)) == model.heads - 1
    assert mask_of_order(model, order) == mask


@needs_published
def test_the_joined_trials_are_the_two_groups() -> None:
    joined = read_trials(FOLDER, find_model("bert"))
    header, *first = read_sheet(FOLDER / "BERTrandompruned_heads_data_50x25_1group.xlsx")
    _, *second = read_sheet(FOLDER / "BERTrandompruned_heads_data_50x25_2group.xlsx")
    assert header[:2] == ["Heads Pruned", "Trial_1"]
    assert len(joined) == 25
    for one, two in zip(first, second, strict=True):
        assert joined[int(one[0])] == pytest.approx([*one[1:], *two[1:]])


@needs_published
def test_trials_of_the_other_models() -> None:
    for key, step, count in (("albert", 12, 13), ("roberta", 16, 25), ("xlm-roberta", 6, 25)):
        trials = read_trials(FOLDER, find_model(key))
        assert sorted(trials) == [step * n for n in range(count)]
        assert {len(values) for values in trials.values()} == {25}


def inline(chart: Any) -> list[dict[str, Any]]:
    """All rows that a chart draws, in the order of its parts."""
    actual: list[dict[str, Any]] = []

    def walk(part: dict[str, Any]) -> None:
        actual.extend(datasets.get(part.get("data", {}).get("name"), []))
        for key in ("layer", "concat", "hconcat", "vconcat"):
            for child in part.get(key, []):
                walk(child)

    whole = chart if isinstance(chart, dict) else chart.to_dict()
    datasets = whole["datasets"]
    walk(whole)
    return actual


def panels_of(chart: Any) -> dict[str, dict[str, Any]]:
    whole = chart.to_dict()
    return {panel["title"]: {**panel, "datasets": whole["datasets"]} for panel in whole["concat"]}


@needs_published
def test_figure_3_holds_every_point_of_the_csv_files() -> None:
    drawn = panels_of(figure3(published_panels(FOLDER), ""))
    assert list(drawn) == [model.title for model in MODELS]
    for model in MODELS:
        rows = inline(drawn[model.title])
        for criterion, shown in CRITERIA.items():
            points = [(row["removed"], row["value"]) for row in rows if row.get("criterion") == shown]
            suffix = {"gnorm": "GreedyGnorm", "inverse:gnorm": "InverseGreedyGnorm", "entropy": "AE"}
            name = f"pruned_heads_accuracy({model.published})basedon{suffix.get(criterion, 'AEinverse')}.csv"
            with (FOLDER / name).open() as stream:
                expected = [(int(r["Pruned_Heads"]), float(r["Accuracy"])) for r in csv.DictReader(stream)]
            assert points == expected
        assert {"removed": model.removed * model.applications} in rows


@needs_published
def test_figures_4_and_5_hold_the_published_data() -> None:
    panels = published_panels(FOLDER)
    boxes = panels_of(figure4(panels, ""))
    assert [title.split(", ")[1] for title in boxes] == ["100 random trials", *["25 random trials"] * 3]
    for panel, spec in zip(panels, boxes.values(), strict=True):
        rows = inline(spec)
        line = [(row["removed"], row["value"]) for row in rows if "value" in row]
        assert line == list(panel.curves["gnorm"])
        assert [row["dense"] for row in rows if "dense" in row] == [panel.curves["gnorm"][0][1]]
        medians = {row["removed"]: row["middle"] for row in rows if "middle" in row}
        assert medians == {place: pytest.approx(statistics.median(v)) for place, v in panel.trials.items()}
    masks, orders = panels_of(figure5(panels, "")), read_orders(FOLDER)
    assert orders is not None
    for (title, spec), model in zip(masks.items(), MODELS, strict=True):
        ending = f", each used in {model.applications} layers" if model.applications > 1 else ""
        assert title == f"{model.title}: {model.heads - model.removed} of {model.heads} heads kept{ending}"
        rows = inline(spec)
        assert len(rows) == model.heads * model.applications
        removed = {(row["layer"], row["head"]) for row in rows if row["state"] == "removed"}
        order = orders[model.key][: model.removed]
        assert removed == {(site + layer, head) for site, head in order for layer in range(model.applications)}


def test_boxes() -> None:
    (row,) = box_rows({6: [0.1, 0.2, 0.3, 0.4, 0.9]}, 12)
    assert [row[name] for name in ("low", "lower", "middle", "upper", "high")] == [0.1, 0.2, 0.3, 0.4, 0.9]
    assert box_rows({0: [0.5]}, 12)[0]["lower"] == 0.5
    many = box_rows({place: [0.5, 0.6] for place in range(385)}, 384)
    assert [row["removed"] for row in many] == list(range(0, 385, 16))
    assert all(a["right"] < b["left"] for a, b in itertools.pairwise(many))


# --- bad input ---


def published_copy(folder: Path) -> Path:
    """Files of the authors' form, made up."""
    folder.mkdir()
    masks, orders = {}, {}
    for model in MODELS:
        for suffix in ("GreedyGnorm", "InverseGreedyGnorm", "AE", "AEinverse"):
            text = "Pruned_Heads,Accuracy\n0,0.9\n12,0.5\n24,\n"
            (folder / f"pruned_heads_accuracy({model.published})basedon{suffix}.csv").write_text(text)
        sheet(folder / f"{model.published}randompruned_heads_data_2x2_1group.xlsx", [[0, 0.9, 0.8], [12, 0.5, 0.4]])
        heads = [(site, head) for site in range(model.sites) for head in range(model.heads_per_site)]
        orders[model.published] = heads[:-1]
        gone = set(heads[: model.removed])
        masks[model.published] = [
            [int((site, head) not in gone) for head in range(model.heads_per_site)] for site in range(model.sites)
        ]
    (folder / "published_final_masks.json").write_text(json.dumps(masks))
    (folder / "published_pruning_order.json").write_text(json.dumps(orders))
    return folder


def sheet(path: Path, rows: list[list[Any]]) -> None:
    """A file of trials, as a spreadsheet program writes it; None is an empty cell."""
    book = openpyxl.Workbook()
    book.active.append(["Heads Pruned", *(f"Trial_{n}" for n in range(1, len(rows[0])))])
    for row in rows:
        book.active.append(row)
    book.save(path)


def test_cells_of_a_sheet(tmp_path: Path) -> None:
    """Whole numbers, numbers, holes, texts, and the results of formulas, which only a spreadsheet program computes."""
    sheet(tmp_path / "trials.xlsx", [[0, 0.5, None, 1], [12, None, 0.25, "missing"], [24, "=1+1", True, 0]])
    assert read_sheet(tmp_path / "trials.xlsx") == [
        ["Heads Pruned", "Trial_1", "Trial_2", "Trial_3"],
        [0.0, 0.5, None, 1.0],
        [12.0, None, 0.25, "missing"],
        [24.0, None, "True", 0.0],
    ]
    model = find_model("bert")
    (tmp_path / "trials.xlsx").rename(tmp_path / f"{model.published}randompruned_heads_data_3x3_1group.xlsx")
    assert read_trials(tmp_path, model) == {0: [0.5, 1.0], 12: [0.25], 24: [0.0]}


def zipped(path: Path, parts: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_sheet_that_is_too_large(tmp_path: Path) -> None:
    """A small file that unpacks to far more: it is not unpacked at all."""
    sheet(tmp_path / "good.xlsx", [[0, 0.5]])
    parts = {**parts_of(tmp_path / "good.xlsx"), "xl/sharedStrings.xml": b" " * (64 * 2**20)}
    path = zipped(tmp_path / "large.xlsx", parts)
    assert path.stat().st_size < 2**20
    with pytest.raises(ReproductionError, match=r"large\.xlsx is too large for a sheet of results; give the authors'"):
        read_sheet(path)


DAMAGE: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "empty": lambda parts: {},
    "no sheet": lambda parts: {name: data for name, data in parts.items() if "worksheets" not in name},
    "torn sheet": lambda parts: {name: data[: len(data) - 40 * ("sheet1" in name)] for name, data in parts.items()},
    "no number": lambda parts: {name: data.replace(b"<v>0.5</v>", b"<v>half</v>") for name, data in parts.items()},
    "no list of parts": lambda parts: {name: data for name, data in parts.items() if "Content_Types" not in name},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_sheet(name: str, tmp_path: Path) -> None:
    sheet(tmp_path / "good.xlsx", [[3, 0.5]])
    assert len(read_sheet(tmp_path / "good.xlsx")) == 2
    path = zipped(tmp_path / "bad.xlsx", DAMAGE[name](parts_of(tmp_path / "good.xlsx")))
    with pytest.raises(ReproductionError, match=r"bad\.xlsx cannot be read as xlsx \(\w+\); fetch it again\.$"):
        read_sheet(path)


def test_without_openpyxl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published_copy(tmp_path / "published")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(
        ReproductionError, match=r"needs openpyxl; install it with pip install 'headprune\[papers\]'\.$"
    ):
        read_trials(folder, find_model("bert"))


def test_curves_that_end_early_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    folder = published_copy(tmp_path / "published")
    assert read_curve(folder, find_model("xlm-roberta"), "gnorm") == [(0, 0.9), (12, 0.5)]
    assert figure3(published_panels(folder), "") is not None


@pytest.mark.parametrize("given", [(), ("masks",), ("orders",)])
def test_csv_and_xlsx_files_are_enough(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and orders add figure 5 and the comparison of the two; the authors published neither as a file."""
    monkeypatch.setattr(gradients, "demo_task", lambda: None)
    folder = published_copy(tmp_path / "published")
    names = {"masks": "published_final_masks.json", "orders": "published_pruning_order.json"}
    for name in set(names) - set(given):
        (folder / names[name]).unlink()
    console = quiet()
    files = reproduce_greedy_gnorm(tmp_path / "out", published=folder, console=console)
    drawn = {file.stem for file in files if file.suffix == ".png"}
    assert drawn == {"figure3", "figure4", *(["figure5"] if given else [])}
    expected = "were not compared with the removal orders" if given else "Figure 5 was left out: "
    assert expected in said(console)
    masks = [panel.mask for panel in published_panels(folder)]
    removed = [None if mask is None else sum(not bit for row in mask for bit in row) for mask in masks]
    assert removed == ([model.removed for model in MODELS] if given else [None] * 4)


BAD = {
    "no directory": (None, "", "There is no directory"),
    "no curve": ("pruned_heads_accuracy(BERT)basedonAE.csv", None, "There is no file"),
    "other columns": ("pruned_heads_accuracy(BERT)basedonAE.csv", "Heads,Accuracy\n1,2\n", "no column Pruned_Heads"),
    "no numbers": ("pruned_heads_accuracy(BERT)basedonAE.csv", "Pruned_Heads,Accuracy\na,b\n", "not two numbers"),
    "no rows": ("pruned_heads_accuracy(BERT)basedonAE.csv", "Pruned_Heads,Accuracy\n", "has no rows"),
    "no trials": ("BERTrandompruned_heads_data_2x2_1group.xlsx", None, "There is no file BERTrandom"),
    "no xlsx": ("BERTrandompruned_heads_data_2x2_1group.xlsx", "text", "cannot be read as xlsx"),
    "no json": ("published_final_masks.json", "{", "is not json"),
    "no models": ("published_final_masks.json", "[]", "does not name the four models"),
    "other shape": ("published_final_masks.json", '{"BERT": [[1, 0]]}', "no mask of 12 x 12 heads for BERT"),
    "no dense model": (
        "pruned_heads_accuracy(BERT)basedonGreedyGnorm.csv",
        "Pruned_Heads,Accuracy\n1,0.5\n",
        "at 0 heads",
    ),
    "unknown heads": ("published_pruning_order.json", '{"BERT": [[12, 0]]}', "up to where the paper stops (BERT: 117)"),
    "no entropies": ("published_attention_entropy.json", '{"BERT": [[1]]}', "no 12 x 12 entropies for BERT"),
    "no order": ("published_pruning_order.json", '{"BERT": 1}', "not a list of [layer, head]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_published_files(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    folder = tmp_path / "published"
    if name is not None:
        published_copy(folder)
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(content)
    with pytest.raises(ReproductionError) as caught:
        reproduce_greedy_gnorm(tmp_path / "out", published=folder, console=quiet())
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")
    assert not (tmp_path / "out").exists()


def test_other_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReproductionError, match="is a file; choose a directory"):
        reproduce_greedy_gnorm(tmp_path / "file", console=quiet())
    with pytest.raises(ReproductionError, match=r"There is no directory .* with runs"):
        reproduce_greedy_gnorm(tmp_path / "out", runs=tmp_path / "none", console=quiet())
    with pytest.raises(ReproductionError, match="has no runs of gnorm"):
        reproduce_greedy_gnorm(tmp_path / "out", runs=tmp_path / "empty", console=quiet())
    with pytest.raises(HeadpruneError):
        reproduce_greedy_gnorm(tmp_path / "out", figure2=(tmp_path / "empty", tmp_path / "none.tsv"), console=quiet())
    with pytest.raises(ReproductionError, match="no model 'gpt' in the paper; choose one of bert, albert"):
        find_protocol("gpt")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "another model": (["--run", "gpt"], "no model 'gpt' in the paper; choose one of bert, albert"),
    "figures too": (["--run", "bert", "--published", "x"], "--run only makes runs, so it has no --published"),
    "a head too": (["--run", "bert", "--head", "0,1"], "--run only makes runs, so it has no --head"),
    "another aggregation": (["--run", "bert", "--aggregation", "mean"], "no aggregation 'mean'; choose one of sample"),
    "no run": (["--trials", "2"], "--trials and --aggregation belong to --run; name a model"),
    "no head": (["--head", "first"], "--head is the number of a site and of a head, such as 0,3, not 'first'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_options(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises(HeadpruneError) as caught:
        app(["reproduce", "greedy-gnorm", "--out", str(tmp_path / "out"), *options], standalone_mode=False)
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")
    assert not (tmp_path / "out").exists()


def test_runs_need_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReproductionError, match="is a file; choose a directory for the runs"):
        run_protocol("bert", tmp_path / "file")


def test_the_former_command_names_todays(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("headprune.papers", run_name="__main__")
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "is now headprune reproduce greedy-gnorm --run MODEL" in shown
    assert shown.count("\n") == 1


# --- whole reproductions, on stand-ins ---


def stand_in(folder: Path, labels: int) -> Path:
    """A tiny BERT with a tokenizer of single letters."""
    folder.mkdir(parents=True)
    letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(letters))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        num_labels=labels,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def stand_in_data(path: Path, protocol: Any, labels: list[Any], rows: int = 30) -> Path:
    chance = random.Random(0)
    names = [name for name in (protocol.text, protocol.pair) if name]
    lines = ["\t".join([*names, protocol.label])]
    for row in range(rows):
        texts = [" ".join(chance.choices("abcdefgh", k=6)) for _ in names]
        lines.append("\t".join([*texts, str(labels[row % len(labels)])]))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_protocol_runs_on_stand_ins_and_its_runs_are_drawn(tmp_path: Path) -> None:
    """The one command per model: neutral rows go, rows to score on are apart, and the figures come from the runs."""
    for key, labels, known in (("roberta", [0, 1, 2], 2), ("albert", [0, 1, 2], 3)):
        model = stand_in(tmp_path / f"{key}-model", known)
        data = stand_in_data(tmp_path / f"{key}.tsv", find_protocol(key), labels)
        call = ["reproduce", "greedy-gnorm", "--run", key, "--out", str(tmp_path / "runs"), "--trials", "2"]
        app([*call, "--model", str(model), "--data", str(data)], standalone_mode=False)
    settings = [read_run(file.parent)[0]["settings"] for file in (tmp_path / "runs").rglob("run.json")]
    assert {one["criterion"] for one in settings} == {*CRITERIA, "random", "random(seed=1)"}
    assert {one["repair"] for one in settings} == {"none"}  # as published
    record, steps = read_run(tmp_path / "runs" / "roberta" / "greedy" / "gnorm")
    assert record["samples"] == {"calibration": 30, "evaluation": 20}
    assert record["settings"]["schedule"] == "greedy"
    static, _ = read_run(tmp_path / "runs" / "albert" / "static" / "inverse-entropy")
    assert static["settings"]["schedule"] == "one-shot"
    assert static["settings"]["pair_column"] == "pair"
    panels = run_panels(tmp_path / "runs")
    assert [panel.title for panel in panels] == ["ALBERT-base-v2", "RoBERTa-large"]
    assert panels[1].curves["gnorm"] == [(8 - step.heads, step.metric) for step in steps]
    assert panels[1].mask is not None
    assert sum(not bit for row in panels[1].mask for bit in row) == panels[1].stop
    assert {len(values) for values in panels[0].trials.values()} == {2}
    console = quiet()
    files = reproduce_greedy_gnorm(
        tmp_path / "out",
        runs=tmp_path / "runs",
        published=published_copy(tmp_path / "published"),
        figure2=(tmp_path / "albert-model", data_for_figure2(tmp_path)),
        console=console,
    )
    assert "give exactly the published final masks" in said(console)
    names = ["figure2", *(f"figure{n}{end}" for n in (3, 4, 5) for end in ("", "-runs"))]
    assert {file.name for file in files if file.parent.name == "figures"} == {
        f"{name}.{form}" for name in names for form in ("png", "svg", "pdf")
    }
    for file in files:
        assert file.stat().st_size > 500 or file.suffix in (".csv", ".md", ".json")
    shown = {name: drawing(tmp_path / "out" / "figures", name) for name in names}
    assert "Change of the weight gradients after removing head 0 of site 0" in shown["figure2"].texts
    for ending, sources in (("", "published by the authors"), ("-runs", "runs of headprune")):
        titles = {panel.title for panel in panels} | ({"BERT-base", "XLM-RoBERTa-base"} if not ending else set())
        assert all(f"Data: {sources}." in shown[f"figure{number}{ending}"].texts[-1] for number in (3, 4, 5))
        assert titles | set(CRITERIA.values()) <= set(shown[f"figure3{ending}"].texts)
        assert {f"{title}, 2 random trials" for title in titles} <= set(shown[f"figure4{ending}"].texts)
    for panel in panels:
        mask = panel.mask or []
        kept = f"{panel.title}: {sum(map(sum, mask))} of {sum(map(len, mask))} heads kept"
        assert kept in shown["figure5-runs"].texts


def data_for_figure2(folder: Path) -> Path:
    path = folder / "figure2.tsv"
    path.write_text("text\tlabel\n" + "".join(f"a b {letter}\t{place % 3}\n" for place, letter in enumerate("cdefgh")))
    return path


def test_figure_2_shows_the_pruned_site_and_all_others(tmp_path: Path) -> None:
    task = gradients.load_task(stand_in(tmp_path / "model", 3), data_for_figure2(tmp_path))
    measured = gradients.measure_change(task, "a stand-in")
    (removed,) = measured.change.removed
    chart = gradients.figure2(measured)
    text = json.dumps(chart.to_dict())
    assert "it is the head that Greedy-Gnorm removes first" in text
    assert f"after removing head {removed.index} of site {removed.site}" in text
    assert text.count("(pruned)") == 1
    shown = [row["change"] for row in inline(chart)]
    assert shown == pytest.approx(measured.change.grids.flatten().tolist())


def test_figure_2_of_a_named_head(tmp_path: Path) -> None:
    task = gradients.load_task(stand_in(tmp_path / "model", 3), data_for_figure2(tmp_path))
    first = gradients.measure_change(task, "a stand-in").change.removed[0]
    other = (1 - first.site, 2)
    measured = gradients.measure_change(task, "a stand-in", head=other)
    assert measured.change.removed == [other]
    text = json.dumps(gradients.figure2(measured).to_dict())
    assert f"after removing head 2 of site {other[0]}" in text
    assert "removes first" not in text
    for head in ((2, 0), (0, 4)):
        with pytest.raises(HeadpruneError):
            gradients.measure_change(task, "a stand-in", head=head)


def test_a_fitted_classifier_knows_its_lessons(tmp_path: Path) -> None:
    """Every text has a letter of its own, so least squares can learn all labels by heart."""
    model = BertForSequenceClassification.from_pretrained(stand_in(tmp_path / "model", 3)).eval()
    ids = torch.tensor([[2, 5 + place, 5 + 2 * place, 3] for place in range(9)])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(9) % 3}
    langid.fit_classifier(model, [batch])
    with torch.no_grad():
        actual = model(input_ids=ids).logits.argmax(-1)
    assert (actual == batch["labels"]).float().mean() > 0.8


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "demo_task", lambda: None)
    console = quiet()
    files = reproduce_greedy_gnorm(tmp_path, console=console)
    assert "Figures 3, 4 and 5 were left out: give --published" in said(console)
    assert "Figure 2 was left out" in said(console)
    assert [file.name for file in files if file.suffix == ".md"] == [f"table{n}.md" for n in range(1, 6)]
    assert all(file.read_text() for file in files)


def test_panels_without_trials_or_masks_leave_their_figures_out() -> None:
    panel = Panel("x", 4, curves={"gnorm": [(0, 0.5), (4, 0.25)]})
    assert figure3([panel], "") is not None
    assert figure4([panel], "") is None
    assert figure5([panel], "") is None
    assert figure3([Panel("x", 4)], "") is None


def test_commands_are_those_of_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [protocol.key for protocol in PROTOCOLS] == [model.key for model in MODELS]
    protocol = find_protocol("roberta")
    source = stand_in_data(tmp_path / "tweets.tsv", protocol, [0, 1, 2])
    data = prepare_data(protocol, tmp_path / "data", source=source)
    labels = [row[-1] for row in rows_of(data.evaluation.read_text())[1:]]
    assert labels == ["0", "1"] * 10
    assert data.calibration is not None
    assert rows_of(data.calibration.read_text())[0] == ["text"]
    made = comparisons(protocol, Path("runs"), data, aggregation="batch")
    greedy, static, chance = (curves.command() for curves in made)
    assert shlex.split(greedy)[:3] == ["headprune", "compare", "siebert/sentiment-roberta-large-english"]
    assert "gnorm(aggregation=batch),inverse:gnorm(aggregation=batch)" in shlex.split(greedy)
    assert "--schedule one-shot" in static
    assert "--schedule one-shot --every 16" in chance
    assert "--trials 25" in chance
    for curves in made:  # the commands mean what is run
        words = shlex.split(curves.command())[1:]
        asked: list[Any] = []
        monkeypatch.setattr(
            "headprune.runs.studies.run_study.run_study",
            lambda groups, executor, asked=asked, **_: [asked.append(one) or GroupResult(one, []) for one in groups],
        )
        monkeypatch.setattr("headprune.cli.comparison_table.print_comparison", lambda *_: None)
        app(words, standalone_mode=False)
        expected = make_group(curves.experiment, curves.criteria, Path("runs"), trials=curves.trials)
        assert [group.experiment for group in asked] == [curves.experiment]
        runs = [[(job.name, job.experiment) for job in group.jobs] for group in (*asked, expected)]
        assert runs[0] == runs[1]
    with pytest.raises(ReproductionError, match="has no column 'Title'"):
        prepare_data(find_protocol("bert"), tmp_path / "data", source=source)
