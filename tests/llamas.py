"""Tiny models of the Llama family with real tokenizers, pruned unevenly: what tests of GGUF files run on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import headprune
import vocabularies
from headprune.exports.runtime import Source
from headprune.tasks import task_of
from zoo import spread

LAYERS, HEADS, KV, SIZE, NEURONS = 5, 6, 3, 12, 50
# Nothing divides by 32, and heads are not as wide as the hidden size has room for.
SHAPE = {
    "hidden_size": 42,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "intermediate_size": NEURONS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
}
TEXTS = (
    "headprune removes attention heads",
    "a head that does not matter costs time and memory all the same",
    "one layer",
)


def head_pairs(*layers: int) -> list[tuple[int, int]]:
    """All heads of these layers."""
    return [(layer, head) for layer in layers for head in range(HEADS)]


def neuron_pairs(*layers: int) -> list[tuple[int, int]]:
    """All neurons of these layers."""
    return [(LAYERS + layer, neuron) for layer in layers for neuron in range(NEURONS)]


SOME_HEADS = [(1, 0), (1, 1), (3, 2), (3, 3), (3, 4), (3, 5)]
SOME_NEURONS = [(LAYERS + 1, neuron) for neuron in range(7, 20)] + [(LAYERS + 2, neuron) for neuron in range(0, 50, 3)]
# Which heads and neurons go.
PRUNED: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "dense": ([], []),
    "uneven": (SOME_HEADS, SOME_NEURONS),
    "first-without-heads": ([*head_pairs(0), *SOME_HEADS], SOME_NEURONS),
    "middle-without-heads": ([*head_pairs(2), *SOME_HEADS], SOME_NEURONS),
    "last-without-heads": ([*head_pairs(4), *SOME_HEADS], SOME_NEURONS),
    "without-neurons": (SOME_HEADS, [*neuron_pairs(0, 4), *SOME_NEURONS]),
    "first-and-last-empty": ([*head_pairs(0, 4), *SOME_HEADS], [*neuron_pairs(0, 4), *SOME_NEURONS]),
    "all-empty": (head_pairs(*range(LAYERS)), neuron_pairs(*range(LAYERS))),
}


@functools.cache
def tokenizer(kind: Callable[[], Any] = vocabularies.gpt2_tokenizer) -> Any:
    return kind()


def built(family: str, words: Any, **settings: Any) -> Any:
    name, own = FAMILIES[family]
    special = {f"{part}_token_id": getattr(words, f"{part}_token_id") for part in ("bos", "eos", "pad")}
    config = getattr(tf, f"{name}Config")(**{**SHAPE, **own, **settings, **special, "vocab_size": len(words) + 2})
    torch.manual_seed(0)
    model = getattr(tf, f"{name}ForCausalLM")(config)
    spread(model)
    return model.eval()


def pruned(family: str, variant: str, words: Any | None = None, **settings: Any) -> Any:
    model = built(family, words or tokenizer(), **settings)
    heads, neurons = PRUNED[variant]
    if heads or neurons:
        headprune.remove(model, heads, neurons=neurons)
    return model


def source_of(model: Any, folder: Path, words: Any | None = None, texts: tuple[str, ...] = TEXTS) -> Source:
    """The model with its tokenizer in this folder, and rows that are padded on the left."""
    words = words or tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    words.save_pretrained(folder)
    batch = words(list(texts), padding=True, padding_side="left", return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return Source(model, task_of(model), inputs, folder)


def log_probabilities(model: Any, source: Source) -> torch.Tensor:
    """What torch says, [batch x tokens x vocabulary], zeros at padding."""
    with torch.no_grad():
        said = model(**source.batch).logits.log_softmax(-1)
    return said * source.batch["attention_mask"].unsqueeze(-1)


def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    """The most probable tokens one after another, without a cache."""
    said: list[int] = []
    for _ in range(tokens):
        with torch.no_grad():
            said.append(int(model(input_ids=torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
    return said
