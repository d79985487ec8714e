"""Attention in blocks of queries: the same numbers as from whole maps, whatever a family's attention does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import headprune
from headprune.hooks import attention_blocks
from headprune.hooks.attention_blocks import Attention
from headprune.measure.savings import _TensorMeter
from helpers import with_attention
from score_helpers import labelled
from zoo import VOCAB, ZOO

CRITERIA = ["entropy(variant=A)", "entropy(variant=B,epsilon=0.01)", "entropy(epsilon=0.01)", "deficit"]
WHOLE = 1 << 62
TOLERANCE = 1e-5

Batch = dict[str, torch.Tensor]


@contextmanager
def blocks(block: int, fewest: int = 4) -> Iterator[list[int]]:
    """Blocks of so many bytes and at least so many queries; gives the number of queries of each block that is made."""
    made: list[int] = []
    part = Attention.part

    def counted(self: Attention, first: int, end: int) -> Any:
        made.append(end - first)
        return part(self, first, end)

    with (
        mock.patch.object(attention_blocks, "BLOCK", block),
        mock.patch.object(attention_blocks, "MIN_QUERIES", fewest),
        mock.patch.dict(attention_blocks._independent, clear=True),
        mock.patch.object(Attention, "part", counted),
    ):
        yield made


def both_ways(model: Any, batch: Batch) -> tuple[Any, Any, list[int]]:
    with blocks(WHOLE) as whole:
        direct = headprune.score(model, [batch], criteria=CRITERIA)
    with blocks(1) as made:
        actual = headprune.score(model, [batch], criteria=CRITERIA)
    assert all(queries > 4 for queries in whole)  # none where eager attention returns its map at once
    return direct, actual, made


def assert_same(direct: Any, actual: Any) -> None:
    for criterion in CRITERIA:  # a deficit is the small difference of numbers about 1, which have float32's rounding
        one, other = direct.scores[criterion], actual.scores[criterion]
        assert torch.allclose(one, other, rtol=TOLERANCE, atol=1e-6 if criterion == "deficit" else 0), criterion
    assert torch.equal(direct.zero_probabilities, actual.zero_probabilities)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "albert", "llama-gqa", "mistral", "t5", "bart", "modernbert"])
def test_blocks_give_the_scores_of_whole_maps(name: str, attention: str) -> None:
    """Padded, causal, sliding, grouped, with a bias by position, across two texts, and a site that is applied often."""
    direct, actual, made = both_ways(with_attention(ZOO[name].build(), attention), labelled(ZOO[name], 0))
    assert max(made) <= 4  # in blocks, and in the trial before them
    assert_same(direct, actual)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_caps_and_sinks_stay_the_familys_own(name: str) -> None:
    model, batch = SPECIAL[name](), labelled(ZOO["llama"], 0)
    direct, actual, made = both_ways(model, batch)
    assert max(made) <= 4
    assert_same(direct, actual)


def gpt_oss() -> Any:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        pad_token_id=1,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
    return model


SPECIAL: dict[str, Callable[[], Any]] = {"gemma2": ZOO["gemma2"].build, "gpt-oss": gpt_oss}


def test_without_padding_the_causal_mask_is_made_by_block() -> None:
    """No mask comes from the model: the rows of each block say what they may look at."""
    ids = torch.randint(5, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    direct, actual, made = both_ways(ZOO["llama-gqa"].build(), {"input_ids": ids})
    assert max(made) <= 4
    assert_same(direct, actual)


def test_eager_attention_without_gradients_runs_once_and_gives_the_same_output() -> None:
    model = with_attention(ZOO["gemma2"].build(), "eager")
    batch = labelled(ZOO["gemma2"], 0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        expected = model(**inputs).logits
        with blocks(1) as made, rows_shown(model) as shown:
            logits = model(**inputs).logits
    real = batch["attention_mask"].bool()
    assert torch.allclose(logits[real], expected[real], rtol=0, atol=1e-5 * float(expected.abs().max()))
    queries = batch["input_ids"].shape[1]
    assert sum(shown) == queries * len(headprune.resolve(model))
    assert len(made) == len(shown) + 2  # the trial makes two


@contextmanager
def rows_shown(model: Any) -> Iterator[list[int]]:
    from headprune.hooks.attention_probabilities import probabilities

    shown: list[int] = []
    sites = headprune.resolve(model)
    with probabilities(model, sites, lambda _, block: shown.append(block.probabilities.shape[-2])):
        yield shown


@pytest.mark.parametrize("kind", ["across rows", "by place", "an option with rows"])
def test_a_function_whose_rows_do_not_stand_alone_runs_whole(kind: str) -> None:
    """Each of them gives another map, or none, for some of the queries than for all."""
    query, key, value = (torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    own = torch.randn(1, 2, 12, 12)

    def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, own: Any = None, **_: Any) -> Any:
        scores = query @ key.transpose(-1, -2)
        if kind == "across rows":
            scores = scores - scores.mean(-2, keepdim=True)
        elif kind == "by place":
            scores = scores + torch.arange(query.shape[2])[:, None] * torch.arange(key.shape[2])
        else:
            scores = scores + own
        weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    module = torch.nn.Module()
    module.is_causal = False
    call = Attention(eager, module, query, key, value, None, {"own": own} if kind == "an option with rows" else {})
    with blocks(1):
        (only,) = call.parts(whole=False)
    assert torch.equal(only[1].probabilities, eager(module, query, key, value, None, own)[1])


def test_memory_of_long_texts_is_that_of_the_blocks() -> None:
    """At 1,024 tokens with blocks of a sixteenth, as 4,096 tokens have sixteen times as large maps."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(5, VOCAB, (1, 1024))
    peaks = []
    for block in (WHOLE, attention_blocks.BLOCK // 16):
        with blocks(block, fewest=32), _TensorMeter() as meter:
            headprune.score(model, [{"input_ids": ids}], criterion="entropy")
        peaks.append(meter.peak)
    assert peaks[1] <= peaks[0] / 8
