"""The All-attention Transformer against loops over queries, keys and heads, and what transformers asks of a model."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import forked_python
import headprune
from headprune.measure.costs import flops, total_parameters, unit_costs, unit_parameters
from headprune.models import AllAttentionConfig, AllAttentionForCausalLM, AllAttentionModel
from headprune.units import all_sites, sites_of
from helpers import flat, outputs
from zoo import ALL_ATTENTION, ZOO, decoder_batch, spread

ENTRY = ZOO["all-attention"]
# Sums of a few hundred float64 numbers of about unit size, in another order.
EXACT = 1e-12


def double(norm: str = "post") -> Any:
    model = AllAttentionForCausalLM(AllAttentionConfig(**{**ALL_ATTENTION, "norm": norm}))
    spread(model)
    return model.eval().double()


# --- the layer, by loops ----------------------------------------------------------------------------------------------


def turned(vector: torch.Tensor, position: int, width: int) -> torch.Tensor:
    """Pairs (i, i + width / 2) of the first `width` numbers turned by position / 10000 ** (2 i / width)."""
    result = vector.clone()
    for pair in range(width // 2):
        angle = position / 10000.0 ** (2 * pair / width)
        one, two = vector[pair], vector[pair + width // 2]
        result[pair] = one * math.cos(angle) - two * math.sin(angle)
        result[pair + width // 2] = two * math.cos(angle) + one * math.sin(angle)
    return result


def layer_by_loops(layer: Any, states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """One layer on the states [tokens, width] of one sample; padding is not looked at."""
    attention, entering, result = layer.self_attn, states, torch.zeros_like(states)
    first = attention.config.norm == "pre"
    if first:
        states = torch.stack([normalised(layer.norm, row) for row in entering])
    heads, memory, width = attention.persistent_keys.shape
    for token in range(len(states)):
        columns = []
        for head in range(heads):
            rows = slice(head * width, (head + 1) * width)
            query = attention.q_proj.weight[rows] @ states[token]
            scores, values = [], []
            for other in range(token + 1):
                if real[other]:
                    key = attention.k_proj.weight[rows] @ states[other]
                    both = (
                        turned(vector, place, attention.rotary_dim) for vector, place in ((query, token), (key, other))
                    )
                    scores.append(torch.dot(*both) / math.sqrt(width))
                    values.append(attention.v_proj.weight[rows] @ states[other])
            for own in range(memory):
                key = math.sqrt(width) * attention.persistent_keys[head, own]
                scores.append(torch.dot(query, key) / math.sqrt(width))
                values.append(math.sqrt(memory) * attention.persistent_values[head, own])
            shares = torch.stack(scores).exp()
            columns.append(sum(share * value for share, value in zip(shares, values, strict=True)) / shares.sum())
        summed = entering[token] + attention.o_proj.weight @ torch.cat(columns)
        result[token] = summed if first else normalised(layer.norm, summed)
    return result


def normalised(norm: Any, row: torch.Tensor) -> torch.Tensor:
    centred = row - row.mean()
    return centred / (centred.square().mean() + norm.eps).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_the_model_is_what_loops_give(attention: str, norm: str) -> None:
    model = double(norm)
    model.set_attn_implementation(attention)
    batch = decoder_batch(0)
    actual = model(**batch, output_hidden_states=True)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        states = model.model.embed_tokens(batch["input_ids"][row])
        for number, layer in enumerate(model.model.layers):
            states = layer_by_loops(layer, states, mask)
            assert (states - actual.hidden_states[number + 1][row])[mask].abs().max() < EXACT
        assert (states @ model.lm_head.weight.T - actual.logits[row])[mask].abs().max() < EXACT


@torch.no_grad()
def test_probabilities_cover_tokens_and_memory() -> None:
    model = double()
    model.set_attn_implementation("eager")
    batch = decoder_batch(0)
    actual = model(**batch, output_attentions=True).attentions
    assert len(actual) == 3
    for weights in actual:
        assert weights.shape == (3, 4, 9, 9 + 5)
        assert (weights.sum(-1) - 1).abs().max() < EXACT
        assert (weights[..., 9:] > 0).all()  # seen by every query, those of padding too
        assert (weights[..., :9].triu(1) == 0).all()
        assert (weights[2, :, :, :4] == 0).all()  # padding


@torch.no_grad()
def test_memory_begins_small_and_is_scaled_up() -> None:
    torch.manual_seed(0)
    model = AllAttentionForCausalLM(AllAttentionConfig(**{**ALL_ATTENTION, "num_persistent_vectors": 400}))
    layer = model.model.layers[0].self_attn
    count = layer.persistent_keys.numel()
    for parameter, scaled, expected in zip(
        (layer.persistent_keys, layer.persistent_values), layer.memory(), (6**-0.5, 400**-0.5), strict=True
    ):
        spread = 4 / math.sqrt(2 * count)  # of an estimated standard deviation, four times over
        assert float(parameter.std()) == pytest.approx(expected, rel=spread)
        assert float(scaled.std()) == pytest.approx(1.0, rel=spread)


# --- what transformers asks of a model -------------------------------------------------------------------------------


@torch.no_grad()
def test_a_cache_holds_tokens_alone_and_changes_nothing() -> None:
    model, ids = double(), decoder_batch(0)["input_ids"]
    whole = model(input_ids=ids).logits
    cache, pieces = None, []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        actual = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = actual.past_key_values
        pieces.append(actual.logits)
        assert cache.get_seq_length() == end
        assert cache.layers[0].keys.shape == (3, 4, end, 6)
    assert (torch.cat(pieces, 1) - whole).abs().max() < EXACT
    assert torch.equal(model(input_ids=ids, logits_to_keep=2).logits, model(input_ids=ids).logits[:, -2:])


@torch.no_grad()
def test_generation_is_the_same_with_every_cache_and_with_padding() -> None:
    model, batch = double(), decoder_batch(0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    expected = model.generate(**batch, **options, use_cache=False)
    for more in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(**batch, **options, **more), expected)
    for row, mask in enumerate(batch["attention_mask"].bool()):  # alone and without padding
        alone = model.generate(batch["input_ids"][row : row + 1, mask], **options)
        assert torch.equal(alone[0, -6:], expected[row, -6:])


@torch.no_grad()
def test_only_distances_matter() -> None:
    model, ids = double(), decoder_batch(0)["input_ids"]
    positions = torch.arange(9)[None]
    there, further = (model(input_ids=ids, position_ids=positions + shift).logits for shift in (0, 17))
    assert (there - further).abs().max() < 1e-11  # angles are rounded at other sizes
    assert (there - model(input_ids=ids, position_ids=2 * positions).logits).abs().max() > 1e-3


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = double().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        batch = decoder_batch(0)
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, again = gradients
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in plain.values())
    assert all((plain[name] - again[name]).abs().max() < EXACT for name in plain)


def test_training_learns_and_dropout_is_used() -> None:
    torch.manual_seed(0)
    model = AllAttentionForCausalLM(
        AllAttentionConfig(**{**ALL_ATTENTION, "hidden_dropout": 0.1, "attention_dropout": 0.1})
    )
    ids = decoder_batch(0)["input_ids"][:1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_saved_and_loaded_by_the_auto_classes(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AllAttentionConfig(**{**ALL_ATTENTION, "tie_word_embeddings": tied})
    model = AllAttentionForCausalLM(config).eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is AllAttentionConfig
    for load in (AutoModelForCausalLM.from_pretrained, headprune.load):
        again = load(tmp_path)
        assert type(again) is AllAttentionForCausalLM
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert torch.equal(again(**decoder_batch(0)).logits, model(**decoder_batch(0)).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is AllAttentionModel


@torch.no_grad()
def test_norm_first_is_removed_saved_and_loaded(tmp_path: Path) -> None:
    """Removed equals gated, a layer without heads passes its input on unchanged, and a folder says where the norm is,
    to headprune and to the code of the checkpoint."""
    model, batch = double("pre"), decoder_batch(0)
    heads = [(0, 1), (0, 3), *((2, head) for head in range(4))]
    sites = all_sites(model)
    mask = torch.ones(len(sites), 4)
    for site, head in heads:
        mask[site, head] = 0
    with headprune.gated(model, mask):
        gated = model(**batch).logits
    headprune.remove(model, heads)
    states = model(**batch, output_hidden_states=True)
    assert (states.logits - gated).abs().max() < EXACT
    assert torch.equal(states.hidden_states[2], states.hidden_states[3])
    headprune.save(model, tmp_path, portable=True)
    portable = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float64)
    for again in (headprune.load(tmp_path), portable):
        assert again.config.norm == "pre"
        assert (again(**batch).logits - states.logits).abs().max() < EXACT


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_persistent_vectors": 0}, "num_persistent_vectors"),
        ({"head_dim": 1}, "head_dim"),
        ({"norm": "both"}, "norm must be 'pre' or 'post', not 'both'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ],
)
def test_bad_numbers_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(Exception, match=word):
        AllAttentionConfig(**{**ALL_ATTENTION, **settings})


# --- removing heads ---------------------------------------------------------------------------------------------------


def test_it_has_heads_and_no_neurons() -> None:
    model = ENTRY.build()
    sites = all_sites(model)
    assert [site.kind for site in sites] == ["heads"] * 3
    assert list(sites_of(model, ("heads", "neurons"))) == sites
    seen = headprune.inspect(model)
    assert (seen.known_by, seen.feed_forward, seen.left) == ("table", [], ())


@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_a_head_takes_its_share_of_everything(gone: int) -> None:
    """Of all parameters but embeddings and norms, and of all products but those of the map to the vocabulary."""
    model = ENTRY.build()
    model.set_attn_implementation("eager")
    inputs = {"input_ids": decoder_batch(0)["input_ids"][:1]}

    def parts(model: Any) -> tuple[int, int]:
        fixed = sum(p.numel() for n, p in model.named_parameters() if "norm" in n or "embed" in n or "lm_head" in n)
        vocabulary = 2 * 9 * model.lm_head.weight.numel()
        return total_parameters(model) - fixed, flops(model, all_sites(model), batch=inputs).total - vocabulary

    dense = parts(model)
    headprune.remove(model, flat(site.units()[index] for site in all_sites(model) for index in range(gone)))
    assert parts(model) == tuple(number * (4 - gone) // 4 for number in dense)


def test_what_a_head_costs_by_hand() -> None:
    model = ENTRY.build()
    model.set_attn_implementation("eager")
    sites, (tokens, memory, width, hidden) = all_sites(model), (9, 5, 6, 24)
    assert unit_parameters(model, sites) == [4 * width * hidden + 2 * memory * width] * 3
    maps = 4 * 2 * tokens * hidden * width
    # Scores are products of queries as they are and, for positions, turned (2 numbers of these narrow heads).
    attention = 2 * tokens * (tokens + memory) * (width + 2 + width)
    inputs = {"input_ids": decoder_batch(0)["input_ids"][:1]}
    assert unit_costs(model, sites, batch=inputs) == [maps + attention] * 3


def test_memory_leaves_with_its_head() -> None:
    model = ENTRY.build()
    before = copy.deepcopy(model)
    headprune.remove(model, [(0, 1), *((2, head) for head in range(4))])
    for name in ("persistent_keys", "persistent_values"):
        dense = getattr(before.model.layers[0].self_attn, name)
        assert torch.equal(getattr(model.model.layers[0].self_attn, name), dense[[0, 2, 3]])
        assert not hasattr(model.model.layers[2].self_attn, name)
    assert model.config.pruned_heads == {"0": [1], "2": [0, 1, 2, 3]}


def test_budgets_are_met_with_heads_alone() -> None:
    model = ENTRY.build()
    batches = [{**decoder_batch(seed), "labels": decoder_batch(seed)["input_ids"]} for seed in range(4)]
    dense = total_parameters(model)
    headprune.prune(model, batches, keep_parameters=0.7)
    assert total_parameters(model) <= 0.7 * dense
    assert model.config.pruned_heads
    assert not getattr(model.config, "pruned_neurons", None)


def test_the_program_finds_it_in_a_folder(tmp_path: Path) -> None:
    """In a process that has imported nothing of it."""
    model = ENTRY.build()
    headprune.remove(model, [(0, 1)])
    headprune.save(model, tmp_path / "model")
    done = forked_python.run("-m", "headprune", "inspect", tmp_path / "model", "--json")
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert actual["model_type"] == "all_attention"
    assert [site["heads"] for site in actual["sites"]] == [3, 4, 4]
    loaded = headprune.load(tmp_path / "model")
    assert outputs(loaded, decoder_batch(1))["logits"].equal(outputs(model, decoder_batch(1))["logits"])
