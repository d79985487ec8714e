"""Small random models of every kind and type that transformers builds, with random samples, for tests/properties.py."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.discovery.twin import randomise, small_config
from headprune.units import all_sites

MAPPINGS = {
    "classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}
SAMPLES, LONGEST, FIRST_TOKEN, PADDING, START = 5, 9, 5, 1, 2
IGNORED = -100  # the label of what is not predicted, as in transformers
WIDTHS = (128, 64, 56, 32, 96, 224)  # of images after that of the config, until a model takes one
# Sums over a few hundred float64 numbers; some models take steps in float32 whatever their weights are.
EXACT = {"rtol": 1e-5, "atol": 1e-7}
SIDES, FORMS = ("right", "left"), ("tokens", "allowed", "added")

Batch = dict[str, torch.Tensor]


def model_types(kind: str) -> list[str]:
    """The model types with a class of this kind; speech models that transformers lists as sequence-to-sequence, but
    that are a decoder with an encoder in front of it, have no second text."""
    mapping = getattr(modeling_auto, MAPPINGS[kind])
    names = sorted(name for name, config in CONFIG_MAPPING.items() if config in mapping)
    return names if kind != "seq2seq" else [name for name in names if CONFIG_MAPPING[name]().is_encoder_decoder]


@dataclass(frozen=True)
class Case:
    """A model, and what its samples are made of. This class is for texts; the others change what a batch holds."""

    model: Any
    kind: str
    texts: list[torch.Tensor]  # token ids without padding
    labels: torch.Tensor
    seed: int

    def batch(
        self, rows: Sequence[int], length: int | None = None, *, side: str = "right", form: str = "tokens"
    ) -> Batch:
        """These samples, padded on this side to the longest, or to this length, with a mask in one of FORMS."""
        ids, mask = padded([self.texts[row] for row in rows], length, side)
        # The first token has no prediction; without this, that at padding in front of it would count.
        predicted = (mask == 1) & (mask.cumsum(-1) > 1)
        labels = self.labels[list(rows)] if self.kind == "classifier" else ids.masked_fill(~predicted, IGNORED)
        batch = {"input_ids": ids, "attention_mask": self._in_form(mask, form), "labels": labels}
        if (side, form) != ("right", "tokens") and "position_ids" in inspect.signature(self.model.forward).parameters:
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        return batch

    def _in_form(self, mask: torch.Tensor, form: str) -> torch.Tensor:
        if form == "tokens":
            return mask
        tokens = mask.shape[1]
        allowed = mask.bool()[:, None, None, :].expand(-1, 1, tokens, tokens)
        if self.kind == "decoder":
            allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # a softmax over no keys is NaN
        return allowed if form == "allowed" else torch.zeros(allowed.shape).double().masked_fill(~allowed, -1e9)

    def batches(self, size: int = 2, length: int | None = None, **options: str) -> list[Batch]:
        rows = range(SAMPLES)
        return [self.batch(rows[start : start + size], length, **options) for start in range(0, SAMPLES, size)]

    def real(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The positions with an output that counts, of a batch whose mask is one of tokens."""
        return batch["attention_mask"].bool()

    def outputs(self, batch: Mapping[str, torch.Tensor], model: Any = None) -> torch.Tensor:
        """The logits of the model, or of this one, that count."""
        return logits(self.model if model is None else model, batch, self.real(batch))

    def takes(self, side: str, form: str) -> bool:
        """Whether the model itself says the same of these batches: positions or masks of some are of one kind only."""
        rows = range(SAMPLES)
        real = [self.real(self.batch(rows, side=one)) for one in ("right", side)]
        try:
            expected, actual = (
                logits(self.model, batch, mask)
                for batch, mask in zip((self.batch(rows), self.batch(rows, side=side, form=form)), real, strict=True)
            )
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return torch.allclose(actual, expected, **EXACT)

    def paddings(self) -> dict[str, list[Batch]]:
        """The same samples with more padding, on another side, or with a mask of another form, where the model itself
        gives the same outputs."""
        variants = [(side, form) for side in SIDES for form in FORMS if self.takes(side, form)]
        named = {f"{side} padding, mask of {form}": self.batches(side=side, form=form) for side, form in variants}
        return {"more padding": self.batches(length=LONGEST + 3), **named}

    def units(self, share: float = 0.5, kind: str = "heads") -> list[tuple[int, int]]:
        """Heads or neurons drawn at random, in whole units; every site keeps one unit."""
        draw = random.Random(self.seed)
        chosen = []
        for site in all_sites(self.model):
            units = [] if site.obstacle or site.kind != kind else site.units()
            chosen += [tuple(head) for unit in draw.sample(units, int(share * len(units))) for head in unit]
        return chosen


@dataclass(frozen=True)
class TextToText(Case):
    """A text, and a second one of another length that is predicted from it."""

    targets: list[torch.Tensor] = field(default_factory=list)

    def batch(
        self, rows: Sequence[int], length: int | None = None, *, side: str = "right", form: str = "tokens"
    ) -> Batch:
        ids, mask = padded([self.texts[row] for row in rows], length, side)
        targets, predicted = padded([self.targets[row] for row in rows], length)
        before = torch.cat([torch.full((len(rows), 1), START), targets[:, :-1]], dim=1)
        mask = mask if form == "tokens" else self._in_form(mask, form)[:, :, :1]  # also the mask of cross-attention
        labels = targets.masked_fill(predicted == 0, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": before, "labels": labels}

    def real(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["labels"] != IGNORED

    def paddings(self) -> dict[str, list[Batch]]:
        """Also with padding of the second text alone, and with labels alone, from which the model makes its inputs."""
        named = super().paddings()
        longer = self.batches()
        for batch in longer:
            width = (0, 3)
            batch["decoder_input_ids"] = torch.nn.functional.pad(batch["decoder_input_ids"], width, value=PADDING)
            batch["labels"] = torch.nn.functional.pad(batch["labels"], width, value=IGNORED)
        named["a longer second text"] = longer
        alone = [{name: value for name, value in batch.items() if name != "decoder_input_ids"} for batch in longer]
        rows = self.batch(range(SAMPLES))
        try:
            same = torch.allclose(self.model(**without(rows, "decoder_input_ids")).loss, self.model(**rows).loss)
        except (RuntimeError, ValueError, TypeError):  # some need both
            same = False
        return {**named, "labels alone": alone} if same else named


@dataclass(frozen=True)
class Pictures(Case):
    """Images of random pixels, which have no padding."""

    pixels: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def batch(self, rows: Sequence[int], length: int | None = None, **options: str) -> Batch:
        return {"pixel_values": self.pixels[list(rows)], "labels": self.labels[list(rows)]}

    def real(self, batch: Mapping[str, torch.Tensor]) -> None:
        return None

    def paddings(self) -> dict[str, list[Batch]]:
        return {}


def padded(
    texts: Sequence[torch.Tensor], length: int | None = None, side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts as one tensor, and the mask of their tokens."""
    length = length or max(len(text) for text in texts)
    ids = torch.full((len(texts), length), PADDING)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(length - len(text), length)
        ids[row, place], mask[row, place] = text, 1
    return ids, mask


def without(batch: Mapping[str, torch.Tensor], *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


@torch.no_grad()
def logits(model: Any, batch: Mapping[str, torch.Tensor], real: torch.Tensor | None = None) -> torch.Tensor:
    """Logits, where `real` tells which positions have one that counts."""
    values = model(**without(batch, "labels")).logits
    return values[real] if real is not None and values.dim() == 3 else values


def build_case(kind: str, model_type: str, seed: int) -> Case:
    config = small_config(CONFIG_MAPPING[model_type](), keep_heads=False, depth=2)
    config.num_labels, config.pad_token_id = 3, PADDING
    config.get_text_config().pad_token_id = PADDING
    if kind == "seq2seq":
        config.decoder_start_token_id = START
    torch.manual_seed(seed)
    classes = getattr(modeling_auto, MAPPINGS[kind])[type(config)]
    model = (classes[0] if isinstance(classes, tuple) else classes)(config).eval().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    randomise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    if kind == "image":
        labels = torch.randint(3, (SAMPLES,), generator=draw)
        return Pictures(model, kind, [], labels, seed, pixels=images(model, draw))
    words = config.get_text_config().vocab_size
    texts = random_texts(words, draw)
    labels = torch.randint(3, (SAMPLES,), generator=draw)
    if kind == "seq2seq":
        return TextToText(model, kind, texts, labels, seed, targets=random_texts(words, draw))
    return Case(model, kind, texts, labels, seed)


def random_texts(words: int, draw: torch.Generator) -> list[torch.Tensor]:
    lengths = torch.randint(3, LONGEST + 1, (SAMPLES,), generator=draw).tolist()
    return [torch.randint(FIRST_TOKEN, words, (length,), generator=draw) for length in lengths]


def images(model: Any, draw: torch.Generator) -> torch.Tensor:
    """Images of the first of WIDTHS that the model takes; some only say so by an error."""
    channels = getattr(model.config, "num_channels", 3)
    own = getattr(model.config, "image_size", None)
    for width in (*([own] if isinstance(own, int) else []), *WIDTHS):
        # In float32, so that a model in float32 gets the same samples: some scores have seeds made of their content.
        pixels = torch.randn(SAMPLES, channels, width, width, generator=draw).double()
        try:
            logits(copy.deepcopy(model), {"pixel_values": pixels})  # Swin narrows its windows to the first image
        except (RuntimeError, ValueError, TypeError):
            continue
        return pixels
    raise ValueError(f"no image of {', '.join(map(str, WIDTHS))} pixels fits")
