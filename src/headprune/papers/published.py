"""Reads the result files of the authors, curves (csv) and random trials (xlsx), and results that only their notebooks
print, where somebody saved them as json: final masks, removal orders, attention entropies."""

from __future__ import annotations

import csv
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

from headprune.papers.figure_data import Curve, Panel
from headprune.papers.paper_models import MODELS, PaperModel, ReproductionError

CURVE_FILES = {
    "gnorm": "GreedyGnorm",
    "inverse:gnorm": "InverseGreedyGnorm",
    "entropy": "AE",
    "inverse:entropy": "AEinverse",
}
MAX_UNPACKED = 64 * 2**20  # bytes of an unpacked xlsx file: a small archive must not fill the memory
MASKS, ORDERS = "published_final_masks.json", "published_pruning_order.json"
ENTROPIES = "published_attention_entropy.json"


def published_panels(folder: Path) -> list[Panel]:
    """The data of figures 3 and 4, from a folder with the authors' files, and of figure 5 where masks or orders are
    there."""
    if not folder.is_dir():
        raise ReproductionError(f"There is no directory {folder} with the published results; check the path.")
    masks, orders = read_masks(folder), read_orders(folder)
    if masks is None and orders is not None:
        masks = {model.key: mask_of_order(model, orders[model.key]) for model in MODELS}
    return [
        Panel(
            title=model.title,
            heads=model.heads * model.applications,
            curves={criterion: read_curve(folder, model, criterion) for criterion in CURVE_FILES},
            trials=read_trials(folder, model),
            mask=None if masks is None else masks[model.key],
            uses=model.applications,
            stop=model.removed * model.applications,
        )
        for model in MODELS
    ]


def read_curve(folder: Path, model: PaperModel, criterion: str) -> Curve:
    """(heads removed, accuracy); a file may end before the last head is removed."""
    path = _require_file(folder / f"pruned_heads_accuracy({model.published})basedon{CURVE_FILES[criterion]}.csv")
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = {"Pruned_Heads", "Accuracy"} - set(reader.fieldnames or ())
        if missing:
            raise ReproductionError(f"{path} has no column {sorted(missing)[0]}; give the authors' own file.")
        try:
            points = [(int(row["Pruned_Heads"]), float(row["Accuracy"])) for row in reader if row["Accuracy"]]
        except (TypeError, ValueError):
            raise ReproductionError(f"{path} has a row that is not two numbers; give the authors' own file.") from None
    if not points:
        raise ReproductionError(f"{path} has no rows; give the authors' own file.")
    return points


def read_trials(folder: Path, model: PaperModel) -> dict[int, list[float]]:
    """Heads removed -> accuracy of every random trial, from the concatenated file where there is one, or else from the
    files of all groups."""
    pattern = f"{model.published}randompruned_heads_data_*.xlsx"
    files = sorted(folder.glob(pattern))
    if not files:
        raise ReproductionError(f"There is no file {pattern} in {folder}; check the directory.")
    joined = [file for file in files if "concated" in file.name]
    trials: dict[int, list[float]] = {}
    for file in joined[:1] or files:
        header, *rows = read_sheet(file) or [[]]
        if not header or header[0] != "Heads Pruned" or len(header) < 2:
            raise ReproductionError(f"{file} has no columns Heads Pruned, Trial_1, ...; give the authors' own file.")
        for row in rows:
            if row and isinstance(row[0], float):
                trials.setdefault(int(row[0]), []).extend(value for value in row[1:] if isinstance(value, float))
    return trials


def read_sheet(path: Path) -> list[list[float | str | None]]:
    """The rows of the first sheet of an xlsx file: numbers as floats, other values as strings."""
    try:
        import openpyxl
    except ImportError:
        raise ReproductionError(
            f"Reading {path.name} needs openpyxl; install it with pip install 'headprune[papers]'."
        ) from None
    try:
        with zipfile.ZipFile(path) as archive:
            large = sum(part.file_size for part in archive.infolist()) > MAX_UNPACKED
    except zipfile.BadZipFile:
        raise ReproductionError(f"{path} cannot be read as xlsx (it is not a zip file); fetch it again.") from None
    if large:
        raise ReproductionError(f"{path} is too large for a sheet of results; give the authors' own file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about styles do not matter here
            book = openpyxl.load_workbook(path, read_only=True, data_only=True)
            try:
                sheet = book.worksheets[0]
                sheet.reset_dimensions()  # the dimensions stored in the file may be wrong
                return [[_cell(value) for value in row] for row in sheet.iter_rows(values_only=True)]
            finally:
                book.close()
    except Exception as error:  # openpyxl may raise any error for a damaged file
        raise ReproductionError(f"{path} cannot be read as xlsx ({type(error).__name__}); fetch it again.") from None


def _cell(value: Any) -> float | str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None if value is None else str(value)


def read_masks(folder: Path) -> dict[str, list[list[bool]]] | None:
    """Model key -> [sites x heads], True = kept; None where there is no such file."""
    content = _json(folder / MASKS)
    if content is None:
        return None
    masks = {}
    for model in MODELS:
        rows: Any = content.get(model.published)
        shape = [len(row) for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        if shape != [model.heads_per_site] * model.sites:
            raise ReproductionError(
                f"{folder / MASKS} has no mask of {model.sites} x {model.heads_per_site} heads for {model.published}; "
                "write it again, or remove it."
            )
        masks[model.key] = [[bool(bit) for bit in row] for row in rows]
    return masks


def read_orders(folder: Path) -> dict[str, list[tuple[int, int]]] | None:
    """Model key -> (site, head) in the order of removal, all but the last head; None where there is no such file."""
    content = _json(folder / ORDERS)
    if content is None:
        return None
    try:
        orders = {model.key: [(int(s), int(h)) for s, h in content[model.published]] for model in MODELS}
    except (KeyError, TypeError, ValueError):
        orders = {}
    for model in MODELS:
        order = orders.get(model.key, [])
        known = {(site, head) for site in range(model.sites) for head in range(model.heads_per_site)}
        if not (set(order) <= known and model.removed <= len(set(order)) == len(order)):
            raise ReproductionError(
                f"{folder / ORDERS} is not a list of [layer, head] for each of the four models, up to where the paper "
                f"stops ({model.published}: {model.removed}); write it again, or remove it."
            )
    return orders


def read_entropies(folder: Path) -> dict[str, list[list[float]]] | None:
    """Model key -> [layers x heads] of attention entropies; None where there is no such file."""
    content = _json(folder / ENTROPIES)
    if content is None:
        return None
    shapes = {model.published: (model.sites * model.applications, model.heads_per_site) for model in MODELS}
    try:
        entropies = {model.key: [[float(v) for v in row] for row in content[model.published]] for model in MODELS}
    except (KeyError, TypeError, ValueError):
        entropies = {}
    for model in MODELS:
        layers, heads = shapes[model.published]
        if [len(row) for row in entropies.get(model.key, [])] != [heads] * layers:
            raise ReproductionError(
                f"{folder / ENTROPIES} has no {layers} x {heads} entropies for {model.published}; write it again, or "
                "remove it."
            )
    return entropies


def mask_of_order(model: PaperModel, order: list[tuple[int, int]]) -> list[list[bool]]:
    """The mask after the number of removals at which the paper stops."""
    removed = set(order[: model.removed])
    return [[(site, head) not in removed for head in range(model.heads_per_site)] for site in range(model.sites)]


def _json(path: Path) -> dict[str, Any] | None:
    """The contents of a file that the authors did not publish as such, so that it may be missing."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ReproductionError(f"{path} is not json; write it again, or remove it.") from None
    if not isinstance(content, dict):
        raise ReproductionError(f"{path} does not name the four models; write it again, or remove it.")
    return content


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise ReproductionError(f"There is no file {path.name} in {path.parent}; check the directory.")
    return path
