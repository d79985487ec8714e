"""Entries of a batch that hold the images or sounds of all samples one after the other, and the rows of each sample.

Multimodal models take one row per image, or one row per patch, of all samples together. How many of them belong to a
sample follows from the placeholder tokens of its text and from the sizes of the images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.batches import GRIDS, batch_size
from headprune.errors import DataError

# A modality: words in the names of its entries, and the settings of a config that have its placeholder token.
MODALITIES = (
    (("video",), ("video_token_id", "video_token_index")),
    (
        ("pixel", "image"),
        ("image_token_id", "image_token_index", "image_pad_token_id", "media_placeholder_token_id"),
    ),
    (("audio", "feature"), ("audio_token_id", "audio_token_index", "audio_pad_token_id")),
)


def packed_rows(batch: Mapping[str, Any], config: Any) -> dict[str, list[int]]:
    """The rows of each sample in every packed entry of a batch, by the name of the entry."""
    ids = batch.get("input_ids")
    size = batch_size(batch)
    if size == 1:
        return {}
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return _rows_of_images(tensors, size)
    result: dict[str, list[int]] = {}
    names = list(tensors)
    for words, settings in MODALITIES:
        token = next((value for name in settings if isinstance(value := getattr(config, name, None), int)), None)
        entries = {name: tensors[name] for name in names if any(word in name for word in words)}
        names = [name for name in names if name not in entries]
        if token is not None and entries:
            result |= _rows_of_modality(entries, ids == token)
    return result


def _rows_of_images(entries: Mapping[str, torch.Tensor], size: int) -> dict[str, list[int]]:
    """The patches of each sample where a vision tower runs alone: every image is a sample."""
    grid = next((value for name, value in entries.items() if name.endswith(GRIDS) and len(value) == size), None)
    patches: list[int] = [] if grid is None else grid.prod(-1).tolist()
    return {name: patches for name, value in entries.items() if patches and len(value) == sum(patches) > size}


def _rows_of_modality(entries: Mapping[str, torch.Tensor], placeholders: torch.Tensor) -> dict[str, list[int]]:
    tokens = placeholders.sum(1).tolist()
    grid = next((value for name, value in entries.items() if name.endswith(GRIDS)), None)
    if grid is not None:
        patches = grid.prod(-1).tolist()
        images = _images_by_patches(patches, tokens)
        of_sample = torch.tensor(patches).split(images)
        by_length = {len(patches): images, sum(patches): [int(part.sum()) for part in of_sample]}
        return {name: by_length[len(value)] for name, value in entries.items() if len(value) in by_length}
    result = {}
    for name, value in entries.items():
        counts = _rows_by_tokens(len(value), entries, placeholders)
        if counts is not None:
            result[name] = counts
        elif len(value) != len(tokens):
            raise DataError(
                f"It is unknown which of the {len(value)} rows of {name} belong to which sample; use batches of one "
                "sample."
            )
    return result


def _images_by_patches(patches: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """How many images each sample has, from the patches of every image and the placeholders of every sample: a
    placeholder stands for a fixed number of patches."""
    per_token, rest = divmod(sum(patches), max(1, sum(tokens)))
    images: list[int] = []
    left = list(patches)
    for count in tokens:
        missing, number = count * per_token, 0
        while missing > 0 and left:
            missing -= left.pop(0)
            number += 1
        rest += abs(missing)
        images.append(number)
    if rest or left:
        raise DataError(
            "The sizes of the images do not fit the placeholder tokens of the texts, so it is unknown which image "
            "belongs to which sample; process each text together with its images."
        )
    return images


def _rows_by_tokens(rows: int, entries: Mapping[str, torch.Tensor], placeholders: torch.Tensor) -> list[int] | None:
    """The rows of each sample in an entry with a row per image or per tile of one; None where it cannot be told."""
    tokens = placeholders.sum(1)
    if rows == int((tokens > 0).sum()):  # every sample with placeholders has one
        return (tokens > 0).long().tolist()
    sizes = next((value for name, value in entries.items() if name.endswith("sizes")), None)
    of_one_size = sizes is None or bool((sizes == sizes[:1]).all())
    total = int(tokens.sum())
    if of_one_size and total and not bool((rows * tokens % total).any()):
        return (rows * tokens // total).tolist()
    # Placeholders of one image follow one another.
    starts = placeholders.clone()
    starts[:, 1:] &= ~placeholders[:, :-1]
    return starts.sum(1).tolist() if int(starts.sum()) == rows else None
