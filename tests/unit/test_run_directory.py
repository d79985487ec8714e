"""The run directory: a journal that is whole after a kill, a full disk or a second process, and says what it is."""

from __future__ import annotations

import builtins
import errno
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.checkpoint.fingerprint import fingerprint
from headprune.errors import NonFiniteError, RunError
from headprune.run_folder import Run, read_run
from headprune.runs.experiment import Experiment, run_experiment
from headprune.signals import GateGradients
from helpers import contents
from run_helpers import STEP_KEYS, in_fork, interrupt, material, prune_command, same_but_timing, steps_of
from run_helpers import headprune as program
from score_helpers import labelled
from zoo import ZOO

SETTINGS = {"criterion": "gnorm", "seed": 0}
STEPS = 12
BATCHES = [labelled(ZOO["bert"], 0)]
HELD_OUT = [labelled(ZOO["bert"], 7)]


def go(path: Path, *, settings: Any = None, overwrite: bool = False, **options: Any) -> Any:
    """Prune the tiny BERT into a run directory, on held-out data unless told otherwise."""
    options = {"evaluation": HELD_OUT, "rescore": "every", **options}
    with Run(path, SETTINGS if settings is None else settings, overwrite=overwrite) as run:
        return headprune.prune(ZOO["bert"].build(), BATCHES, run=run, **options)


def journal(path: Path) -> bytes:
    return (path / "steps.jsonl").read_bytes()


def cut(path: Path, lines: int, torn: bytes = b"") -> None:
    (path / "steps.jsonl").write_bytes(b"".join(journal(path).splitlines(keepends=True)[:lines]) + torn)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    go(folder)
    return folder


@pytest.fixture
def whole(original: Path, tmp_path: Path) -> Path:
    """A copy of a run that nothing happened to."""
    return Path(shutil.copytree(original, tmp_path / "whole"))


class Stopped(BaseException):
    """As a kill would: nothing catches it."""


def stop_at(number: int) -> Callable[[Any], None]:
    def on_step(step: Any) -> None:
        if step.step == number:
            raise Stopped

    return on_step


# --- what it holds ---


def test_one_line_per_step_with_all_that_was_measured(whole: Path) -> None:
    lines = steps_of(whole)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line.keys() >= STEP_KEYS for line in lines)
    assert lines[0]["removed"] == []
    assert lines[0]["agreement"] == 1.0
    assert len({tuple(head) for line in lines for head in line["removed"]}) == STEPS
    for line in lines[1:]:
        (site, head), *_ = line["removed"]
        present = [value for row in line["scores"] for value in row if value is not None]
        assert line["scores"][site][head] == line["score"] == min(present)
        assert line["parameters"] < lines[line["step"] - 1]["parameters"]
        assert line["flops"] < lines[line["step"] - 1]["flops"]
        (repair,) = line["compensation"]
        assert repair["site"] == site
        assert repair["kind"] in ("lstsq", "mean")
        assert 0 <= repair["error"] <= repair["error_without"]
    assert lines[0]["compensation"] == []
    assert "seconds" not in lines[1]  # they would differ from run to run


def test_seconds_have_a_file_of_their_own(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line["seconds"] >= line["scoring"] >= 0 for line in lines)


def test_a_step_is_on_disk_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync

    def watch(handle: int) -> None:
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    seen = []

    def on_step(step: Any) -> None:
        seen.append((len(steps_of(tmp_path / "run")), len(synced) > 0))
        synced.clear()

    go(tmp_path / "run", on_step=on_step)
    assert seen == [(number + 1, True) for number in range(STEPS + 1)]


def test_run_json_says_how_it_was_made(whole: Path) -> None:
    import transformers

    record, steps = read_run(whole)
    assert record["settings"] == SETTINGS
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["transformers"] == transformers.__version__
    assert len(steps) == STEPS + 1


def test_a_folder_that_is_no_run_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=re.escape("is not a run directory: it has no run.json")):
        read_run(tmp_path)


# --- going on ---

KINDS = {
    "held-out": {},
    "same-data": {"evaluation": None},
    "one-shot": {"schedule": "one-shot"},
    "two-per-step": {"every": 2},
    "random": {"criterion": "random(seed=3)"},
    "knee": {"knee": True},
    "published": {"criterion": "gnorm", "repair": "none"},
    "mean": {"repair": "mean"},
    "max-drop": {"max_drop": 0.2, "explore": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_byte_for_byte(kind: str, tmp_path: Path) -> None:
    expected = go(tmp_path / "whole", **KINDS[kind])
    for lines in {"held-out": (1, 2, 6), "same-data": (1, 6)}.get(kind, (6,)):
        run = tmp_path / f"run-{lines}"
        with pytest.raises(Stopped):
            go(run, on_step=stop_at(lines - 1), **KINDS[kind])
        assert len(steps_of(run)) == lines
        result = go(run, **KINDS[kind])
        assert journal(run) == journal(tmp_path / "whole")
        assert result.stopped_at == expected.stopped_at
        assert torch.equal(result.mask, expected.mask)
        assert [step.to_json() for step in result.trajectory] == [step.to_json() for step in expected.trajectory]


def test_a_journal_without_compensation_is_read_and_gone_on_with(tmp_path: Path) -> None:
    """As runs were written before there was any."""
    published = {"criterion": "gnorm", "repair": "none"}
    go(tmp_path / "run", **published)
    lines = steps_of(tmp_path / "run")
    for line in lines:
        assert line.pop("compensation") == []
    (tmp_path / "run" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:6]))
    assert [step.repairs for step in read_run(tmp_path / "run")[1]] == [()] * 6
    result = go(tmp_path / "run", **published)
    assert [{**line, "compensation": []} for line in lines] == [step.to_json() for step in result.trajectory]


def test_settings_from_before_compensation_are_those_without_it(tmp_path: Path) -> None:
    published = {"criterion": "gnorm", "repair": "none"}
    go(tmp_path / "run", settings=SETTINGS, **published)
    go(tmp_path / "run", settings={**SETTINGS, "repair": "none"}, **published)
    with pytest.raises(RunError, match=r"repair was .*none.* and is now 'lstsq'"):
        go(tmp_path / "run", settings={**SETTINGS, "repair": "lstsq"})


def test_resuming_again_and_again(whole: Path, tmp_path: Path) -> None:
    for number in range(0, STEPS, 2):
        with pytest.raises(Stopped):
            go(tmp_path / "run", on_step=lambda step, last=number: stop_at(last)(step))
    go(tmp_path / "run")
    assert journal(tmp_path / "run") == journal(whole)


def test_the_steps_so_far_are_told_again(whole: Path) -> None:
    cut(whole, 4)
    seen: list[int] = []
    go(whole, on_step=lambda step: seen.append(step.step))
    assert seen == list(range(STEPS + 1))


@pytest.mark.parametrize("torn", [b'{"step": 5, "rem', b"{", b"\x00\x00\x00", b'{"step": 5}\n', b"\xff\xfe\n"])
def test_a_torn_last_line_is_dropped(torn: bytes, whole: Path) -> None:
    expected = journal(whole)
    cut(whole, 5, torn)
    go(whole)
    assert journal(whole) == expected


def test_a_last_line_without_its_end_is_dropped(whole: Path) -> None:
    """It may be whole, but nothing says so."""
    expected = journal(whole)
    (whole / "steps.jsonl").write_bytes(expected[:-1])
    go(whole)
    assert journal(whole) == expected


def damaged(lines: list[bytes], how: str) -> list[bytes]:
    if how == "garbage":
        return [*lines[:4], b"garbage\n", *lines[5:]]
    if how == "cut":
        return [*lines[:4], lines[4][:20], *lines[5:]]
    if how == "missing":
        return [*lines[:4], *lines[5:]]
    if how == "twice":
        return [*lines[:4], lines[3], *lines[4:]]
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize("how", ["garbage", "cut", "missing", "twice", "swapped"])
def test_a_journal_with_a_damaged_middle_is_refused(how: str, whole: Path) -> None:
    """A run that goes on from it would tell a story that never happened."""
    lines = journal(whole).splitlines(keepends=True)[:9]
    (whole / "steps.jsonl").write_bytes(b"".join(damaged(lines, how)))
    before = contents(whole)
    with pytest.raises(RunError, match=r"is damaged.*start again with --overwrite"):
        go(whole)
    assert contents(whole) == before
    go(whole, overwrite=True, keep=STEPS - 2)
    assert [line["removed"] for line in steps_of(whole)] == [json.loads(line)["removed"] for line in lines[:3]]


def test_timing_is_whole_after_a_kill_while_it_was_written(whole: Path) -> None:
    cut(whole, 5)
    timing = (whole / "timing.jsonl").read_text().splitlines(keepends=True)
    (whole / "timing.jsonl").write_text("".join(timing[:4]) + timing[4][:9])
    go(whole)
    for line in (whole / "timing.jsonl").read_text().splitlines():
        assert json.loads(line).keys() >= {"step", "seconds"}


# --- refusing ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"criterion": "his", "seed": 0}, "criterion was 'gnorm' and is now 'his'; use the same settings"),
        ({"criterion": "his", "seed": 1}, "criterion was 'gnorm' and is now 'his' (and seed); use"),
        ({"criterion": "gnorm"}, "seed was 0 and is now None"),
        ({**SETTINGS, "data_fingerprint": "abc"}, "data_fingerprint was None and is now 'abc'"),
    ],
)
def test_other_settings_are_refused_with_the_difference(settings: Any, message: str, whole: Path) -> None:
    before = contents(whole)
    with pytest.raises(RunError, match=re.escape(message)):
        Run(whole, settings)
    assert contents(whole) == before


def test_overwrite_starts_again(whole: Path) -> None:
    (whole / "curve.csv").write_text("old")
    other = {"criterion": "his", "seed": 1}
    with Run(whole, other, overwrite=True) as run:
        assert run.steps == []
        assert not run.finished
    assert not (whole / "steps.jsonl").exists()
    assert not (whole / "curve.csv").exists()
    assert read_run(whole)[0]["settings"] == other
    with Run(whole, other) as run:
        assert run.steps == []


def test_a_second_run_in_the_same_place_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path / "run", SETTINGS):
        with pytest.raises(RunError, match="Another process is working on"):
            Run(tmp_path / "run", SETTINGS)
        with pytest.raises(RunError, match="Another process is working on"):
            Run(tmp_path / "run", SETTINGS, overwrite=True)
    with Run(tmp_path / "run", SETTINGS):  # and free again
        pass


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(RunError, match="Another process is working on"):
            Run(tmp_path / "run", SETTINGS)

    def after() -> None:
        Run(tmp_path / "run", SETTINGS)

    with Run(tmp_path / "run", SETTINGS):
        assert in_fork(second) == 0
    assert in_fork(after) == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_with_something_else_is_not_touched(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.txt").write_text("a cat")
    before = contents(tmp_path / "photos")
    with pytest.raises(RunError, match="holds something that is not a run; choose a new directory"):
        Run(tmp_path / "photos", SETTINGS, overwrite=overwrite)
    assert contents(tmp_path / "photos") == before


def test_an_empty_directory_is_welcome(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Run(tmp_path / "run", SETTINGS) as run:
        assert run.steps == []


def test_what_a_kill_left_of_the_very_first_write_is_no_obstacle(tmp_path: Path) -> None:
    """run.json is written beside its place first; a kill just then leaves the directory with that file alone."""

    def killed() -> None:
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        Run(tmp_path / "run", SETTINGS)

    assert in_fork(killed) == 9
    assert (tmp_path / "run").is_dir()
    go(tmp_path / "run")
    assert len(steps_of(tmp_path / "run")) == STEPS + 1


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match="is a file; choose a directory"):
        Run(tmp_path / "run", SETTINGS)
    assert contents(tmp_path) == {"run": b"a file"}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe\x00"], ids=str)
def test_a_damaged_run_json(text: bytes, whole: Path) -> None:
    (whole / "run.json").write_bytes(text)
    before = contents(whole)
    for overwrite in (False, True):
        with pytest.raises(RunError, match=re.escape("run.json is damaged, or was written by another program")):
            Run(whole, SETTINGS, overwrite=overwrite)
    assert contents(whole) == before


def test_a_refused_run_is_not_locked(whole: Path) -> None:
    """The caller may hold on to the error, as a notebook does, and try again."""
    lines = journal(whole).splitlines(keepends=True)
    (whole / "steps.jsonl").write_bytes(b"".join([b"garbage\n", *lines[1:]]))
    errors = []
    for settings in (SETTINGS, {"criterion": "his"}):
        with pytest.raises(RunError) as error:
            Run(whole, settings)
        errors.append(error)
    with Run(whole, SETTINGS, overwrite=True) as run:
        assert run.steps == []


# --- accidents ---


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """From the call on, what is written to files whose path has this in it fails when it is synced."""
    sync = os.fsync

    def fill(part: str) -> None:
        def fail(handle: int) -> None:
            if part in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(handle)

        monkeypatch.setattr(os, "fsync", fail)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    yield fill
    monkeypatch.setattr(os, "fsync", sync)


MESSAGE = "No space left on device; make room and run the same command again"


@pytest.mark.parametrize("file", ["steps.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_full_disk_is_a_clear_error_and_the_run_goes_on_later(
    file: str, at: int, whole: Path, tmp_path: Path, full_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    if not at:
        full_disk(file)
    with pytest.raises(RunError, match=MESSAGE):
        go(tmp_path / "run", on_step=lambda step: full_disk(file) if step.step == at else None)
    monkeypatch.setattr(os, "fsync", sync)
    so_far = journal(tmp_path / "run")
    assert journal(whole).startswith(so_far)
    assert so_far.count(b"\n") in ((at + 1,) if at and file == "steps.jsonl" else (at, at + 1, at + 2))
    go(tmp_path / "run")
    assert journal(tmp_path / "run") == journal(whole)


def test_a_disk_on_which_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(tmp_path / "run", SETTINGS):
        pass
    right = builtins.open
    path_open = Path.open

    def fail(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "a" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return path_open(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(RunError, match=MESSAGE):
        go(tmp_path / "run")
    monkeypatch.setattr(Path, "open", path_open)
    assert builtins.open is right
    go(tmp_path / "run")
    assert len(steps_of(tmp_path / "run")) == STEPS + 1


def test_a_full_disk_while_a_run_is_overwritten_leaves_a_run(whole: Path, full_disk: Any) -> None:
    (whole / "model").mkdir()
    (whole / "model" / "config.json").write_text("{}")
    full_disk("run.json")
    with pytest.raises(RunError, match=MESSAGE):
        Run(whole, SETTINGS, overwrite=True)
    full_disk("nothing of the kind")
    go(whole, overwrite=True)
    assert len(steps_of(whole)) == STEPS + 1


@pytest.fixture
def broken_criterion() -> Iterator[dict[str, Any]]:
    """A criterion of one's own that gives a head no number from a certain step on."""
    from headprune.criteria import REGISTRY

    state: dict[str, Any] = {"calls": 0, "from": 4, "value": torch.nan}

    @headprune.criterion("broken-one")
    class Broken(headprune.Criterion):
        def requests(self) -> tuple[Any, ...]:
            return (GateGradients(),)

        def sums(self, answers: Any) -> dict[str, torch.Tensor]:
            return {"value": answers[GateGradients()].abs().sum(0)}

        def score(self, sums: Any, samples: int, kept: torch.Tensor) -> torch.Tensor:
            state["calls"] += 1
            result = sums["value"].clone()
            if state["calls"] >= state["from"] and kept.any():
                first = kept.nonzero()[-1].tolist()
                result[tuple(first)] = state["value"]
            return result

    yield state
    del REGISTRY["broken-one"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("apart", [True, False], ids=["held-out", "same-data"])
def test_a_score_that_is_no_number_is_an_error_and_the_steps_stay(
    value: float, apart: bool, broken_criterion: dict[str, Any], tmp_path: Path
) -> None:
    options = {} if apart else {"evaluation": None}
    broken_criterion["value"] = value
    with pytest.raises(NonFiniteError, match="site 2"):
        go(tmp_path / "run", criterion="broken-one", **options)
    assert 1 <= len(steps_of(tmp_path / "run")) <= 4
    broken_criterion["from"] = 10**9  # mended
    go(tmp_path / "run", criterion="broken-one", keep=STEPS - 6, **options)
    assert len(steps_of(tmp_path / "run")) == 7


@pytest.mark.parametrize("criterion", ["gnorm", "magnitude"])
def test_a_model_that_gives_no_number_is_an_error(criterion: str, tmp_path: Path) -> None:
    """Its predictions would mean nothing, and accuracy would be measured all the same."""
    model = ZOO["bert"].build()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.value.weight[0, 0] = torch.nan
    with (
        Run(tmp_path / "run", SETTINGS) as run,
        pytest.raises(NonFiniteError),
    ):
        headprune.prune(model, BATCHES, criterion=criterion, evaluation=HELD_OUT, run=run)
    assert not (tmp_path / "run" / "steps.jsonl").exists()


# --- from the command line ---


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.rglob("*") if f.is_file()}


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    command = prune_command(material().bert, material().data_csv, tmp_path / "run", "--keep", "8", "--json")
    first = program(*command)
    before = files_of(tmp_path / "run")
    again = program(*command)
    assert (again.code, again.out) == (first.code, first.out) == (0, first.out)
    assert files_of(tmp_path / "run") == before
    shown = program(*command[:-1])
    assert shown.code == 0
    assert files_of(tmp_path / "run") == before


def test_an_interrupted_run_is_finished_by_the_same_command(tmp_path: Path) -> None:
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "whole", "--keep", "5"))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    interrupt(tmp_path / "run", 4, torn='{"step": 4, "removed": [[0,')
    done = program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "5", "--json"))
    assert done.code == 0
    same_but_timing(tmp_path / "run", tmp_path / "whole")
    headprune.load(tmp_path / "run" / "model")


def test_a_finished_run_whose_journal_lost_lines_is_not_taken_as_it_is(tmp_path: Path) -> None:
    """A table or a page made from it would show half a curve and say nothing."""
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "whole", "--keep", "5"))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    cut(tmp_path / "run", 4)
    done = program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "5"))
    assert done.code == 2 or journal(tmp_path / "run") == journal(tmp_path / "whole")


def test_a_full_disk_while_the_model_is_saved(tmp_path: Path, full_disk: Any) -> None:
    m = material()
    command = prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "8")
    full_disk("/run/.model")
    done = program(*command)
    assert done.code == 2
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err
    full_disk("nothing of the kind")
    assert program(*command).code == 0
    headprune.load(tmp_path / "run" / "model")


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10"))
    before = files_of(tmp_path / "run")
    done = program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10", "--every", "2"))
    assert done.code == 2
    assert "every was 1 and is now 2" in " ".join(done.err.split())
    assert files_of(tmp_path / "run") == before
    more = ("--keep", "9", "--every", "2", "--overwrite", "--json")
    done = program(*prune_command(m.bert, m.data_csv, tmp_path / "run", *more))
    assert (done.code, done.json["heads_after"]) == (0, 9)
    assert len(steps_of(tmp_path / "run")) == 3


@pytest.mark.parametrize("every", ["1", "2"])
def test_a_finished_run_is_taken_further_and_back(every: str, tmp_path: Path) -> None:
    """Only where to stop is another: the journal has what was done, and the end is that of a run that went there."""
    m, more = material(), ("--every", every, "--rescore", "every")
    for keep, place in (("9", "run"), ("0.5", "run"), ("0.5", "straight")):
        done = program(*prune_command(m.bert, m.data_csv, tmp_path / place, "--keep", keep, *more, "--json"))
        assert (done.code, done.json["heads_after"]) == (0, {"9": 9, "0.5": 6}[keep])
    same_but_timing(tmp_path / "run", tmp_path / "straight")
    assert "6 of 12" in (tmp_path / "run" / "model" / "README.md").read_text()
    done = program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10", *more, "--json"))
    assert (done.code, done.json["heads_after"]) == (0, 10)
    assert len(headprune.resolve(headprune.load(tmp_path / "run"))[0].kept) <= 4  # the run itself can be loaded


@pytest.mark.parametrize("mistake", [["--schedule", "lazy"], ["--keep", "99"], ["--metric", "speed"]], ids=str)
def test_a_mistake_does_not_cost_the_run_that_was_to_be_overwritten(mistake: list[str], tmp_path: Path) -> None:
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "11"))
    before = files_of(tmp_path / "run")
    assert program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--overwrite", *mistake)).code == 2
    assert files_of(tmp_path / "run") == before


def test_a_run_is_a_model_to_go_on_from(tmp_path: Path) -> None:
    """Pruned once more from where a run ended, its tokenizer included; ids stay those of the dense model."""
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "one", "--keep", "9"))
    done = program(*prune_command(str(tmp_path / "one"), m.data_csv, tmp_path / "two", "--keep", "6", "--json"))
    assert (done.code, done.json["heads_before"], done.json["heads_after"]) == (0, 9, 6), done.err
    kept = [site.kept for site in headprune.resolve(headprune.load(tmp_path / "two"))]
    before = [site.kept for site in headprune.resolve(headprune.load(tmp_path / "one"))]
    assert all(set(now) <= set(then) for now, then in zip(kept, before, strict=True))
    interrupt(tmp_path / "one", 2)
    done = program("inspect", tmp_path / "one")
    assert done.code == 2
    assert "is not finished, so it has no model" in " ".join(done.err.split())


def test_data_that_changed_is_refused(tmp_path: Path) -> None:
    m = material()
    data = tmp_path / "data.csv"
    data.write_text(Path(m.data_csv).read_text())
    program(*prune_command(m.bert, str(data), tmp_path / "run", "--keep", "10"))
    data.write_text(data.read_text() + "w9 w8 w7,red\n")
    done = program(*prune_command(m.bert, str(data), tmp_path / "run", "--keep", "10"))
    assert done.code == 2
    assert "data_fingerprint was" in " ".join(done.err.split())


def test_data_that_vanished(tmp_path: Path) -> None:
    m = material()
    data = tmp_path / "data.csv"
    data.write_text(Path(m.data_csv).read_text())
    command = prune_command(m.bert, str(data), tmp_path / "run", "--keep", "10")
    program(*command)
    interrupt(tmp_path / "run", 2)
    data.rename(tmp_path / "moved.csv")
    before = files_of(tmp_path / "run")
    done = program(*command)
    assert done.code == 2
    assert "There is no file" in done.err
    assert files_of(tmp_path / "run") == before
    (tmp_path / "moved.csv").rename(data)
    assert program(*command).code == 0


@pytest.mark.parametrize("what", ["bert", "data_csv", "pictures_npz", "pictures_folder"])
def test_models_and_data_of_every_kind_have_a_fingerprint(what: str, tmp_path: Path) -> None:
    """Without one, a run would go on with other data."""
    source = Path(getattr(material(), what))
    copy = tmp_path / source.name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    known = fingerprint(str(copy))
    assert known is not None
    file = copy if copy.is_file() else max((f for f in copy.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert fingerprint(str(copy)) != known


def test_equal_experiments_have_equal_settings() -> None:
    m = material()
    one, other = (Experiment(model=m.bert, data=m.data_csv, keep=keep).settings() for keep in (0.5, 0.5))
    assert one == other == json.loads(json.dumps(one))
    assert Experiment(model=m.bert, data=m.data_csv, keep=0.4).settings() != one


@pytest.mark.parametrize("options", [{"keep": 9}, {"keep_flops": 0.7, "rounds": 2}], ids=["greedy", "rounds"])
def test_what_a_run_checks_it_checks_once(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sites that samples reach, the budget and the repair: before the folder exists, and not again."""
    m, calls = material(), list[str]()
    for module, name in (
        ("headprune.search.candidates", "unreached_sites"),
        ("headprune.search.pruner", "refuse_unreachable"),
        ("headprune.search.pruner", "check_repair"),
    ):
        checked = getattr(importlib.import_module(module), name)

        def counting(*args: Any, name: str = name, checked: Any = checked, **settings: Any) -> Any:
            assert not (tmp_path / "run").exists()
            calls.append(name)
            return checked(*args, **settings)

        monkeypatch.setattr(f"{module}.{name}", counting)
    experiment = Experiment(model=m.bert, data=m.data_csv, calibration_samples=8, **options)
    run_experiment(experiment, tmp_path / "run", measure=False, publish=False)
    assert sorted(calls) == ["check_repair", "refuse_unreachable", "unreached_sites"]
