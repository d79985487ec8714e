"""The four models of arXiv 2602.04491 as data: configurations, heads removed, and published accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from headprune.errors import HeadpruneError

PAPER = "arXiv 2602.04491"


class ReproductionError(HeadpruneError):
    """A file or folder that a reproduction needs is missing or invalid."""


@dataclass(frozen=True)
class PaperModel:
    """One of the paper's models. `published` is its name in the authors' files, `key` its name here."""

    key: str
    title: str
    published: str
    family: str
    settings: Mapping[str, Any]
    sites: int
    heads_per_site: int
    applications: int  # uses of each site in a forward pass; the authors' curves count a head once per use
    removed: int
    accuracy: tuple[float, float]  # per cent, dense and pruned: published numbers, not measured here

    @property
    def heads(self) -> int:
        return self.sites * self.heads_per_site

    def build(self) -> PreTrainedModel:
        """The model on the meta device, which has shapes and no weights."""
        config = getattr(transformers, f"{self.family}Config")(**self.settings)
        with torch.device("meta"):
            return getattr(transformers, f"{self.family}ForSequenceClassification")(config)


MODELS = (
    PaperModel(
        key="bert",
        title="BERT-base",
        published="BERT",
        family="Bert",
        settings={"vocab_size": 21128, "num_labels": 3},
        sites=12,
        heads_per_site=12,
        applications=1,
        removed=117,
        accuracy=(96.82, 90.08),
    ),
    PaperModel(
        key="albert",
        title="ALBERT-base-v2",
        published="ALBERT",
        family="Albert",
        settings={
            "vocab_size": 30000,
            "embedding_size": 128,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "num_labels": 3,
        },
        sites=1,
        heads_per_site=12,
        applications=12,
        removed=3,
        accuracy=(84.48, 77.76),
    ),
    PaperModel(
        key="roberta",
        title="RoBERTa-large",
        published="ROBERTA",
        family="Roberta",
        settings={
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_labels": 2,
        },
        sites=24,
        heads_per_site=16,
        applications=1,
        removed=245,
        accuracy=(87.80, 86.40),
    ),
    PaperModel(
        key="xlm-roberta",
        title="XLM-RoBERTa-base",
        published="XLM_ROBERTA",
        family="XLMRoberta",
        settings={"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 20},
        sites=12,
        heads_per_site=12,
        applications=1,
        removed=105,
        accuracy=(99.73, 90.97),
    ),
)


def find_model(key: str) -> PaperModel:
    for model in MODELS:
        if model.key == key:
            return model
    raise ReproductionError(
        f"There is no model {key!r} in the paper; choose one of {', '.join(m.key for m in MODELS)}."
    )
