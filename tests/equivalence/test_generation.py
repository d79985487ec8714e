"""Pruned decoders and encoder-decoders generate what the gated dense model generates, with every kind of KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from helpers import SAME_CODE, VARIANTS, Heads, families, flat, gates_without, pruned
from zoo import ZOO, Entry

GREEDY = {
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


def prompt(entry: Entry) -> dict[str, torch.Tensor]:
    return {name: value for name, value in entry.batch(2).items() if not name.startswith("decoder_")}


def check(entry: Entry, model: Any, gone: Heads) -> None:
    dense, inputs = entry.build(), prompt(entry)
    plain = dense.generate(**inputs, **GREEDY)
    with headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        expected = dense.generate(**inputs, **GREEDY)
    wanted = torch.stack(expected.logits)
    assert (wanted - torch.stack(plain.logits)).abs().max() > 1e-3
    for name, options in CACHES.items():
        got = model.generate(**inputs, **GREEDY, **options)
        assert torch.equal(got.sequences, expected.sequences), name
        assert (torch.stack(got.logits) - wanted).abs().max() <= 1e-4, name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families(having=["decoder", "seq2seq"], without=SAME_CODE))
def test_every_cache_gives_what_the_gated_model_gives(entry: Entry, variant: str) -> None:
    check(entry, *pruned(entry, variant))


@pytest.mark.parametrize("entry", families(having=["decoder"], without=SAME_CODE))
def test_without_any_heads(entry: Entry) -> None:
    """Nothing attends any more, and yet the caches have to count tokens for the positions."""
    model = entry.build()
    gone = flat(unit for site in headprune.resolve(model) for unit in site.units())
    headprune.remove(model, gone)
    check(entry, model, gone)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_without_cross_attention_in_the_first_decoder_layer(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    cross = next(site for site in headprune.resolve(model) if site.attention == "cross")
    gone = flat(cross.units())
    headprune.remove(model, gone)
    check(entry, model, gone)


def test_beam_search_reorders_the_cache_of_an_empty_site() -> None:
    entry = ZOO["llama-gqa"]
    model, gone = pruned(entry, "first-site-gone")
    dense, options = entry.build(), {**GREEDY, "num_beams": 3, "output_logits": False}
    with headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        expected = dense.generate(**prompt(entry), **options)
    assert torch.equal(model.generate(**prompt(entry), **options).sequences, expected.sequences)


def test_whisper_without_cross_attention_in_the_first_decoder_layer() -> None:
    """Whisper generates through code of its own."""
    entry = ZOO["whisper"]
    model, dense, inputs = entry.build(), entry.build(), prompt(entry)
    gone = flat(next(site for site in headprune.resolve(model) if site.attention == "cross").units())
    headprune.remove(model, gone)
    options = {"max_new_tokens": 6, "do_sample": False}
    with headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        expected = dense.generate(**inputs, **options)
    for name, cache in CACHES.items():
        assert torch.equal(model.generate(**inputs, **options, **cache), expected), name
