"""Images are what the model's own image processor makes of them, wherever they come from."""

from __future__ import annotations

import builtins
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from headprune.data import Columns, load_examples
from headprune.errors import DataError, HeadpruneError
from run_helpers import material, write_rows
from zoo import LABELS, VISION, ZOO

SIZE = {"height": 16, "width": 16}
PROCESSORS: dict[str, Any] = {
    "plain": lambda: ViTImageProcessorPil(size=SIZE),
    "not-normalized": lambda: ViTImageProcessorPil(size=SIZE, do_normalize=False),
    "not-rescaled": lambda: ViTImageProcessorPil(size=SIZE, do_rescale=False),
    "another-scale": lambda: ViTImageProcessorPil(size=SIZE, rescale_factor=1 / 127.5),
    "own-mean": lambda: ViTImageProcessorPil(size=SIZE, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]),
    "nearest": lambda: ViTImageProcessorPil(size=SIZE, resample=0),
    "bicubic": lambda: ViTImageProcessorPil(size=SIZE, resample=3),
    "cropped": lambda: DeiTImageProcessorPil(size={"height": 20, "width": 20}, crop_size=SIZE),
    "by-share": lambda: ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.9),
}


def pictures(*shape: int, seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


def archive(path: Path, **arrays: numpy.ndarray) -> Path:
    numpy.savez(path, **arrays)
    return path


@pytest.mark.parametrize("shape", [(2, 16, 16, 3), (2, 31, 23, 3)], ids=["fits", "large"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_what_the_processor_makes_of_them(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    processor = PROCESSORS[name]()
    processor.save_pretrained(tmp_path)
    images = pictures(*shape)
    rows = load_examples(ZOO["vit"].build(), archive(tmp_path / "x.npz", x=images), processor=tmp_path).rows
    for row, image in zip(rows, images, strict=True):
        expected = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(row["pixel_values"], expected, rtol=0, atol=0)


def test_files_are_prepared_like_arrays(tmp_path: Path) -> None:
    processor = PROCESSORS["cropped"]()
    processor.save_pretrained(tmp_path / "model")
    image = pictures(31, 23, 3)
    for label in ("0", "2"):
        (tmp_path / "data" / label).mkdir(parents=True)
        Image.fromarray(image).save(tmp_path / "data" / label / "a.png")
    rows = load_examples(ZOO["vit"].build(), tmp_path / "data", processor=tmp_path / "model").rows
    expected = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"][0]
    assert all(torch.equal(row["pixel_values"], expected) for row in rows)
    assert [int(row["labels"]) for row in rows] == [0, 2]


@pytest.mark.parametrize("kind", ["grey", "one-channel", "transparent", "numbers", "scaled"])
def test_other_arrays(kind: str, tmp_path: Path) -> None:
    processor = PROCESSORS["own-mean"]()
    processor.save_pretrained(tmp_path)
    image = pictures(31, 23, 3)
    grey = image[..., 0]
    given, same = {
        "grey": (grey, numpy.stack([grey] * 3, -1)),
        "one-channel": (grey[..., None], numpy.stack([grey] * 3, -1)),
        "transparent": (numpy.concatenate([image, image[..., :1]], -1), image),
        "numbers": (image.astype(numpy.float32), image),
        "scaled": (image / 255, image),
    }[kind]
    (row,) = load_examples(ZOO["vit"].build(), archive(tmp_path / "x.npz", x=given[None]), processor=tmp_path).rows
    expected = processor(Image.fromarray(same), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(row["pixel_values"], expected, rtol=0, atol=1e-5)


def test_a_model_that_sees_grey(tmp_path: Path) -> None:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**{**VISION, "num_channels": 1}))
    images = pictures(1, 16, 16)
    (row,) = load_examples(model, archive(tmp_path / "x.npz", x=images), processor=tmp_path).rows
    torch.testing.assert_close(row["pixel_values"], torch.tensor(images / 127.5 - 1).float())
    colours = pictures(1, 16, 16, 3)
    (row,) = load_examples(model, archive(tmp_path / "y.npz", x=colours), processor=tmp_path).rows
    torch.testing.assert_close(row["pixel_values"][0], torch.tensor(colours[0].mean(-1) / 127.5 - 1).float())


def test_without_a_processor_the_usual_is_done_and_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    data = archive(tmp_path / "x.npz", x=pictures(8, 16, 16, 3))
    with caplog.at_level(logging.WARNING):
        load_examples(ZOO["vit"].build(), data, processor=material().vit).batches(4)
    assert caplog.text.count("No image processor was found") == 1


def test_numbers_from_0_to_1_are_not_scaled_again(tmp_path: Path) -> None:
    images = pictures(2, 16, 16, 3)
    whole = archive(tmp_path / "x.npz", x=images)
    scaled = archive(tmp_path / "y.npz", x=(images / 255).astype(numpy.float32))
    one, other = (load_examples(ZOO["vit"].build(), data, processor=tmp_path).rows for data in (whole, scaled))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a["pixel_values"], b["pixel_values"])


def test_a_model_without_a_head_takes_images_alone(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**VISION))
    examples = load_examples(model, material().pictures_npz, processor=tmp_path)
    assert not examples.has_labels
    assert len(examples) == 12


def png(image: numpy.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "png")
    return stream.getvalue()


def test_tables_of_images(tmp_path: Path) -> None:
    """A column of file names beside the table, and the bytes that data sets keep in parquet files."""
    images = pictures(3, 16, 16, 3)
    (tmp_path / "all").mkdir()
    for number, image in enumerate(images):
        (tmp_path / "all" / f"{number}.png").write_bytes(png(image))
    named = write_rows(tmp_path / "x.csv", [{"file_name": f"all/{n}.png", "label": n} for n in range(3)])
    kept = [{"photo": {"bytes": png(image), "path": None}, "kind": n} for n, image in enumerate(images)]
    stored = write_rows(tmp_path / "x.parquet", kept)
    model = ZOO["vit"].build()
    columns = Columns(text="photo", label="kind")
    for rows in (
        load_examples(model, named, processor=tmp_path).rows,
        load_examples(model, stored, processor=tmp_path, columns=columns).rows,
    ):
        assert [int(row["labels"]) for row in rows] == [0, 1, 2]
        for row, image in zip(rows, images, strict=True):
            expected = torch.tensor(image).permute(2, 0, 1) / 127.5 - 1
            torch.testing.assert_close(row["pixel_values"], expected)


def test_labels_in_a_column_of_their_own_axis(tmp_path: Path) -> None:
    data = archive(tmp_path / "x.npz", x=pictures(3, 16, 16, 3), y=numpy.array([[2], [0], [1]]))
    rows = load_examples(ZOO["vit"].build(), data, processor=tmp_path).rows
    assert [row["labels"].tolist() for row in rows] == [2, 0, 1]


BAD: dict[str, tuple[dict[str, numpy.ndarray], str]] = {
    "five-channels": ({"x": pictures(1, 16, 16, 5)}, "5 channels .*, but the model expects 3"),
    "one-axis": ({"x": pictures(9)}, "has 1 axes; its shape must be images x height x width"),
    "unlike-lengths": ({"x": pictures(2, 16, 16), "y": numpy.arange(3)}, "2 images in x and 3 labels in y"),
    "not-finite": ({"x": numpy.full((1, 16, 16, 3), numpy.nan)}, "numbers that are not finite"),
    "too-large": ({"x": numpy.full((1, 16, 16, 3), 300.0)}, "values from 0 to 255 or from 0 to 1"),
    "label-out-of-range": ({"x": pictures(1, 16, 16), "y": numpy.array([LABELS])}, "Label 3 in row 0 of column 'y'"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_archives(case: str, tmp_path: Path) -> None:
    PROCESSORS["plain"]().save_pretrained(tmp_path)
    arrays, message = BAD[case]
    with pytest.raises(DataError, match=message):
        load_examples(ZOO["vit"].build(), archive(tmp_path / "x.npz", **arrays), processor=tmp_path).batches(2)


@pytest.mark.parametrize("damage", ["end", "header", "data", "one array"])
def test_a_damaged_archive_is_refused(damage: str, tmp_path: Path) -> None:
    data = archive(tmp_path / "x.npz", x=pictures(2, 16, 16, 3))
    content = data.read_bytes()
    if damage == "one array":
        with data.open("wb") as file:
            numpy.save(file, pictures(2, 16, 16, 3))
    else:
        place = {"end": len(content) - 22, "header": 0, "data": len(content) // 2}[damage]
        data.write_bytes(content[:place] + bytes(8) + content[place + 8 :])
    with pytest.raises(DataError, match="is not a numpy archive without pickles"):
        load_examples(ZOO["vit"].build(), data, processor=tmp_path).batches(2)


def test_wrong_processors_and_files(tmp_path: Path) -> None:
    data = archive(tmp_path / "x.npz", x=pictures(1, 16, 16, 3))
    for settings, message in (
        (
            json.dumps({"image_processor_type": "NoSuchProcessor"}),
            r"cannot be used \(.*; name another with --processor",
        ),
        ("{", r"preprocessor_config\.json cannot be read"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(settings)
        model = ZOO["vit"].build()
        model.config = transformers.BertConfig()  # which has no image processor
        with pytest.raises(DataError, match=message):
            load_examples(model, data, processor=tmp_path)
    missing = write_rows(tmp_path / "x.csv", [{"image": "nowhere.png", "label": 0}])
    with pytest.raises(DataError, match=r"There is no file .*nowhere\.png"):
        load_examples(ZOO["vit"].build(), missing, processor=material().vit).batches(1)


def test_files_of_images_need_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = load_examples(ZOO["vit"].build(), material().pictures_folder, processor=material().vit)
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(HeadpruneError, match=r"needs pillow; .*headprune\[images\]"):
        examples.batches(1)
