"""The folder of a run: its journal survives a kill at any moment.

run.json       settings, fingerprints, versions; at the end costs and savings
steps.jsonl    one line per step, on disk before the next step begins
timing.jsonl   seconds per step; in a file of their own, so that steps.jsonl is the same byte for byte in every run
curve.csv      the curve, for plots
model/         the checkpoint at the stop, with its model card
.card          hashes of the cards that were written there: any other was edited, and stays
layers/        of a layer-wise run: what was removed and repaired at each layer
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.errors import RunError
from headprune.measure.trajectory import Step, check_sequence, curve_csv
from headprune.run_folder.folder import LOCK, RunFolder, read_record, truncate
from headprune.run_folder.record_forms import ENDED, RUN, SAMPLES
from headprune.search.observers import Journal

RECORD, STEPS, TIMING = "run.json", "steps.jsonl", "timing.jsonl"
REPORT, CARD = "report.html", "model/README.md"  # made from the record of a finished run
CARD_HASHES = ".card"
LAYERS, FORMER_LAYERS = "layers", "sweep"  # the folder of a layer-wise run, and its name in earlier versions
log = logging.getLogger(__name__)


class Run(RunFolder, Journal):
    """An open run directory, which keeps a journal of the steps of a pruner."""

    record_name, noun, form = RECORD, "run", RUN
    steps: list[Step]

    @classmethod
    def _is_complete(cls, path: Path, record: Mapping[str, Any]) -> bool:
        return _has_ended(record, read_run(path)[1]) and all((path / name).is_file() for name in (CARD, REPORT))

    @classmethod
    def _refuse_other_content(cls, path: Path) -> None:
        path_exists(path, RunError)
        if path.is_file():
            raise RunError(f"{path} is a file; choose a directory for the run.")
        if path.is_dir() and not (path / RECORD).is_file() and not _is_blank(path):
            raise RunError(f"{path} exists and holds something that is not a run; choose a new directory.")
        super()._refuse_other_content(path)

    def _clear(self) -> None:
        # The record stays until it is replaced in one step, so that a kill in between leaves a run, without its steps.
        folders = [self.path / name for name in (LAYERS, FORMER_LAYERS)]
        for folder in folders:
            (folder / "layers.jsonl").unlink(missing_ok=True)
        for name in (STEPS, TIMING, "curve.csv", REPORT):
            (self.path / name).unlink(missing_ok=True)
        remove_card(self.path)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _read_journal(self) -> None:
        """The complete lines of the journal; a torn last line, from a kill while it was written, is removed."""
        journal, timing = self.path / STEPS, self.path / TIMING
        self.steps, complete = _read_steps(journal)
        if journal.is_file() and complete < journal.stat().st_size:
            truncate(journal, complete)
        if timing.is_file() and not (lines := timing.read_bytes()).endswith(b"\n"):
            truncate(timing, lines.rfind(b"\n") + 1)

    @property
    def finished(self) -> bool:
        return not self.changed and _has_ended(self.record, self.steps)

    # --- writing ---

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        """Append a step to the journal."""
        self.write_line(STEPS, json.dumps(step.to_json()))
        self.write_line(TIMING, json.dumps({"step": step.step, **{k: round(v, 4) for k, v in seconds.items()}}))
        self.steps.append(step)

    def drop_short_step(self, every: int | None, groups: Sequence[int]) -> None:
        """Drop a last step that the budget cut short, which is possible where the number of units in a step is not
        fixed (`every` is None): a resumed run takes the whole step."""
        if len(self.steps) < 2:
            return
        units = {
            (site, index // groups[site]) if site < len(groups) else (site, index)
            for site, index in self.steps[-1].removed
        }
        if every is None or len(units) < every:
            self.steps.pop()
            self.write(STEPS, "".join(json.dumps(step.to_json()) + "\n" for step in self.steps))

    def finish(self, result: Mapping[str, Any]) -> None:
        self.write("curve.csv", curve_csv(self.steps))
        (self.path / REPORT).unlink(missing_ok=True)  # of an earlier end of this run
        remove_card(self.path)
        self._write_record(result)


def write_card(run: Path, text: str) -> None:
    """Write the card of the model of a run, and first its hash, so that a later process knows that nobody edited it."""
    lines = dict.fromkeys([*_card_hashes(run), _hash(text.encode())])
    write_text(run / CARD_HASHES, "".join(f"{line}\n" for line in lines))
    write_text(run / CARD, text)


def remove_card(run: Path) -> None:
    """Remove the card of the model, so that it is written anew; one that was edited stays. Earlier versions stored no
    hashes, and their cards are taken for unedited, as they were then."""
    card, hashes = run / CARD, _card_hashes(run)
    if not card.is_file():
        return
    if not hashes or _hash(card.read_bytes()) in hashes:
        card.unlink()
    else:
        log.warning("%s was edited, so it stays as it is; delete it to get that of the new model.", card)


def _card_hashes(run: Path) -> list[str]:
    file = run / CARD_HASHES
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_run(path: str | Path) -> tuple[dict[str, Any], list[Step]]:
    """The record and the steps of a run; nothing is locked or written."""
    folder = Path(path)
    if not (folder / RECORD).is_file():
        raise RunError(f"{folder} is not a run directory: it has no run.json.")
    record = read_record(folder / RECORD, RUN)
    if record.get("result"):
        samples = SAMPLES["train" if record["settings"].get("gates") else "prune"]
        for form in (ENDED, samples):
            read_record(folder / RECORD, form)
    return record, _read_steps(folder / STEPS)[0]


def _read_steps(journal: Path) -> tuple[list[Step], int]:
    """The steps of a journal, and how many of its bytes these are: a torn last line, from a kill while it was written,
    does not count, and a journal that is damaged before its last line is refused."""
    steps: list[Step] = []
    content, complete = journal.read_bytes() if journal.is_file() else b"", 0
    reason = ""
    for line in content.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            steps.append(Step.from_json(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            break
        complete += len(line)
    try:
        check_sequence(steps)
    except ValueError as error:
        raise RunError(f"{journal} is damaged: {error}; start again with --overwrite.") from None
    if content[complete:].count(b"\n") > 1:
        raise RunError(f"{journal} is damaged after step {len(steps) - 1} ({reason}); start again with --overwrite.")
    return steps, complete


def finished_record(path: str | Path) -> dict[str, Any]:
    """The record of a finished run, which has a model."""
    record, _ = read_run(path)
    if not record.get("result"):
        raise RunError(f"The run {path} is not finished, so it has no model; resume it first.")
    return record


def _has_ended(record: Mapping[str, Any], steps: Sequence[Step]) -> bool:
    result = record.get("result")
    return result is not None and result["steps"] == len(steps) - 1


def _is_blank(folder: Path) -> bool:
    """Whether it is empty, or has only files of a start that was killed at once."""
    return all(entry.name.startswith((LOCK, f".{RECORD}.")) for entry in folder.iterdir())
