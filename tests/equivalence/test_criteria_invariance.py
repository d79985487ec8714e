"""Scores do not depend on batching, order or padding of samples, on how heads were taken out, or how attention runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

import headprune
from helpers import SAME_CODE, VARIANTS, families, gates_without
from oracles import IGNORED
from score_helpers import FROM_TOKENS, Batch, applicable, differing, labelled, labels_of, model_of, scores
from zoo import ZOO, Entry

# All but the aggregation `batch`, which is meant to depend on batches. The large epsilon makes padding keys count.
CRITERIA = (
    "gnorm",
    "gnorm(objective=loss)",
    "his",
    "his(normalize=True)",
    "tis",
    "taylor",
    "entropy(epsilon=0.01)",
    "deficit",
    "hies",
    "attribution(steps=1)",
    "residual-gradient",
    "residual-gradient(residual=False)",
    "residual-error",
)


def joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def split(batch: Batch, rows: Sequence[Sequence[int]]) -> list[Batch]:
    return [{name: value[list(part)] for name, value in batch.items()} for part in rows]


def six_samples(entry: Entry) -> Batch:
    return joined([labelled(entry, 0), labelled(entry, 5)])


@functools.cache
def reference(entry: Entry) -> dict[str, torch.Tensor]:
    whole = split(six_samples(entry), [[0, 1, 2], [3, 4, 5]])
    return scores(model_of(entry.name, "dense"), whole, applicable(entry, CRITERIA), labels=labels_of(entry))


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_batch_size_and_order_do_not_matter(entry: Entry) -> None:
    criteria = applicable(entry, CRITERIA)
    expected = reference(entry)
    for rows in ([[0, 1, 2, 3, 4, 5]], [[5], [4, 1], [3, 0, 2]]):
        batches = split(six_samples(entry), rows)
        actual = scores(model_of(entry.name, "dense"), batches, criteria, labels=labels_of(entry))
        assert differing(actual, expected) == {}, rows


def padded(batch: Batch, more: int, *, left: bool) -> Batch:
    """The batch with more padding on every side that it has masks for; decoders of encoder-decoders pad right."""
    result = dict(batch)
    sides = {"attention_mask": ("input_ids",), "decoder_attention_mask": ("decoder_input_ids", "labels")}
    for mask, names in sides.items():
        for name in (mask, *names) if mask in batch else ():
            if name in batch:
                value = 0 if name == mask else IGNORED if name == "labels" else 1
                result[name] = torch.nn.functional.pad(batch[name], (more, 0) if left else (0, more), value=value)
    return result


@pytest.mark.parametrize(
    "entry", [e for e in families(without=set(SAME_CODE) - {"marian"}) if "attention_mask" in e.values[0].batch(0)]
)
def test_padding_length_does_not_matter(entry: Entry) -> None:
    criteria = applicable(entry, CRITERIA)
    left = "decoder" in entry.tags and entry.name != "gpt2"
    batches = split(six_samples(entry), [[0, 1, 2], [3, 4, 5]])
    longer = [padded(batches[0], 3, left=left), padded(batches[1], 8, left=left)]
    assert longer[1]["input_ids"].shape[1] == batches[1]["input_ids"].shape[1] + 8
    actual = scores(model_of(entry.name, "dense"), longer, criteria, labels=labels_of(entry))
    assert differing(actual, reference(entry)) == {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_closed_gates_score_like_removed_heads(entry: Entry, variant: str) -> None:
    """For the heads that are left. HIES is scaled over all heads that the model has, closed ones among them, and the
    ridge of least squares is relative to the mean over all of them, so that these can tell the two apart."""
    criteria = [name for name in applicable(entry, [*CRITERIA, "magnitude"]) if name not in ("hies", *FROM_TOKENS)]
    batches = [six_samples(entry)]
    sliced = model_of(entry.name, variant)
    dense = model_of(entry.name, "dense")
    kept = torch.zeros(entry.sites, entry.heads, dtype=torch.bool)
    for site in headprune.resolve(sliced):
        kept[site.index, list(site.kept)] = True
    gone = [(site, head) for site, head in (~kept).nonzero().tolist()]
    with headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        actual = scores(dense, batches, criteria, labels=labels_of(entry))
    assert differing(actual, scores(sliced, batches, criteria, labels=labels_of(entry)), where=kept) == {}


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_eager_attention_scores_like_sdpa(entry: Entry) -> None:
    """In float32: families add the least number of their precision to what they take the softmax of in float32. The
    residuals of least squares go through the inverse of a covariance whose condition is up to 1000, the inverse of its
    ridge, and are squared: rounding grows as much, so they are left to the tests in float64."""
    model = entry.build()
    if model.config._attn_implementation != "sdpa":
        pytest.skip("this family computes its attention in one way only")
    criteria = [name for name in applicable(entry, CRITERIA) if name not in FROM_TOKENS]
    batches = [six_samples(entry)]
    expected = scores(model, batches, criteria, labels=labels_of(entry))
    model.set_attn_implementation("eager")
    actual = scores(model, batches, criteria, labels=labels_of(entry))
    assert model.config._attn_implementation == "eager"
    assert differing(actual, expected) == {}


def test_the_aggregation_batch_depends_on_batches_as_it_is_meant_to() -> None:
    entry = ZOO["bert"]
    names = ["gnorm(aggregation=batch)"]
    one = scores(model_of("bert", "dense"), split(six_samples(entry), [range(6)]), names)
    two = scores(model_of("bert", "dense"), split(six_samples(entry), [range(3), range(3, 6)]), names)
    assert differing(one, two) != {}


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_labels_alone_score_like_the_decoder_inputs_made_from_them(name: str) -> None:
    """The usual batch of an encoder-decoder has labels and no decoder inputs: it is padded where labels are -100."""
    entry = ZOO[name]
    full = labelled(entry, 0)
    model = model_of(name, "dense")
    short = {key: full[key] for key in ("input_ids", "attention_mask", "labels")}
    full["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(full["labels"])
    assert differing(scores(model, [short], CRITERIA), scores(model, [full], CRITERIA)) == {}
