"""The list of a run's exports: one entry for each model, runtime and quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import write_text
from headprune.errors import RunError
from headprune.json_forms import check_form
from headprune.run_folder.record_forms import EXPORTS

NAME = "exports.json"
FORMAT = 1


def read_exports(run: Path) -> list[dict[str, Any]]:
    """The exports of a run, sorted by model, runtime and quantisation."""
    file = run / NAME
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_bytes())
        check_form(content, EXPORTS)
        return list(content["exports"])
    except (ValueError, RecursionError):
        raise damaged(run) from None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from None


def damaged(run: Path) -> RunError:
    return RunError(f"{run / NAME} is damaged; delete it and export the run again.")


def add_export(run: Path, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add an export, in place of an earlier one of the same kind; returns all of them."""
    others = [other for other in read_exports(run) if _kind(other) != _kind(entry)]
    exports = sorted([*others, dict(entry)], key=_kind)
    _write(run, exports)
    return exports


def forget_exports(run: Path, model: str | None = None) -> None:
    """Remove the exports of a run, or of one of its models, from the list before the model is replaced."""
    try:
        kept = [] if model is None else [export for export in read_exports(run) if export["of"] != model]
    except (RunError, KeyError, TypeError):  # a list that cannot be read is no reason to lose a model
        kept = []
    if kept:
        _write(run, kept)
    else:
        (run / NAME).unlink(missing_ok=True)


def _write(run: Path, exports: Sequence[Mapping[str, Any]]) -> None:
    write_text(run / NAME, json.dumps({"format": FORMAT, "exports": list(exports)}, indent=2) + "\n")


def _kind(export: Mapping[str, Any]) -> tuple[str, str, str]:
    return export["of"], export["runtime"], export["quantize"] or ""
