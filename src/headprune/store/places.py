"""Which folders hold a model: what the files alone say, before anything that reads weights is imported."""

from __future__ import annotations

import json
from pathlib import Path

from headprune.errors import CheckpointError
from headprune.store.files import is_there, recover_directory


def looks_like_a_path(name: str) -> bool:
    """Whether a name can be none of the hub's."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def model_folder(path: str | Path) -> Path:
    """Where the model of this place is: a run keeps it in a folder of its own."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        return folder
    recover_directory(folder / "model")
    if not (folder / "model").is_dir():
        raise CheckpointError(f"The run {path} has not come to its end, so it has no model; go on with it first.")
    return folder / "model"


def local_folder(path: str | Path) -> Path | None:
    """The folder of a model on this machine; None for what may be a name on the hub."""
    is_there(path, CheckpointError)  # refuses what cannot even be looked up
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
