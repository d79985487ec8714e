"""Which folders hold a model: what the files alone say, before anything that reads weights is imported."""

from __future__ import annotations

import json
from pathlib import Path

from headprune.errors import CheckpointError
from headprune.store.files import recover_directory


def local_folder(path: str | Path) -> Path | None:
    """The folder of a model on this machine; None for what may be a name on the hub."""
    folder = Path(path)
    recover_directory(folder)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the directory that headprune.save wrote.")
    name = str(path)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
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
    """Refuse a place on this machine that holds no model; names on the hub pass."""
    folder = local_folder(path)
    if folder is not None:
        refuse_bad_config(folder / "config.json")


def refuse_missing_structure(path: str | Path) -> None:
    """As for a model, but a config without weights, or the file itself, will do."""
    if Path(path).is_file():
        refuse_bad_config(Path(path))
    else:
        refuse_missing_model(path)
