"""Resolves the task of a model from the Auto mappings of transformers; subclasses inherit it."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from torch import nn
from transformers.models.auto import modeling_auto

from headprune.errors import DataError
from headprune.tasks.classification import (
    PROBLEMS,
    AudioClassification,
    ImageClassification,
    MultipleChoice,
    SequenceClassification,
    VideoClassification,
)
from headprune.tasks.features import Features, Similarity
from headprune.tasks.spans import QuestionAnswering
from headprune.tasks.spec import TASKS, Task
from headprune.tasks.tokens import CausalLM, ImageTextToText, MaskedLM, Seq2SeqLM, SpeechCTC, TokenClassification

# The task of a class in one of the mappings of transformers. The first mapping with the class counts: BART is among the
# masked language models as well.
MAPPINGS: tuple[tuple[str, type[Task]], ...] = (
    ("SEQUENCE_CLASSIFICATION", SequenceClassification),
    ("TOKEN_CLASSIFICATION", TokenClassification),
    ("QUESTION_ANSWERING", QuestionAnswering),
    ("DOCUMENT_QUESTION_ANSWERING", QuestionAnswering),
    ("MULTIPLE_CHOICE", MultipleChoice),
    ("IMAGE_CLASSIFICATION", ImageClassification),
    ("VIDEO_CLASSIFICATION", VideoClassification),
    ("AUDIO_CLASSIFICATION", AudioClassification),
    ("AUDIO_FRAME_CLASSIFICATION", Features),
    ("CTC", SpeechCTC),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", Similarity),
    ("SPEECH_SEQ_2_SEQ", Seq2SeqLM),
    ("SEQ_TO_SEQ_CAUSAL_LM", Seq2SeqLM),
    ("IMAGE_TEXT_TO_TEXT", ImageTextToText),
    ("MULTIMODAL_LM", ImageTextToText),
    ("CAUSAL_LM", CausalLM),
    ("MASKED_LM", MaskedLM),
)


@functools.cache
def _by_class() -> dict[str, type[Task]]:
    tasks: dict[str, type[Task]] = {}
    for mapping, kind in MAPPINGS:
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        for name in names.values():
            for class_name in (name,) if isinstance(name, str) else name:
                tasks.setdefault(class_name, kind)
    return tasks


def task_of(model: nn.Module, name: str | None = None) -> Task:
    """The task of a model, from its class and its config, or the task of this name.

    A name is one of the table in the documentation, or a `problem_type` of transformers for classification models.
    """
    if name is None:
        return _kind(model)(model)
    if name in PROBLEMS:
        kind = _kind(model)
        if not issubclass(kind, SequenceClassification):
            kind = SequenceClassification
        return kind(model, name)
    for task_class in TASKS:
        if task_class.name == name:
            return task_class(model)
    choices = [*(kind.name for kind in TASKS), *PROBLEMS]
    matches = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {matches[0]!r}?" if matches else f"there are: {', '.join(choices)}."
    raise DataError(f"There is no task {name!r}; {hint}")


def _kind(model: nn.Module) -> type[Task]:
    tasks = _by_class()
    config: Any = getattr(model, "config", None)
    for ancestor in type(model).__mro__:
        kind = tasks.get(ancestor.__name__)
        if kind is not None:
            return _generation(kind, config)
    # A class in no mapping: the suffix of its name, as in transformers.
    for ending, kind in ENDINGS:
        if any(ancestor.__name__.endswith(ending) for ancestor in type(model).__mro__):
            return _generation(kind, config)
    return Features


def _generation(kind: type[Task], config: Any) -> type[Task]:
    """The task of a generative model: Seq2SeqLM for an encoder-decoder, ImageTextToText otherwise."""
    if issubclass(kind, (Seq2SeqLM, ImageTextToText)):
        if getattr(config, "is_encoder_decoder", False):
            return Seq2SeqLM
        return ImageTextToText
    return kind


ENDINGS: tuple[tuple[str, type[Task]], ...] = (
    ("ForSequenceClassification", SequenceClassification),
    ("ForTokenClassification", TokenClassification),
    ("ForQuestionAnswering", QuestionAnswering),
    ("ForMultipleChoice", MultipleChoice),
    ("ForImageClassification", ImageClassification),
    ("ForVideoClassification", VideoClassification),
    ("ForAudioClassification", AudioClassification),
    ("ForMaskedLM", MaskedLM),
    ("ForCausalLM", CausalLM),
    ("LMHeadModel", CausalLM),
    ("ForConditionalGeneration", Seq2SeqLM),
    ("ForCTC", SpeechCTC),
)
