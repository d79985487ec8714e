"""Finds the folder of a model by its files, without importing torch or transformers."""

from __future__ import annotations

import json
from pathlib import Path

from headprune.checkpoint.atomic_files import path_exists, recover_directory
from headprune.errors import CheckpointError

FOLDERS = 3  # levels at which a model may be inside a run


def looks_like_a_path(name: str) -> bool:
    """Whether this cannot be the name of a model on the hub."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def is_record(file: Path) -> bool:
    """Whether this is the JSON record of a run or a recovery of headprune: other programs have files of these names."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return isinstance(record["settings"], dict) and "headprune" in dict(record["versions"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run."""
    return is_record(folder / "run.json")


def model_folder(path: str | Path) -> Path:
    """The folder of the model at this path; that of a run is its subfolder model/."""
    folder = Path(path)
    if not is_run(folder):
        return folder
    recover_directory(folder / "model")
    if not (folder / "model").is_dir():
        raise CheckpointError(f"The run {path} is not finished, so it has no model; resume it first.")
    return folder / "model"


def enclosing_run(source: str | Path) -> Path | None:
    """The run at this path, or the run that contains it; None where there is none."""
    path = Path(source)
    for folder in (path, *list(path.absolute().parents)[:FOLDERS]) if path.is_dir() else ():
        if is_run(folder):
            return folder
    return None


def model_in(source: str | Path) -> str:
    """The folder of the model: inside a run or a recovery, or the path itself."""
    path = Path(source)
    if (path / "model" / "config.json").is_file():
        return str(path / "model")
    folder = model_folder(path)
    return str(source if folder == path else folder)  # unchanged: ./name is not a name on the hub


def local_folder(path: str | Path) -> Path | None:
    """The local folder of a model; None for what may be a name on the hub."""
    path_exists(path, CheckpointError)  # refuses what cannot be looked up
    folder = model_folder(path)
    recover_directory(folder)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the directory that headprune.save wrote.")
    name = str(path)
    if looks_like_a_path(name):
        raise CheckpointError(f"There is no directory {name}; check the path.")
    return None


def refuse_bad_config(config: Path) -> None:
    if not config.is_file():
        raise CheckpointError(
            f"{config.parent} has no config.json, so it is not a checkpoint; give the folder of a saved model."
        )
    try:
        settings = json.loads(config.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{config} is not valid JSON; copy the checkpoint again.") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise CheckpointError(f"{config} names no model_type, so it is not the config of a transformers model.")


def refuse_missing_model(path: str | Path) -> None:
    """Refuse a local path without a model; names on the hub pass."""
    folder = local_folder(path)
    if folder is not None:
        refuse_bad_config(folder / "config.json")


def refuse_missing_structure(path: str | Path) -> None:
    """The same, but a config without weights, or the config file itself, is enough."""
    if Path(path).is_file():
        refuse_bad_config(Path(path))
    else:
        refuse_missing_model(path)
