"""Dummy inputs of a model: shapes to count FLOPs with, and random batches to time it on or to compare two programs
with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating

TEXT = 128  # tokens by default
SECONDS, RATE = 10, 16_000  # of raw audio by default
CONTENT = (
    *("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features"),
    *("decoder_input_ids", "encoder_hidden_states", "bbox", "token_type_ids"),
)

Inputs = dict[str, torch.Tensor]
CHOICES = 2  # of a question with several answers


def default_tokens(model: PreTrainedModel) -> int:
    """A sequence length to count with: the patches of an image and its class token, the frames of a recording, or up to
    128 tokens of text."""
    config = model.config
    if model.main_input_name in ("input_features", "input_values"):
        return _frames(config) or TEXT
    patches = _patches(config) if model.main_input_name == "pixel_values" else 0
    return patches + 1 if patches else _text_length(config)


def image_tokens(model: PreTrainedModel) -> int | None:
    """The same for the image tower of a model; None where its config has no image size."""
    patches = _patches(getattr(model.config, "vision_config", None) or model.config)
    return patches + 1 if patches else None


def example_inputs(model: PreTrainedModel, tokens: int | None) -> Iterator[Inputs]:
    """Inputs that the model may run on, on the meta device, the most complete first."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    length = _text_length(config) if tokens is None else tokens
    text: Inputs = {"input_ids": _ids(length)} if "input_ids" in parameters else {}
    image = _image(getattr(config, "vision_config", None) or config) if "pixel_values" in parameters else {}
    decoder: Inputs = {"decoder_input_ids": _ids(length)} if config.is_encoder_decoder else {}
    audio = _audio(model.main_input_name, config)
    if audio:
        yield {**audio, **decoder}
    if image:
        yield {**text, **image, **decoder}
    if text:
        yield {**text, **decoder}
        yield {name: ids.unsqueeze(1).expand(-1, CHOICES, -1) for name, ids in text.items()}  # multiple choice


def sample_shapes(model: PreTrainedModel, batch: Mapping[str, Any]) -> Iterator[Inputs]:
    """The shapes of one sample of a batch."""
    parameters = inspect.signature(model.forward).parameters
    inputs = {
        name: batch[name][:1].to("meta")
        for name in CONTENT
        if name in parameters and isinstance(batch.get(name), torch.Tensor)
    }
    labels = batch.get("labels")
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs and isinstance(labels, torch.Tensor):
        inputs["decoder_input_ids"] = _ids(labels.shape[-1])
    if inputs:
        yield inputs


def dummy_batch(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Any]:
    """The most complete batch of random inputs that the model runs on, the same ones every time."""
    reason = "it takes neither text, nor images, nor audio"
    for shapes in example_inputs(model, length):
        batch = _random_like(model, shapes, batch_size)
        try:
            with torch.no_grad(), evaluating(model):
                model(**batch)
            return batch
        except Exception as error:  # whatever a model raises on inputs that are not for it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    raise UnsupportedModelError(
        f"{type(model).__name__} does not run on dummy inputs of {length} tokens ({reason}); give a batch."
    )


def _random_like(model: PreTrainedModel, shapes: dict[str, torch.Tensor], batch_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    device, dtype = input_device(model), next(model.parameters()).dtype
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", None) or 2)
    batch: dict[str, Any] = {}
    for name, shape in shapes.items():
        size = (batch_size, *shape.shape[1:])
        if shape.is_floating_point():
            batch[name] = torch.randn(size, generator=generator).to(device, dtype)
        else:
            batch[name] = torch.randint(min(5, vocabulary - 1), vocabulary, size, generator=generator).to(device)
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in batch and "attention_mask" in parameters:
        mask = torch.ones_like(batch["input_ids"])
        if batch_size > 1:  # batches of texts are padded, and a mask takes time
            mask[-1, ..., -1] = 0
        batch["attention_mask"] = mask
    if "use_cache" in parameters:
        batch["use_cache"] = False
    return batch


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long, device="meta")


def _text_length(config: Any) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(TEXT, limit) if isinstance(limit, int) and limit > 0 else TEXT


def _pair(size: Any) -> tuple[int, int] | None:
    """Height and width from one number or from two."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, Iterable) and not isinstance(size, (str, Mapping)):
        numbers = list(size)
        if len(numbers) == 2 and all(isinstance(number, int) for number in numbers):
            return numbers[0], numbers[1]
    return None


def _patches(config: Any) -> int:
    image, patch = _pair(getattr(config, "image_size", None)), _pair(getattr(config, "patch_size", None))
    return (image[0] // patch[0]) * (image[1] // patch[1]) if image and patch and all(patch) else 0


def _image(config: Any) -> Inputs:
    size = _pair(getattr(config, "image_size", None))
    if size is None:
        return {}
    return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), *size, device="meta")}


def _audio(name: str, config: Any) -> Inputs:
    if name == "input_features":
        bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
        if bins and positions:  # Whisper's encoder halves the frames once
            return {name: torch.zeros(1, bins, 2 * positions, device="meta")}
    if name == "input_values":
        if getattr(config, "conv_stride", None):  # raw audio
            return {name: torch.zeros(1, SECONDS * RATE, device="meta")}
        bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
        if bins and frames:  # a spectrogram that is cut into patches
            return {name: torch.zeros(1, frames, bins, device="meta")}
    return {}


def _frames(config: Any) -> int:
    strides = getattr(config, "conv_stride", None)
    if strides:
        length = SECONDS * RATE
        for kernel, stride in zip(config.conv_kernel, strides, strict=True):
            length = (length - kernel) // stride + 1
        return length
    patch = _pair(getattr(config, "patch_size", None))
    if patch and getattr(config, "max_length", None) and getattr(config, "num_mel_bins", None):
        high = (config.num_mel_bins - patch[0]) // getattr(config, "frequency_stride", patch[0]) + 1
        long = (config.max_length - patch[1]) // getattr(config, "time_stride", patch[1]) + 1
        return high * long + 2  # two tokens for the whole recording
    return int(getattr(config, "max_source_positions", None) or 0)
