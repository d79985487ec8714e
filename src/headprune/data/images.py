"""Images for classifiers: numpy archives, or a folder with one sub-folder per label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from headprune.data.batches import Examples
from headprune.data.texts import label_ids
from headprune.errors import DataError
from headprune.extras import needed

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


def is_image_model(model: PreTrainedModel) -> bool:
    return getattr(model, "main_input_name", "") == "pixel_values"


def load(model: PreTrainedModel, place: Path, *, processor: str | Path, split: str | None) -> Examples:
    labels: list[Any] | None
    if place.is_dir():
        pictures, labels = _from_folder(place)
    elif place.suffix == ".npz" and place.exists():
        pictures, labels = _from_archive(place, split)
    else:
        what = "There is no file" if not place.exists() else "An image model cannot read"
        raise DataError(f"{what} {place}; give a folder with one sub-folder per label, or an .npz with x and y arrays.")
    prepare = _Preparation(model, processor)
    rows = [{"pixel_values": prepare(picture)} for picture in pictures]
    if labels is not None:
        for row, label in zip(rows, label_ids(model, labels, "label"), strict=True):
            row["labels"] = label
    return Examples(rows, {})


def _from_archive(path: Path, split: str | None) -> tuple[list[numpy.ndarray], list[Any] | None]:
    try:
        archive = numpy.load(path, allow_pickle=False)
    except (ValueError, OSError):
        raise DataError(f"{path} is not a numpy archive without pickles; write it with numpy.savez.") from None
    wanted = [f"x_{split}"] if split else ["x", "x_train", "x_test"]
    name = next((name for name in wanted if name in archive), None)
    if name is None:
        raise DataError(f"{path} has no array {' or '.join(wanted)}; it has {', '.join(archive.files)}.")
    partner = "y" + name[1:]
    try:
        return list(archive[name]), archive[partner].tolist() if partner in archive else None
    except ValueError:
        raise DataError(f"{path} is not a numpy archive without pickles; write it with numpy.savez.") from None


def _from_folder(folder: Path) -> tuple[list[numpy.ndarray], list[str]]:
    with needed("images", "Reading image files needs"):
        from PIL import Image
    pictures, labels = [], []
    for file in sorted(folder.glob("*/*")):
        if file.suffix.lower() in SUFFIXES:
            with Image.open(file) as image:
                pictures.append(numpy.asarray(image.convert("RGB")))
            labels.append(file.parent.name)
    if not pictures:
        raise DataError(f"{folder} has no images; put them into one sub-folder per label.")
    return pictures, labels


class _Preparation:
    """Resize, rescale and normalise as the model's processor config says, by 1/255, mean 0.5 and deviation 0.5 if it
    has none."""

    def __init__(self, model: PreTrainedModel, processor: str | Path) -> None:
        settings: dict[str, Any] = {}
        file = Path(processor) / "preprocessor_config.json"
        if file.is_file():
            settings = json.loads(file.read_text())
        self.channels = int(getattr(model.config, "num_channels", 3))
        size = getattr(model.config, "image_size", None) or settings.get("size", {}).get("height", 224)
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.scale = settings.get("rescale_factor", 1 / 255)
        self.mean = torch.tensor(settings.get("image_mean", [0.5] * self.channels))[: self.channels, None, None]
        self.deviation = torch.tensor(settings.get("image_std", [0.5] * self.channels))[: self.channels, None, None]

    def __call__(self, picture: numpy.ndarray) -> torch.Tensor:
        values = torch.from_numpy(numpy.array(picture, dtype=numpy.float32))
        values = values[None] if values.dim() == 2 else values.permute(2, 0, 1)
        if values.shape[0] == 1 and self.channels > 1:
            values = values.expand(self.channels, -1, -1)
        elif values.shape[0] == 3 and self.channels == 1:
            values = values.mean(0, keepdim=True)
        if tuple(values.shape[1:]) != self.size:
            values = functional.interpolate(
                values[None], size=self.size, mode="bilinear", antialias=True, align_corners=False
            )[0]
        return (values * self.scale - self.mean) / self.deviation
