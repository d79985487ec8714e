"""Looking at a run directory: nothing is locked or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headprune.errors import RunError
from headprune.measure.trajectory import Step
from headprune.search.settings import renamed


def read_run(path: str | Path) -> tuple[dict[str, Any], list[Step]]:
    """The record and the steps of a run, for looking at: nothing is locked or written."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        raise RunError(f"{folder} is not a run directory: it has no run.json.")
    try:
        record = json.loads((folder / "run.json").read_text())
        if isinstance(record.get("settings"), dict):
            record["settings"] = renamed(record["settings"])
    except (ValueError, AttributeError):
        raise RunError(f"{folder / 'run.json'} is damaged; start the run again with --overwrite.") from None
    lines = (folder / "steps.jsonl").read_text().splitlines() if (folder / "steps.jsonl").is_file() else []
    steps = []
    for line in lines:
        try:
            steps.append(Step.from_json(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError):
            break
    return record, steps


def finished_record(path: str | Path) -> dict[str, Any]:
    """The record of a run that came to its end: only then is there a model."""
    record, _ = read_run(path)
    if not record.get("result"):
        raise RunError(f"The run {path} has not come to its end, so it has no model; go on with it first.")
    return record
