"""Synthetic texts, and a tokenizer with one id per word: for random models that need no network."""

from __future__ import annotations

import random
from typing import Any

SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


def word(number: int) -> str:
    return f"w{number}"


def sentences(count: int, seed: int, *, words: int = 43, shortest: int = 3, longest: int = 9) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(word(rng.randrange(words)) for _ in range(rng.randint(shortest, longest))) for _ in range(count)]


def tokenizer(words: int = 43) -> Any:
    """Texts start with [CLS], which is 0, and end with [SEP], which is 2; [PAD] is 1."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {name: number for number, name in enumerate([*SPECIAL, *map(word, range(words))])}
    inner = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(names, SPECIAL, strict=True)),
    )
