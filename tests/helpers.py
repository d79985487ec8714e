"""What the tests share: running a model, comparing outputs, choosing heads. Independent of the code under test."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.units import Site
from zoo import ZOO, Entry

TOLERANCE = 1e-5  # masked == removed, float32
MATTERS = 1e-3  # a reference that is nearer than this to the dense model proves nothing
SHARED = Path(__file__).resolve().parents[2] / "shared"
# Families whose attention transformers computes in one way only (Gemma 2: because of its soft capping).
EAGER_ONLY = ("deberta-v2", "deberta-v3", "mpnet", "bloom", "gemma2")
# Families whose attention code transformers generates from another one's here, or that differ in numbers only.
SAME_CODE = (
    *("roberta", "xlm-roberta", "camembert", "electra", "deberta-v3", "mt5", "marian"),
    *("llama", "llama-mqa", "mistral", "qwen2", "granite", "clip-text", "clip-vision", "siglip-vision"),
)
NO_NEURONS = ("all-attention",)  # families without feed-forward layers
# The families that `make test` runs: an encoder, fused and grouped projections, an encoder-decoder, images, and
# attention that does not go through transformers' interface. All others are marked slow.
REPRESENTATIVE = ("bert", "gpt2", "llama-gqa", "t5", "vit", "deberta-v2")
NAMES = {"tied": "tied-layers", "cross": "cross-attention", "gqa": "GQA"}

Tensors = dict[str, torch.Tensor]
Heads = list[tuple[int, int]]


def label(entry: Entry) -> str:
    """The name of a test case, with what is special about this family's attention."""
    tags = sorted(entry.tags & {"tied", "cross", "gqa", "fused", "interleaved", "measured", "conv1d"})
    if entry.kv_heads == 1:
        tags = ["MQA" if tag == "gqa" else tag for tag in tags]
    return "+".join([entry.name, *(NAMES.get(tag, tag) for tag in tags)])


def families(*, having: Iterable[str] = (), without: Iterable[str] = ()) -> list[Any]:
    """The zoo as test parameters: entries with at least one of the tags `having`, but not the names `without`. Families
    that are not representative are marked slow."""
    having, without = set(having), set(without)
    return [
        pytest.param(entry, id=label(entry), marks=[] if entry.name in REPRESENTATIVE else pytest.mark.slow)
        for entry in ZOO.values()
        if (not having or entry.tags & having) and entry.name not in without
    ]


def with_attention(model: Any, attention: str) -> Any:
    """The model under this attention backend; it must have taken effect."""
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    return model


def outputs(model: Any, batch: Mapping[str, Any], **options: Any) -> Tensors:
    """Every floating-point output of the model (logits, hidden states, embeddings), without gradients."""
    with torch.no_grad():
        result = model(**batch, **options)
    actual = {
        name: value for name, value in result.items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    assert actual, "the model gave nothing to compare"
    return actual


def gated_outputs(model: Any, batch: Mapping[str, Any], gates: torch.Tensor, **options: Any) -> Tensors:
    with headprune.gated(model, gates):
        return outputs(model, batch, **options)


def difference(one: Tensors, other: Tensors) -> float:
    """The largest difference of two sets of outputs; infinite where one of them is not finite."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape, name
        gap = (tensor.double() - other[name].double()).abs().max().item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def identical(one: Tensors, other: Tensors) -> bool:
    """Bit for bit the same."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def real_tokens(actual: Tensors, batch: Mapping[str, torch.Tensor]) -> Tensors:
    """Outputs at the positions that are not padding: what a model says about padding means nothing."""
    masks = [batch[name] for name in ("attention_mask", "decoder_attention_mask") if name in batch]
    result = {}
    for name, tensor in actual.items():
        mask = next((mask for mask in masks if tensor.shape[:2] == mask.shape), None)
        result[name] = tensor if mask is None else tensor[mask.bool()]
    return result


def gates_without(sites: Sequence[Site], heads: Iterable[tuple[int, int]]) -> torch.Tensor:
    gates = torch.ones(len(sites), max(site.original_heads for site in sites))
    for head in heads:
        gates[head] = 0.0
    return gates


def flat(units: Iterable[Iterable[tuple[int, int]]]) -> Heads:
    return [tuple(head) for unit in units for head in unit]


def all_units(sites: Sequence[Site]) -> list[Any]:
    return [unit for site in sites for unit in site.units()]


def some_heads(sites: Sequence[Site], seed: int = 0) -> Heads:
    """About half of the units of every site, so that every site is sliced and none is empty; where a site has one unit
    only (MQA), the last site."""
    rng = random.Random(seed)
    chosen = [rng.sample(site.units(), len(site.units()) // 2) for site in sites]
    return flat(unit for units in chosen for unit in units) or flat(sites[-1].units())


def first_site_and_some(sites: Sequence[Site], seed: int = 0) -> Heads:
    """The whole first site, and about half of what the other sites have."""
    return flat(sites[0].units()) + (some_heads(sites[1:], seed) if len(sites) > 1 else [])


VARIANTS = {"some-heads": some_heads, "first-site-gone": first_site_and_some}


def pruned(entry: Entry, variant: str = "some-heads") -> tuple[Any, Heads]:
    """A fresh model of this family without the heads of the variant, and those heads."""
    model = entry.build()
    heads = VARIANTS[variant](headprune.resolve(model))
    headprune.remove(model, heads)
    return model, heads


def telling_variant(entry: Entry) -> str:
    """The variant that has sliced sites as well as a site that is gone, where there is more than one site."""
    return "some-heads" if entry.sites == 1 else "first-site-gone"


def kept_heads(model: Any) -> list[tuple[int, ...]]:
    return [site.kept for site in headprune.resolve(model)]


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that a refused call must not touch: which parameters, their values, the config, classes and hooks."""
    parameters = dict(model.named_parameters())
    return {
        "identities": {name: id(parameter) for name, parameter in parameters.items()},
        "values": {name: parameter.detach().clone() for name, parameter in parameters.items()},
        "grad": {name: parameter.requires_grad for name, parameter in parameters.items()},
        "config": model.config.to_dict() if hasattr(model, "config") else None,
        "classes": [type(module) for module in model.modules()],
        "numbers": [
            {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str, list))}
            for module in model.modules()
        ],
        "hooks": hook_count(model),
    }


def assert_unchanged(model: torch.nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    for what in ("identities", "grad", "config", "classes", "numbers", "hooks"):
        assert after[what] == before[what], what
    assert all(torch.equal(before["values"][name], value) for name, value in after["values"].items())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, hidden ones too."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def word_tokenizer() -> Any:
    """A tokenizer of five words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(["[UNK]", "[PAD]", "heads", "may", "go"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
