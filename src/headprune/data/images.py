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

from headprune.checkpoint.atomic_files import short
from headprune.data import labels, packages
from headprune.data.batching import Examples
from headprune.data.columns import LABEL, Columns
from headprune.data.files import is_there, suffix_of
from headprune.data.lazy_rows import Row, Rows
from headprune.data.tables import TABLES, missing, read_table
from headprune.errors import DataError
from headprune.tasks import Task

log = logging.getLogger(__name__)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
IMAGE = ("image", "img", "picture", "file_name", "path")


def expects_images(model: PreTrainedModel, task: Task) -> bool:
    """Whether the inputs of the model are images: image classifiers, and headless models with images as only input."""
    images_only = getattr(model, "main_input_name", "") == "pixel_values"
    return task.name == "image-classification" or (images_only and task.name == "features")


@dataclass(frozen=True)
class ImageSource:
    """Images that are opened one at a time, with the labels of all of them."""

    open: Callable[[int], numpy.ndarray]  # height x width, or with channels as third axis
    count: int
    labels: Sequence[Any] | None
    column: str = "label"
    typed: bool = True
    scaled: bool = False  # values are in [0, 1] already


def load(
    model: PreTrainedModel,
    task: Task,
    source: str | Path,
    *,
    processor: str | Path,
    columns: Columns,
    split: str | None,
) -> Examples:
    source_images = _open_source(model.config, Path(source), source, columns, split)
    targets = None
    if source_images.labels is not None and task.name == "image-classification":
        targets = _targets(model.config, task, source_images)
    transform = image_transform(model, processor)

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            row = {"pixel_values": transform(source_images.open(number), source_images.scaled)}
            rows.append(row if targets is None else {**row, "labels": targets[number]})
        return rows

    return Examples(Rows(make, range(source_images.count)), {})


def _targets(config: Any, task: Task, images: ImageSource) -> list[torch.Tensor]:
    values, column = images.labels or [], images.column
    problem = getattr(task, "problem", None)
    if problem == "regression":
        return labels.regression_targets(config, values, column)
    if problem == "multi_label_classification":
        return labels.multi_hot_targets(config, values, column, typed=images.typed)
    return [torch.tensor(number) for number in labels.class_ids(config, values, column, typed=images.typed)]


# --- sources ---


def _open_source(config: Any, path: Path, source: str | Path, columns: Columns, split: str | None) -> ImageSource:
    if is_there(path):
        if path.is_dir():
            return _from_folder(path)
        if path.suffix.lower() == ".npz":
            return _from_archive(path, split)
    table_like = suffix_of(path) in TABLES
    if not is_there(path) and (table_like or path.suffix.lower() == ".npz" or len(path.parts) > 2):
        raise DataError(f"There is no file {path}; {SUPPORTED_FORMS}.")
    if is_there(path) and not table_like:
        raise DataError(f"An image model cannot read {path}; {SUPPORTED_FORMS}.")
    return _from_table(config, source, columns, split)


SUPPORTED_FORMS = "give a folder with one sub-folder per label, or an .npz with x and y arrays"


def _from_archive(path: Path, split: str | None) -> ImageSource:
    refusal = f"{path} is not a numpy archive without pickles; write it with numpy.savez."
    try:
        archive = numpy.load(path, allow_pickle=False)
    except Exception:  # whatever zipfile, zlib and numpy raise on damaged bytes
        raise DataError(refusal) from None
    if isinstance(archive, numpy.ndarray):  # of numpy.save
        raise DataError(refusal)
    candidates = [f"x_{split}"] if split else ["x", "x_train", "x_test"]
    name = next((name for name in candidates if name in archive), None)
    if name is None:
        raise DataError(f"{path} has no array {' or '.join(candidates)}; it has {', '.join(archive.files)}.")
    label_name = "y" + name[1:]
    try:
        images = archive[name]
        targets = archive.get(label_name)
    except Exception:  # as above
        raise DataError(refusal) from None
    if images.ndim not in (3, 4):
        raise DataError(
            f"Array {name} of {path} has {images.ndim} axes; its shape must be images x height x width (x channels)."
        )
    if targets is not None and len(targets) != len(images):
        raise DataError(
            f"{path} has {len(images)} images in {name} and {len(targets)} labels in {label_name}; give one label each."
        )
    if targets is not None and targets.ndim == 2 and targets.shape[1] == 1:  # some archives store a column vector
        targets = targets[:, 0]
    scaled = False
    if images.dtype.kind == "f" and images.size:
        if not numpy.isfinite(images).all():
            raise DataError(f"Array {name} of {path} has numbers that are not finite; correct or remove them.")
        scaled = bool(images.min() >= 0 and images.max() <= 1)
        if scaled:
            log.warning("The images of %s have values from 0 to 1 and are not rescaled.", path)
    label_values = None if targets is None else targets.tolist()
    return ImageSource(lambda number: images[number], len(images), label_values, label_name, scaled=scaled)


def _from_folder(folder: Path) -> ImageSource:
    packages.pillow()
    files = [file for file in sorted(folder.glob("*/*")) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{folder} has no images; put them into one sub-folder per label.")
    return ImageSource(
        lambda number: _open_image(files[number], files[number]),
        len(files),
        [file.parent.name for file in files],
        "folder",
        typed=False,
    )


def _from_table(config: Any, source: str | Path, columns: Columns, split: str | None) -> ImageSource:
    table = read_table(source, split)
    name = columns.text or next((name for name in IMAGE if name in table), None)
    if name is None or name not in table:
        raise DataError(f"An image model cannot read {source}, which has no column 'image'; {SUPPORTED_FORMS}.")
    label = columns.label or next((name for name in LABEL if name in table), None)
    if label is not None and label not in table:
        raise DataError(f"There is no label column {label!r}; the data has {', '.join(map(repr, table))}.")
    values, folder = table[name], table.folder or Path()

    def open_row(number: int) -> numpy.ndarray:
        value = values[number]
        if missing(value):
            raise DataError(f"Row {number} of column {name!r} has no image; fill it in or remove the row.")
        if isinstance(value, Mapping) and value.get("bytes"):  # the format of data sets in parquet files
            return _open_image(io.BytesIO(value["bytes"]), f"the image in row {number}")
        if isinstance(value, Mapping):
            value = value.get("path")
        if isinstance(value, (str, Path)):
            return _open_image(folder / value, folder / value)
        if isinstance(value, (list, numpy.ndarray)):
            return numpy.asarray(value)
        return numpy.asarray(value.convert("RGB"))

    label_values = None if label is None else labels.labels_in(config, table, label)
    return ImageSource(open_row, len(values), label_values, label or "label", typed=table.typed)


def _open_image(file: Any, name: Any) -> numpy.ndarray:
    if isinstance(file, Path) and not is_there(file):
        raise DataError(f"There is no file {file}; check the path.")
    try:
        with packages.pillow().open(file) as image:
            return numpy.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError):
        raise DataError(f"{name} is not an image that can be read; replace or remove it.") from None


# --- preprocessing ---


def image_transform(model: PreTrainedModel, location: str | Path) -> Callable[[numpy.ndarray, bool], torch.Tensor]:
    """The preprocessing of the image processor in this folder or hub repository, or the default where there is none."""
    channels = int(getattr(model.config, "num_channels", 3))
    settings = _settings(location)
    if settings is None:
        log.warning(
            "No image processor was found at %s; images are resized to the model's size and scaled to -1 .. 1.",
            short(location),
        )
        return _DefaultTransform(model, channels)
    return _ProcessorTransform(model, location, channels, settings)


def _settings(location: str | Path) -> Mapping[str, Any] | None:
    """The config of the image processor; None where there is none."""
    from transformers.image_processing_base import ImageProcessingMixin

    file = Path(location) / "preprocessor_config.json"
    if is_there(location) and Path(location).is_dir() and not any(Path(location).glob("*processor_config.json")):
        return None
    try:
        return ImageProcessingMixin.get_image_processor_dict(str(location))[0]
    except (OSError, ValueError):
        if file.is_file():
            raise DataError(f"{file} cannot be read; save the image processor again.") from None
        return None


class _ProcessorTransform:
    """The image processor of the model with the Pillow backend of transformers: the same values with and without
    torchvision."""

    def __init__(
        self, model: PreTrainedModel, location: str | Path, channels: int, settings: Mapping[str, Any]
    ) -> None:
        packages.pillow()
        from transformers import AutoImageProcessor

        options: dict[str, Any] = {}
        size = getattr(model.config, "image_size", None)
        if "size" not in settings and size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            options["size"] = {"height": height, "width": width}
        try:
            self.processor = AutoImageProcessor.from_pretrained(
                location, backend="pil", config=model.config, trust_remote_code=False, **options
            )
        except (OSError, ValueError, ImportError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"The image processor at {short(location)} cannot be used ({reason}); name another with --processor."
            ) from None
        self.channels = channels

    def __call__(self, image: numpy.ndarray, scaled: bool) -> torch.Tensor:
        image = _with_channels(image, self.channels)
        if image.dtype != numpy.uint8 and not scaled:
            image = _to_uint8(image)
        options = {"do_rescale": False} if scaled else {}
        features = self.processor(image, return_tensors="pt", input_data_format="channels_last", **options)
        return features["pixel_values"][0]


class _DefaultTransform:
    """The default: resize to the image size of the model, rescale by 1/255, normalise with mean and deviation 0.5."""

    def __init__(self, model: PreTrainedModel, channels: int) -> None:
        size = getattr(model.config, "image_size", None) or 224
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.channels = channels

    def __call__(self, image: numpy.ndarray, scaled: bool) -> torch.Tensor:
        image = _with_channels(image, self.channels)
        values = torch.from_numpy(numpy.array(image, dtype=numpy.float32)).permute(2, 0, 1)
        if tuple(values.shape[1:]) != self.size:
            values = functional.interpolate(
                values[None], size=self.size, mode="bilinear", antialias=True, align_corners=False
            )[0]
        return (values * (1 if scaled else 1 / 255) - 0.5) / 0.5


def _with_channels(image: numpy.ndarray, channels: int) -> numpy.ndarray:
    """The image as height x width x channels, with the channels of the model: grey repeated, colours averaged."""
    if image.ndim == 2:
        image = image[..., None]
    count = image.shape[-1]
    if count == channels:
        return image
    if count == 4 and channels == 3:  # transparency
        return image[..., :3]
    if count == 1:
        return numpy.repeat(image, channels, axis=-1)
    if channels == 1:
        return image.astype(numpy.float32).mean(-1, keepdims=True)
    raise DataError(f"An image has {count} channels (its last axis), but the model expects {channels}; convert it.")


def _to_uint8(image: numpy.ndarray) -> numpy.ndarray:
    """The image as uint8, which image processors expect."""
    rounded = numpy.rint(image)
    if rounded.min() < 0 or rounded.max() > 255:
        raise DataError("Images must have values from 0 to 255 or from 0 to 1; rescale them.")
    return rounded.astype(numpy.uint8)
