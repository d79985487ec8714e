"""Images: a folder with one sub-folder per label, a numpy archive, or a table or data set with a column of images."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from headprune.data import labels, packages
from headprune.data.batches import Examples
from headprune.data.columns import LABEL, Columns
from headprune.data.files import is_there, suffix_of
from headprune.data.lazy import Row, Rows
from headprune.data.tables import TABLES, missing, read_table
from headprune.errors import DataError
from headprune.store.files import short
from headprune.tasks import Task

log = logging.getLogger(__name__)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
IMAGE = ("image", "img", "picture", "file_name", "path")


def takes(model: PreTrainedModel, task: Task) -> bool:
    """Whether the model's rows are images: classifiers of them, and models without a head that see nothing else."""
    alone = getattr(model, "main_input_name", "") == "pixel_values"
    return task.name == "image-classification" or (alone and task.name == "features")


@dataclass(frozen=True)
class Pictures:
    """Pictures that are opened one at a time, and what is known about all of them."""

    open: Callable[[int], numpy.ndarray]  # height x width, or with channels as third axis
    count: int
    labels: Sequence[Any] | None
    column: str = "label"
    typed: bool = True
    scaled: bool = False  # to numbers from 0 to 1


def load(
    model: PreTrainedModel,
    task: Task,
    source: str | Path,
    *,
    processor: str | Path,
    columns: Columns,
    split: str | None,
) -> Examples:
    pictures = _found(model.config, Path(source), source, columns, split)
    targets = None
    if pictures.labels is not None and task.name == "image-classification":
        targets = _targets(model.config, task, pictures)
    prepare = preparation(model, processor)

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            row = {"pixel_values": prepare(pictures.open(number), pictures.scaled)}
            rows.append(row if targets is None else {**row, "labels": targets[number]})
        return rows

    return Examples(Rows(make, range(pictures.count)), {})


def _targets(config: Any, task: Task, pictures: Pictures) -> list[torch.Tensor]:
    values, column = pictures.labels or [], pictures.column
    problem = getattr(task, "problem", None)
    if problem == "regression":
        return labels.numbers(config, values, column)
    if problem == "multi_label_classification":
        return labels.several_classes(config, values, column, typed=pictures.typed)
    return [torch.tensor(number) for number in labels.classes(config, values, column, typed=pictures.typed)]


# --- where pictures come from ---


def _found(config: Any, place: Path, source: str | Path, columns: Columns, split: str | None) -> Pictures:
    if is_there(place):
        if place.is_dir():
            return _from_folder(place)
        if place.suffix.lower() == ".npz":
            return _from_archive(place, split)
    table_like = suffix_of(place) in TABLES
    if not is_there(place) and (table_like or place.suffix.lower() == ".npz" or len(place.parts) > 2):
        raise DataError(f"There is no file {place}; {FORMS}.")
    if is_there(place) and not table_like:
        raise DataError(f"An image model cannot read {place}; {FORMS}.")
    return _from_table(config, source, columns, split)


FORMS = "give a folder with one sub-folder per label, or an .npz with x and y arrays"


def _from_archive(path: Path, split: str | None) -> Pictures:
    refusal = f"{path} is not a numpy archive without pickles; write it with numpy.savez."
    try:
        archive = numpy.load(path, allow_pickle=False)
    except (ValueError, OSError):
        raise DataError(refusal) from None
    wanted = [f"x_{split}"] if split else ["x", "x_train", "x_test"]
    name = next((name for name in wanted if name in archive), None)
    if name is None:
        raise DataError(f"{path} has no array {' or '.join(wanted)}; it has {', '.join(archive.files)}.")
    partner = "y" + name[1:]
    try:
        pictures = archive[name]
        targets = archive.get(partner)
    except ValueError:
        raise DataError(refusal) from None
    if pictures.ndim not in (3, 4):
        raise DataError(
            f"Array {name} of {path} has {pictures.ndim} axes; give it as pictures x height x width (x channels)."
        )
    if targets is not None and len(targets) != len(pictures):
        raise DataError(
            f"{path} has {len(pictures)} pictures in {name} and {len(targets)} labels in {partner}; give one each."
        )
    if targets is not None and targets.ndim == 2 and targets.shape[1] == 1:  # a column, as some archives have it
        targets = targets[:, 0]
    scaled = False
    if pictures.dtype.kind == "f" and pictures.size:
        if not numpy.isfinite(pictures).all():
            raise DataError(f"Array {name} of {path} has numbers that are not finite; correct or remove them.")
        scaled = bool(pictures.min() >= 0 and pictures.max() <= 1)
        if scaled:
            log.warning("The pictures of %s are numbers from 0 to 1 and are not scaled again.", path)
    found = None if targets is None else targets.tolist()
    return Pictures(lambda number: pictures[number], len(pictures), found, partner, scaled=scaled)


def _from_folder(folder: Path) -> Pictures:
    packages.pillow()
    files = [file for file in sorted(folder.glob("*/*")) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{folder} has no images; put them into one sub-folder per label.")
    return Pictures(
        lambda number: _opened(files[number], files[number]),
        len(files),
        [file.parent.name for file in files],
        "folder",
        typed=False,
    )


def _from_table(config: Any, source: str | Path, columns: Columns, split: str | None) -> Pictures:
    table = read_table(source, split)
    name = columns.text or next((name for name in IMAGE if name in table), None)
    if name is None or name not in table:
        raise DataError(f"An image model cannot read {source}, which has no column 'image'; {FORMS}.")
    label = columns.label or next((name for name in LABEL if name in table), None)
    if label is not None and label not in table:
        raise DataError(f"There is no label column {label!r}; the data has {', '.join(map(repr, table))}.")
    values, folder = table[name], table.folder or Path()

    def opened(number: int) -> numpy.ndarray:
        value = values[number]
        if missing(value):
            raise DataError(f"Row {number} of column {name!r} has no image; fill it in or remove the row.")
        if isinstance(value, Mapping) and value.get("bytes"):  # as data sets store images in parquet files
            return _opened(io.BytesIO(value["bytes"]), f"the image in row {number}")
        if isinstance(value, Mapping):
            value = value.get("path")
        if isinstance(value, (str, Path)):
            return _opened(folder / value, folder / value)
        if isinstance(value, (list, numpy.ndarray)):
            return numpy.asarray(value)
        return numpy.asarray(value.convert("RGB"))

    found = None if label is None else labels.labels_in(config, table, label)
    return Pictures(opened, len(values), found, label or "label", typed=table.typed)


def _opened(file: Any, name: Any) -> numpy.ndarray:
    if isinstance(file, Path) and not is_there(file):
        raise DataError(f"There is no file {file}; check the path.")
    try:
        with packages.pillow().open(file) as image:
            return numpy.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError):
        raise DataError(f"{name} is not an image that can be read; replace or remove it.") from None


# --- how they are prepared ---


def preparation(model: PreTrainedModel, place: str | Path) -> Callable[[numpy.ndarray, bool], torch.Tensor]:
    """What the image processor at this place does, or the usual where there is none."""
    channels = int(getattr(model.config, "num_channels", 3))
    settings = _settings(place)
    if settings is None:
        log.warning(
            "No image processor was found at %s; images are resized to the model's size and scaled to -1 .. 1.",
            short(place),
        )
        return _Usual(model, channels)
    return _Own(model, place, channels, settings)


def _settings(place: str | Path) -> Mapping[str, Any] | None:
    """What is written down about the image processor; None where nothing is."""
    from transformers.image_processing_base import ImageProcessingMixin

    written = Path(place) / "preprocessor_config.json"
    if is_there(place) and Path(place).is_dir() and not any(Path(place).glob("*processor_config.json")):
        return None
    try:
        return ImageProcessingMixin.get_image_processor_dict(str(place))[0]
    except (OSError, ValueError):
        if written.is_file():
            raise DataError(f"{written} cannot be read; save the image processor again.") from None
        return None


class _Own:
    """The model's own image processor, with transformers' Pillow backend: the same numbers on every machine, whether
    torchvision is there or not."""

    def __init__(self, model: PreTrainedModel, place: str | Path, channels: int, settings: Mapping[str, Any]) -> None:
        packages.pillow()
        from transformers import AutoImageProcessor

        options: dict[str, Any] = {}
        size = getattr(model.config, "image_size", None)
        if "size" not in settings and size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            options["size"] = {"height": height, "width": width}
        try:
            self.processor = AutoImageProcessor.from_pretrained(place, backend="pil", config=model.config, **options)
        except (OSError, ValueError, ImportError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"The image processor at {short(place)} cannot be used ({reason}); name another with --processor."
            ) from None
        self.channels = channels

    def __call__(self, picture: numpy.ndarray, scaled: bool) -> torch.Tensor:
        picture = _with_channels(picture, self.channels)
        if picture.dtype != numpy.uint8 and not scaled:
            picture = _whole(picture)
        options = {"do_rescale": False} if scaled else {}
        prepared = self.processor(picture, return_tensors="pt", input_data_format="channels_last", **options)
        return prepared["pixel_values"][0]


class _Usual:
    """Resized to the model's size, by 1/255, mean 0.5 and deviation 0.5."""

    def __init__(self, model: PreTrainedModel, channels: int) -> None:
        size = getattr(model.config, "image_size", None) or 224
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.channels = channels

    def __call__(self, picture: numpy.ndarray, scaled: bool) -> torch.Tensor:
        picture = _with_channels(picture, self.channels)
        values = torch.from_numpy(numpy.array(picture, dtype=numpy.float32)).permute(2, 0, 1)
        if tuple(values.shape[1:]) != self.size:
            values = functional.interpolate(
                values[None], size=self.size, mode="bilinear", antialias=True, align_corners=False
            )[0]
        return (values * (1 if scaled else 1 / 255) - 0.5) / 0.5


def _with_channels(picture: numpy.ndarray, channels: int) -> numpy.ndarray:
    """Height x width x channels with as many channels as the model takes: grey repeated, colours averaged."""
    if picture.ndim == 2:
        picture = picture[..., None]
    own = picture.shape[-1]
    if own == channels:
        return picture
    if own == 4 and channels == 3:  # transparency
        return picture[..., :3]
    if own == 1:
        return numpy.repeat(picture, channels, axis=-1)
    if channels == 1:
        return picture.astype(numpy.float32).mean(-1, keepdims=True)
    raise DataError(f"An image has {own} channels (its last axis) and the model takes {channels}; convert it.")


def _whole(picture: numpy.ndarray) -> numpy.ndarray:
    """Image processors resize pictures of whole numbers from 0 to 255."""
    rounded = numpy.rint(picture)
    if rounded.min() < 0 or rounded.max() > 255:
        raise DataError("Images must hold numbers from 0 to 255, or from 0 to 1; scale them so.")
    return rounded.astype(numpy.uint8)
