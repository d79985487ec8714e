"""Tables as users have them: zipped, with other separators, as JSON of all shapes, in other encodings, with gaps."""

from __future__ import annotations

import builtins
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headprune.data import load_examples
from headprune.data.tables import read_table
from headprune.errors import DataError, HeadpruneError
from run_helpers import bert, classifier, material, write_rows
from zoo import ZOO

ROWS = [{"text": "w5 w6", "label": 1}, {"text": "w7, w8; w9", "label": 0}]
COLUMNS = {"text": ["w5 w6", "w7, w8; w9"], "label": [1, 0]}


def as_json(rows: Any) -> str:
    return json.dumps(rows)


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def separated(mark: str) -> str:
    return f"text{mark}label\n" + "".join(f'"{row["text"]}"{mark}{row["label"]}\n' for row in ROWS)


WRITTEN = {
    "csv": ("x.csv", separated(",")),
    "upper-case": ("X.CSV", separated(",")),
    "semicolons": ("x.csv", separated(";")),
    "tabs-in-csv": ("x.csv", separated("\t").replace('"', "")),
    "bars": ("x.csv", separated("|")),
    "commas-in-tsv": ("x.tsv", separated(",")),
    "tsv": ("x.tsv", separated("\t").replace('"', "")),
    "windows-lines": ("x.csv", separated(",").replace("\n", "\r\n")),
    "trailing-commas": ("x.csv", separated(",").replace("\n", ",\n").replace("label,", "label")),
    "jsonl": ("x.jsonl", as_lines(ROWS)),
    "lines-in-json": ("x.json", as_lines(ROWS)),
    "list-in-jsonl": ("x.jsonl", as_json(ROWS)),
    "json": ("x.json", as_json(ROWS)),
    "indented": ("x.json", json.dumps(ROWS, indent=2)),
    "columns": ("x.json", as_json(COLUMNS)),
    "numbered-columns": ("x.json", as_json({k: dict(enumerate(v)) for k, v in COLUMNS.items()})),
    "in-data": ("x.json", as_json({"data": ROWS})),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("mark", [False, True], ids=["no-mark", "byte-order-mark"])
@pytest.mark.parametrize("case", WRITTEN)
def test_every_way_to_write_a_table(case: str, mark: bool, zipped: bool, tmp_path: Path) -> None:
    name, text = WRITTEN[case]
    data = text.encode("utf-8-sig" if mark else "utf-8")
    path = tmp_path / (name + ".gz" if zipped else name)
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_table(path) == COLUMNS


def test_plain_text_can_be_zipped(tmp_path: Path) -> None:
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"w5 w6 w7 w8"))
    (row,) = load_examples(ZOO["gpt2"].build(), tmp_path / "x.txt.gz", processor=material().gpt2).rows
    assert row["input_ids"].tolist() == [5, 6, 7, 8]


def test_one_column_stays_one_column(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text\nw5\nw6; w7\n")
    assert read_table(tmp_path / "x.csv") == {"text": ["w5", "w6; w7"]}


def test_values_keep_their_form(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,c,d,e\n1,1.5,007,True,x\n-2,2,010,False,1\n")
    assert read_table(tmp_path / "x.csv") == {
        "a": [1, -2],
        "b": [1.5, 2.0],
        "c": ["007", "010"],
        "d": [True, False],
        "e": ["x", "1"],
    }
    (tmp_path / "x.jsonl").write_text('{"a": "1", "b": 1}\n{"a": "02", "c": [1, "x"]}\n')
    assert read_table(tmp_path / "x.jsonl") == {"a": ["1", "02"], "b": [1, None], "c": [None, [1, "x"]]}


def test_long_cells(tmp_path: Path) -> None:
    text = "w5 " * 100_000
    write_rows(tmp_path / "x.csv", [{"text": text, "label": 1}])
    assert read_table(tmp_path / "x.csv")["text"] == [text]


def test_a_line_separator_within_a_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "w5\u2028w6"}\n{"text": "w7"}\n')
    assert read_table(tmp_path / "x.jsonl")["text"] == ["w5\u2028w6", "w7"]


BAD = {
    "utf-16": (
        "x.csv",
        "text,label\nß,1\n".encode("utf-16"),
        "perhaps UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    ),
    "utf-16-without-mark": ("x.csv", b"\xff" + "text,label\nabc,1\n".encode("utf-16-le"), "perhaps UTF-16"),
    "utf-32": ("x.csv", "text,label\nß,1\n".encode("utf-32"), "perhaps UTF-32"),
    "latin-1": ("x.csv", "text,label\nStraße,1\n".encode("latin-1"), r"byte 0xdf at 15\) but perhaps LATIN1"),
    "windows": ("x.tsv", "text\tlabel\n“a”\t1\n".encode("cp1252"), "perhaps CP1252"),
    "latin-1-text": ("x.txt", "Straße".encode("latin-1"), "cannot be read as txt: it is not UTF-8"),
    "latin-1-zipped": ("x.jsonl.gz", gzip.compress(b'{"text": "\xdf"}'), "cannot be read as jsonl: it is not UTF-8"),
    "not-zipped": ("x.csv.gz", b"text,label\na,1\n", "cannot be read as csv: .*gzip"),
    "cut-off": ("x.csv.gz", gzip.compress(b"text,label\na,1\n" * 99)[:40], "cannot be read as csv"),
    "too-many-fields": ("x.csv", b"text,label\na,1\nb, c,1\n", "row 1 has 3 fields where the header has 2"),
    "too-many-in-all": ("x.csv", b"text,label\na, b,1\nb, c,1\n", "row 0 has 3 fields where the header has 2"),
    "open-quote": ("x.csv", b'text,label\n"a,1\nb,0\n', "a quote is opened and never closed"),
    "bad-line": ("x.jsonl", b'{"text": "a"}\n{"text": \n', "row 1 is not JSON"),
    "not-objects": ("x.json", b"[1, 2]", "its rows must be objects"),
    "unlike-columns": ("x.json", b'{"text": ["a", "b"], "label": [1]}', "columns differ in length"),
    "a-number": ("x.json", b"3", "neither a list nor an object"),
    "empty": ("x.jsonl", b"", "it is empty"),
    "empty-list": ("x.json", b"[]", "has no rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_sentence(case: str, tmp_path: Path) -> None:
    name, data, message = BAD[case]
    (tmp_path / name).write_bytes(data)
    model = ZOO["gpt2"].build() if name.endswith("txt") else classifier()
    with pytest.raises(DataError, match=message) as error:
        load_examples(model, tmp_path / name, processor=material().bert)
    assert "\n" not in str(error.value)


LONG = "x" * 300


@pytest.mark.parametrize("name", [LONG, f"{LONG}.csv", f"{LONG}.txt", f"{LONG}.npz", "y/" * 3000 + "x.csv"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_names_that_the_system_cannot_look_up(kind: str, name: str) -> None:
    model = classifier() if kind == "bert" else ZOO[kind].build()
    with pytest.raises(DataError, match="cannot be looked up") as error:
        load_examples(model, name, processor=getattr(material(), kind))
    assert len(str(error.value)) < 250
    if kind != "vit":
        with pytest.raises(DataError, match="cannot be looked up"):
            load_examples(model, material().data_csv, processor=name)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(DataError, match=r"x\.csv is a folder, not a file"):
        load_examples(classifier(), tmp_path / "x.csv", processor=material().bert)


@pytest.mark.parametrize("gap", [None, float("nan"), "", " "])
def test_a_missing_text_is_named(gap: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(as_lines([{"text": "w5", "label": 0}, {"text": gap, "label": 1}]))
    with pytest.raises(DataError, match="Row 1 of column 'text' has no text"):
        load_examples(bert(), tmp_path / "x.jsonl", processor=material().bert)


@pytest.mark.parametrize(
    ("module", "suffix", "extra"), [("pyarrow.parquet", "parquet", "data"), ("datasets", None, "data")]
)
def test_a_missing_package_is_named(
    module: str, suffix: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == module.partition(".")[0]:
            raise ImportError(name)
        return real(name, *arguments, **options)

    source = "someone/a-data-set" if suffix is None else material().data_parquet
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HeadpruneError, match=rf"needs? {module.partition('.')[0]}; .*headprune\[{extra}\]"):
        read_table(source)
