"""Mutated files are read or refused in a sentence, and the count of failures would see one that is not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks import fuzz_readers
from benchmarks.fuzz_mutations import mutate_bytes, mutate_json, mutate_value
from benchmarks.fuzz_readers import Count, Files, Target, fuzz, run_case

from headprune.errors import DataError
from headprune.json_forms import FormError, check_form

CASES = 200


def test_every_reader_reads_or_refuses_in_a_sentence(tmp_path: Path) -> None:
    counts = fuzz(CASES, 0, tmp_path / "files")
    assert [failure for count in counts.values() for failure in (*count.failures, *count.changed)] == []
    assert sum(count.cases for count in counts.values()) == CASES
    assert sum(count.read for count in counts.values()) > CASES / 10
    assert sum(count.refused for count in counts.values()) > CASES / 4


def case(tmp_path: Path, read: Any, **options: Any) -> Count:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.json").write_text('{"x": [1, 2]}')
    (tmp_path / "files" / "other.txt").write_text("other")
    files, count = Files(tmp_path / "files"), Count()
    run_case(Target("a", "a.json", mutate_json, read, **options), files, random.Random(0), count, 0)
    assert {name: (tmp_path / "files" / name).read_bytes() for name in files.contents} == files.contents
    return count


def refuse(root: Path) -> None:
    raise DataError("A sentence.")


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    count = case(tmp_path, refuse)
    assert (count.read, count.refused, count.failures, count.changed) == (0, 1, [], [])


def test_any_other_error_is_one(tmp_path: Path) -> None:
    (failure,) = case(tmp_path, lambda root: {}["x"]).failures
    assert failure["error"] == "KeyError: 'x'"


def test_a_reader_that_does_not_end_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_readers, "SECONDS", 1)

    def wait(root: Path) -> None:
        while True:
            pass

    (failure,) = case(tmp_path, wait).failures
    assert failure["error"].startswith("TimeoutError")


@pytest.mark.parametrize("name", ["other.txt", "new.txt", "a.json", "../beside.txt"])
def test_a_file_that_a_reader_writes_is_seen(name: str, tmp_path: Path) -> None:
    def write(root: Path) -> None:
        (root / name).write_text("written, with another length")

    assert case(tmp_path, write).changed == [{"case": 0, "file": name}]


def test_a_file_that_a_reader_may_write_is_not(tmp_path: Path) -> None:
    assert case(tmp_path, lambda root: (root / "other.txt").unlink(), writes=("other.*",)).changed == []


def test_mutations_change_a_file_and_are_repeatable() -> None:
    content = b'{"a": [1, {"b": null}], "c": "text"}'
    for mutate in (mutate_bytes, mutate_json):
        mutated = [mutate(content, random.Random(seed)) for seed in range(40)]
        assert mutated == [mutate(content, random.Random(seed)) for seed in range(40)]
        assert sum(each != content for each in mutated) > 30
    assert any(mutate_value({"a": 1}, random.Random(seed)) == {} for seed in range(40))


FORM = {"a": int, "b?": (str, None), "c?": [[float]], "d?": {str: [int, int]}, "e?": {"f": bool}}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": 1, "b": None, "c": [[1, 2.5], []], "d": {"x": [1, 2]}, "e": {"f": True}, "others": "are fine"}, None),
        ({}, "a is missing"),
        ([], "it is [], not an object"),
        ({"a": True}, "a is True, not a whole number"),
        ({"a": 1.0}, "a is 1.0, not a whole number"),
        ({"a": 1, "b": 3}, "b is 3, not a text or null"),
        ({"a": 1, "c": [[1], ["x"]]}, "c[1][0] is 'x', not a number"),
        ({"a": 1, "d": {"x": [1]}}, "d.x is [1], not a list of 2"),
        ({"a": 1, "e": {}}, "e.f is missing"),
    ],
)
def test_a_value_of_another_form_is_named(value: Any, reason: str | None) -> None:
    if reason is None:
        check_form(value, FORM)
        return
    with pytest.raises(FormError) as error:
        check_form(value, FORM)
    assert str(error.value) == reason


def test_of_alternatives_the_one_that_is_meant_is_explained() -> None:
    with pytest.raises(FormError, match=r"^x\.y is missing$"):
        check_form({"x": {}}, {"x": (None, {"y": int})})
