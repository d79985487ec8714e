"""The parts of a pass: contracting gradients, looking at probabilities one site at a time, counting zeros."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import headprune
from headprune.signals.block_norms_math import gram_is_cheaper, gram_matrix, squared_block_norms
from headprune.signals.entropy import generalised_entropies, largest_entropy, row_entropies
from oracles import SOFTMAX, softmax_replaced
from score_helpers import labelled, model_of
from zoo import VOCAB, ZOO, text_batch

# --- the exact fast form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_both_contractions_are_the_norm_of_the_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, features, heads, width = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(5))
    inputs = torch.randn(batch, tokens, features, generator=generator)
    deltas = torch.randn(batch, tokens, heads * width, generator=generator)
    expected = torch.zeros(batch, heads, dtype=torch.float64)
    for sample in range(batch):
        gradient = sum(torch.outer(deltas[sample, t], inputs[sample, t]).double() for t in range(tokens))
        for head in range(heads):
            expected[sample, head] = gradient[head * width : (head + 1) * width].square().sum()
    for gram in (None, gram_matrix(inputs)):
        actual = squared_block_norms(inputs, deltas, heads, gram)
        assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_gram_form_never_gives_the_root_of_a_negative_number() -> None:
    """Gradients that cancel over the tokens leave rounding errors of either sign."""
    inputs = torch.full((1, 64, 16), 1000.0)
    deltas = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    deltas -= deltas.mean(1, keepdim=True)
    assert (squared_block_norms(inputs, deltas, 2, gram_matrix(inputs)) >= 0).all()


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
@pytest.mark.parametrize("features", [24, 384, 768])
@pytest.mark.parametrize("shared_by", [1, 3])
def test_the_cheaper_form_is_the_one_with_fewer_multiplications(tokens: int, features: int, shared_by: int) -> None:
    """All `shared_by` projections of a site together, with as many rows each as features."""
    gram = tokens * tokens * features + shared_by * tokens * tokens * features
    gradient = shared_by * tokens * features * features
    assert gram_is_cheaper(tokens, features, features, shared_by) == (gram < gradient)


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "gpt-neox", "llama-gqa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_contracted_in_float32(name: str, dtype: torch.dtype) -> None:
    """From the very inputs and gradients of the half-precision pass, the norms are exact; contracted in half precision
    they would be off by a hundredth."""
    entry = ZOO[name]
    model, batch = entry.build().to(dtype).requires_grad_(False), text_batch(0)
    actual = headprune.score(model, [batch], criterion="gnorm").scores
    sites = headprune.resolve(model)
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def watch(path: str) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad:
                output.requires_grad_(True)
            output.retain_grad()
            seen.setdefault(path, []).append((args[0].detach(), output))

        return hook

    paths = {axis.module for site in sites for axis in site.roles.values()}
    handles = [model.get_submodule(path).register_forward_hook(watch(path)) for path in paths]
    logits = model(**batch).logits.float()
    if logits.dim() == 3:
        logits = logits * batch["attention_mask"][..., None]
    logits.flatten(1).norm(dim=1).sum().backward()
    for handle in handles:
        handle.remove()
    expected = torch.zeros(len(sites), entry.heads, dtype=torch.float64)
    for site in sites:
        for head in range(entry.heads):
            score = 1.0
            for role, axis in site.roles.items():
                rows = axis.indices([head if role == "q" else head // site.group])
                norms = []
                for sample in range(3):
                    gradient = sum(
                        output.grad[sample].double()[:, rows].T @ inputs[sample].double()
                        for inputs, output in seen[axis.module]
                    )
                    norms.append(float(gradient.norm()))
                score *= sum(norms) / 3
            expected[site.index, head] = score
    assert torch.allclose(actual, expected, rtol=1e-4, atol=0)


def test_sums_over_many_batches_lose_nothing() -> None:
    """Forty times the same batch has the score of one, to the precision of float64."""
    model, batch = model_of("bert", "dense"), labelled(ZOO["bert"], 0)
    for criterion in ("his", "gnorm", "entropy"):
        once = headprune.score(model, [batch], criterion=criterion).scores
        often = headprune.score(model, [batch] * 40, criterion=criterion).scores
        assert torch.allclose(once, often, rtol=1e-12, atol=0)


# --- attention probabilities ----------------------------------------------------------------------------------------


def test_entropy_of_rows_by_hand() -> None:
    certain, even = [1.0, 0.0, 0.0, 0.0], [0.25] * 4
    rows = torch.tensor([[[certain, even]]])
    valid = torch.tensor([[[[True, True, True, True], [True, True, True, True]]]])
    log4 = torch.tensor(4.0).log().item()
    assert row_entropies(rows, valid, "A", 1e-7).flatten().tolist() == pytest.approx([0.0, log4])
    assert row_entropies(rows, valid, "B", 0.01).flatten().tolist() == pytest.approx(
        [-torch.tensor(1.01).log().item(), -torch.tensor(0.26).log().item()]
    )
    small = -0.01 * torch.tensor(0.01).log().item()
    assert row_entropies(rows, valid, "C", 0.01).flatten().tolist() == pytest.approx(
        [-1.01 * torch.tensor(1.01).log().item() + 3 * small, -4 * 0.26 * torch.tensor(0.26).log().item()]
    )
    only_two = torch.tensor([[[[True, True, False, False]] * 2]])
    assert row_entropies(rows, only_two, "A", 0).flatten().tolist() == pytest.approx([0.0, log4 / 2])


def test_generalised_entropies_by_hand() -> None:
    rows = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]])
    valid = torch.ones(3, 4, dtype=torch.bool)
    assert generalised_entropies(rows, valid, "renyi", 2).tolist() == pytest.approx([math.log(8 / 3), math.log(4), 0])
    assert generalised_entropies(rows, valid, "tsallis", 2).tolist() == pytest.approx([1 - 3 / 8, 3 / 4, 0])
    roots = 0.5**0.5 + 2 * 0.25**0.5
    assert generalised_entropies(rows[:1], valid[:1], "renyi", 0.5).tolist() == pytest.approx([2 * math.log(roots)])
    assert generalised_entropies(rows[:1], valid[:1], "tsallis", 0.5).tolist() == pytest.approx([2 * (roots - 1)])
    padded = torch.tensor([[0.5, 0.5, math.nan, math.nan]])
    only_two = torch.tensor([[True, True, False, False]])
    assert generalised_entropies(padded, only_two, "tsallis", 2).tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("kind", ["renyi", "tsallis"])
def test_generalised_entropies_near_order_1_are_shannons(kind: str) -> None:
    """The difference is of the first order in the distance from 1, which rounding must not drown."""
    rows = torch.rand(50, 20, generator=torch.Generator().manual_seed(0)).softmax(-1)
    valid = torch.ones_like(rows, dtype=torch.bool)
    shannon = row_entropies(rows, valid, "A", 0)
    assert torch.equal(generalised_entropies(rows, valid, kind, 1), shannon)
    for order in (0.9999, 1.0001):
        assert torch.allclose(generalised_entropies(rows, valid, kind, order), shannon, atol=1e-3, rtol=0)


@pytest.mark.parametrize("order", [0.3, 1, 2.5])
@pytest.mark.parametrize("kind", ["renyi", "tsallis"])
def test_the_largest_entropy_is_that_of_an_even_row(kind: str, order: float) -> None:
    for keys in (1, 2, 7):
        even, valid = torch.full((keys,), 1 / keys, dtype=torch.float64), torch.ones(keys, dtype=torch.bool)
        actual = largest_entropy(torch.tensor(float(keys), dtype=torch.float64), kind, order)
        assert float(actual) == pytest.approx(float(generalised_entropies(even, valid, kind, order)), abs=1e-12)


def test_samples_of_one_token_say_nothing_about_heads() -> None:
    """Their only attention has no entropy, and its largest value, log 1, is 0 as well."""
    model, batch = model_of("bert", "dense"), labelled(ZOO["bert"], 0)
    single = {name: value[:1, :1] if value.dim() > 1 else value[:1] for name, value in batch.items()}
    names = ["hies(alpha=0.0)", "deficit"]
    for values in headprune.score(model, [single], criteria=names).scores.values():
        assert len(values[~values.isnan()].unique()) == 1
    alone, both = (headprune.score(model, data, criteria=names).scores for data in ([batch], [batch, single]))
    for name in names:
        assert torch.equal(alone[name].flatten().argsort(), both[name].flatten().argsort())


class Alive:
    """Counts attention maps that exist at once, by their memory: whoever holds it, Python or the autograd graph."""

    def __init__(self) -> None:
        self.maps: list[StorageWeakRef] = []
        self.most = 0

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        result = SOFTMAX(scores, dim=-1)
        self.maps.append(StorageWeakRef(result.untyped_storage()))
        self.most = max(self.most, sum(not ref.expired() for ref in self.maps))
        return result


@pytest.mark.parametrize("name", ["bert", "albert", "llama-gqa", "t5", "vit", "clip"])
@pytest.mark.parametrize("criteria", [["entropy", "deficit"], ["hies", "gnorm", "taylor"]])
def test_one_sites_probabilities_at_a_time_under_sdpa(name: str, criteria: list[str]) -> None:
    """Also with gradients: sdpa keeps no probabilities for the backward pass, and the probe must not either."""
    entry = ZOO[name]
    criteria = ["entropy", "gnorm"] if name == "clip" else criteria
    model = model_of(name, "dense")
    assert model.config._attn_implementation == "sdpa"
    alive = Alive()
    with softmax_replaced(alive):
        headprune.score(model, [labelled(entry, 0), labelled(entry, 5)], criteria=criteria)
    assert len(alive.maps) == 2 * sum(site.applications for site in headprune.resolve(model))
    assert alive.most == 1


@pytest.mark.parametrize("name", ["deberta-v2", "bloom", "mpnet"])
def test_no_more_maps_than_in_a_plain_forward_where_attention_is_the_familys_own_code(name: str) -> None:
    """BLOOM's own layers hold the map of a layer until the next one has made its own."""
    model, batch = model_of(name, "dense"), labelled(ZOO[name], 0)
    plain, scored = Alive(), Alive()
    with softmax_replaced(plain), torch.no_grad():
        model(**{key: value for key, value in batch.items() if key != "labels"})
    with softmax_replaced(scored):
        headprune.score(model, [batch], criterion="entropy")
    assert len(scored.maps) == 2 * 3  # the first batch runs once more, without hooks
    assert scored.most == plain.most < 3


def test_the_counter_of_live_maps_sees_what_autograd_keeps() -> None:
    """Eager attention with gradients keeps all maps for the backward pass, and no engine can help it."""
    model = ZOO["bert"].build()
    model.set_attn_implementation("eager")
    alive = Alive()
    with softmax_replaced(alive):
        headprune.score(model, [labelled(ZOO["bert"], 0)], criterion="gnorm")
    assert alive.most == 3


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_what_stands_in_the_padding_does_not_matter(name: str) -> None:
    entry = ZOO[name]
    batch = labelled(entry, 0)
    other = dict(batch)
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in batch:
            noise = torch.randint(5, VOCAB, batch[ids].shape, generator=torch.Generator().manual_seed(3))
            other[ids] = torch.where(batch[mask].bool(), batch[ids], noise)
            assert not torch.equal(other[ids], batch[ids])
    for criterion in ("entropy(epsilon=0.01)", "deficit", "gnorm", "gnorm(objective=loss)", "his"):
        one = headprune.score(model_of(name, "dense"), [batch], criterion=criterion).scores
        two = headprune.score(model_of(name, "dense"), [other], criterion=criterion).scores
        assert torch.allclose(one, two, rtol=1e-5, atol=0), criterion


def _saturated(name: str) -> Any:
    """Queries of site 1, heads 0 and 2, so large that most probabilities underflow to 0."""
    model = ZOO[name].build()
    site = headprune.resolve(model)[1]
    with torch.no_grad():
        weight = model.get_submodule(site.roles["q"].module).weight
        for head in (0, 2):
            weight[site.roles["q"].indices([head])] *= 400
    return model


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_zero_probabilities_are_counted_where_naive_entropy_gives_nan(name: str) -> None:
    """The NaN of a plain a * log(a), on each sample without padding, over the keys that a row may look at."""
    model = _saturated(name)
    batches = [text_batch(seed, left=name == "llama") for seed in (0, 5)]
    result = headprune.score(model, batches, criteria=["entropy(variant=A)", "entropy"])
    model.set_attn_implementation("eager")
    expected = torch.zeros(3, 4)
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            with torch.no_grad():
                maps = model(ids[mask.bool()][None], output_attentions=True).attentions
            for site, attention in enumerate(maps):
                naive = attention[0] * attention[0].log()
                visible = torch.ones_like(naive, dtype=torch.bool)
                expected[site] += (naive.isnan() & (visible.tril() if name == "llama" else visible)).sum(dim=(1, 2))
    assert result.zero_probabilities is not None
    assert result.zero_probabilities.tolist() == expected.tolist()
    assert (expected[1, [0, 2]] > 10).all()
    assert expected[0].sum() == 0
    assert all(scores.isfinite().all() for scores in result.scores.values())


def test_causal_zeros_are_not_counted_as_underflow() -> None:
    result = headprune.score(model_of("llama", "dense"), [labelled(ZOO["llama"], 0)], criterion="entropy")
    assert result.zero_probabilities is not None
    assert result.zero_probabilities.sum() == 0
