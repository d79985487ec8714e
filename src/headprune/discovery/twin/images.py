"""Dummy images and videos in the layouts that models accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .module_facts import BATCH, Facts

VISION = r"vision|visual|image|vit|backbone|encoder"
NAMES = (
    "pixel_values",
    "pixel_values_images",
    "image_pixel_values",
    "image",
    "images",
    "hidden_states",
    "pixel_values_videos",
)
GRIDS = ("image_grid_thw", "grid_thw", "video_grid_thw")


def pair(value: Any, default: int) -> tuple[int, int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and value and isinstance(value[0], int):
        return (int(value[-2]), int(value[-1])) if len(value) > 1 else (int(value[0]), int(value[0]))
    return (value, value) if isinstance(value, int) else (default, default)


class Images:
    """Generates image inputs from the sizes in a model's config."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.name = next(
            (name for name in NAMES if name in facts and (name != "hidden_states" or has_grid(facts))), None
        )
        self.channels = facts.number("num_channels", "in_channels", "in_chans", among=VISION, default=3)
        if self.channels > 16:
            self.channels = 3
        self.patch = pair(facts.find("patch_size", "patch_sizes", among=VISION), 16)
        size = facts.find("image_size", "img_size", "crop_size", "input_size", among=VISION)
        self.size = pair(size, 4 * self.patch[0])
        self.temporal = facts.number("temporal_patch_size", "video_temporal_patch_size", among=VISION, default=1)
        self.merge = facts.number("spatial_merge_size", "merge_size", among=VISION, default=2)
        self.frames = facts.number("num_frames", "frames_per_clip", "num_image_with_embedding", default=2)

    def layouts(self) -> Iterator[dict[str, Any]]:
        if self.name is None:
            return
        if has_grid(self.facts):
            yield from self.packed()
        if any(
            name in self.facts
            for name in ("spatial_shapes", "pixel_position_ids", "image_position_ids", "target_sizes")
        ):
            yield from self.patches()
        if "aspect_ratio_ids" in self.facts:
            yield self.tiles()
        if self.name.endswith("videos"):
            yield from self.videos()
        yield from self.plain(self.size)
        yield from self.plain(self.size, sizes=True)
        yield from self.several()
        yield from self.videos()
        for side in (64, 224):
            yield from self.plain((side, side))
        for channels in {1, 3} - {self.channels}:
            self.channels = channels
            yield from self.plain(self.size)

    def select(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self.facts}

    def plain(self, size: tuple[int, int], sizes: bool = False) -> Iterator[dict[str, Any]]:
        height, width = size
        facts = self.facts
        if sizes and "image_sizes" not in facts:
            return
        size_inputs = {"image_sizes": torch.tensor([[height, width]] * BATCH, device=facts.device)} if sizes else {}
        yield self.select(
            {
                **size_inputs,
                str(self.name): facts.floats(BATCH, self.channels, height, width),
                "pixel_mask": facts.ones(BATCH, height, width),
                "high_res_pixel_values": facts.floats(
                    BATCH, 3, *pair(facts.find("image_size", among="high_res"), height)
                ),
            }
        )

    def several(self) -> Iterator[dict[str, Any]]:
        """Several images, or crops of one, per sample."""
        facts = self.facts
        height, width = self.size
        for number in (1, 2, 3, 5):
            yield self.select(
                {
                    str(self.name): facts.floats(BATCH, number, self.channels, height, width),
                    "pixel_attention_mask": facts.ones(BATCH, number, height, width).bool(),
                    "image_attention_mask": facts.ones(BATCH, 7, number),
                    "image_sizes": torch.tensor([[height, width]] * BATCH, device=facts.device),
                }
            )

    def videos(self) -> Iterator[dict[str, Any]]:
        tube = self.facts.number("tubelet_size", default=1)
        for frames in dict.fromkeys((self.frames, 2 * max(tube, self.temporal), 4)):
            clip = self.facts.floats(BATCH, frames, self.channels, *self.size)
            yield {str(self.name): clip}
            yield {str(self.name): clip.transpose(1, 2).contiguous()}

    def packed(self) -> Iterator[dict[str, Any]]:
        """The patches of all images in one sequence, with the grid of each image."""
        facts = self.facts
        name = "hidden_states" if "hidden_states" in facts else "pixel_values"
        if name not in facts:
            name = str(self.name)
        width = self.patch[0] * self.patch[1] * 3
        merge = 2 * max(self.merge, 2)
        sides = (
            [(merge, merge), (4 * merge, 2 * merge)]
            if facts.find("window_size", among=VISION) is None
            else [(4 * merge, 2 * merge)]
        )
        stem = first_width(facts)
        for height, breadth in sides:
            grid = torch.tensor([[1, height, breadth]] * BATCH, device=facts.device)
            count = BATCH * height * breadth
            for values in (
                facts.floats(count, width * self.temporal),
                facts.floats(count, width),
                facts.floats(count, 3, *self.patch),
                facts.floats(count, 3, self.temporal, *self.patch),
                *([facts.floats(count, stem)] if stem else []),
                facts.floats(1, count, width),
                facts.floats(1, count, 3, *self.patch),
                facts.floats(1, count, 3, self.temporal, *self.patch),
            ):
                yield self.select(
                    {
                        name: values,
                        "image_grid_thw": grid,
                        "grid_thw": grid,
                        "grid_hws": grid[:, 1:],
                        "image_grid_hw": grid[:, 1:],
                        "grid_hw": grid[:, 1:],
                        "merge_sizes": torch.tensor([self.merge] * BATCH, device=facts.device),
                        "image_merge_sizes": torch.tensor([self.merge] * BATCH, device=facts.device),
                        "images_per_sample": facts.ones(BATCH),
                    }
                )

    def patches(self) -> Iterator[dict[str, Any]]:
        """The patches of each image as a sequence, with their positions."""
        facts = self.facts
        side = 2 * max(2, self.merge, facts.number("pooling_kernel_size", among=VISION))
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1).expand(BATCH, -1, -1).to(facts.device)
        shapes = torch.tensor([[side, side]] * BATCH, device=facts.device)
        width = 3 * self.patch[0] * self.patch[1]
        strip = facts.floats(BATCH, 3, self.patch[0], side * side * self.patch[1])
        for values in (facts.floats(BATCH, side * side, width), strip, strip[:1].repeat(1, 1, 1, BATCH)):
            yield self.select(
                {
                    str(self.name): values,
                    "pixel_attention_mask": facts.ones(BATCH, side * side),
                    "patch_attention_mask": facts.ones(BATCH, side, side).bool(),
                    "spatial_shapes": shapes,
                    "target_sizes": shapes,
                    "pixel_position_ids": positions,
                    "image_position_ids": positions,
                }
            )

    def tiles(self) -> dict[str, Any]:
        facts = self.facts
        number = facts.number("max_num_tiles", default=2)
        return self.select(
            {
                str(self.name): facts.floats(BATCH, 1, number, self.channels, *self.size),
                "aspect_ratio_ids": facts.ones(BATCH, 1),
                "aspect_ratio_mask": facts.ones(BATCH, 1, number),
                "cross_attention_mask": facts.ones(BATCH, 7, 1, number),
            }
        )


def has_grid(facts: Facts) -> bool:
    return any(name in facts for name in (*GRIDS, "image_grid_hw", "grid_hws", "grid_hw"))


def first_width(facts: Facts) -> int | None:
    """The number of features of a patch, from the weight of the patch embedding."""
    for name, parameter in facts.module.named_parameters():
        if "patch_embed" in name and parameter.dim() >= 2:
            return int(parameter[0].numel())
    return next((int(parameter[0].numel()) for parameter in facts.module.parameters() if parameter.dim() >= 2), None)
