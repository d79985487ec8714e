"""What the tests of scores share: labelled batches of every family, models before and after removals, comparisons."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import headprune
from headprune.signals import TokenRequest, Tokens, observe
from headprune.signals.observe import add_gathered
from headprune.tasks import own_batches, task_of
from helpers import pruned
from oracles import IGNORED, Oracle, relative_differences
from zoo import LABELS, VOCAB, ZOO, Entry, text_batch

TOLERANCE = 1e-4
# Absolute floors of the tolerance, where single heads are near 0, as shares of the largest score: 1e-7 is what float32
# knows. The terms of `taylor` cancel, and plain autograd in float32 is no nearer to its small values than 1e-6. `hies`
# divides by the range of the entropies, which may be a hundredth of them, so their rounding errors grow as much; that
# it is made of `his` and `entropy` as it should be is tested without any floor.
FLOORS = {"taylor": 1e-6, "hies": 1e-5}
HEADLESS = ("clip-text", "clip-vision", "siglip-vision")  # hidden states are all they give: labels="self"
PAIRS = ("clip",)  # a dual encoder has no labels, so loss-based criteria do not apply
LOSS_BASED = ("his", "tis", "taylor", "hies", "attribution")

# One of each kind, for what all criteria have in common.
EVERY = [
    "gnorm",
    "gnorm(objective=loss)",
    "gnorm(aggregation=batch)",
    "his",
    "tis",
    "taylor",
    "entropy",
    "deficit",
    "hies",
    "magnitude",
    "random",
    "attribution(steps=2)",
    "residual-gradient",
    "residual-gradient(residual=False)",
    "residual-error",
]
FROM_TOKENS = ("residual-gradient", "residual-error")  # of EVERY, those that are made of the tokens of a site

Batch = dict[str, torch.Tensor]


def is_language_model(entry: Entry) -> bool:
    return bool(entry.tags & {"decoder"}) or entry.name in ("bert-decoder-cross", "gpt2-cross")


def labels_of(entry: Entry) -> Any:
    return "self" if entry.name in HEADLESS else "given"


def labelled(entry: Entry, seed: int) -> Batch:
    """A padded batch of the family with the labels that its loss needs; language models predict their inputs.

    GPT-2 counts positions from the left end of the row, padding or not, so its batches are padded on the right.
    """
    batch = text_batch(seed) if entry.name == "gpt2" else entry.batch(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if "seq2seq" in entry.tags:
        labels = torch.randint(5, VOCAB, batch["decoder_input_ids"].shape, generator=generator)
        mask = batch.get("decoder_attention_mask")
        batch["labels"] = labels if mask is None else labels.masked_fill(mask == 0, IGNORED)
    elif not is_language_model(entry) and entry.name not in (*HEADLESS, *PAIRS):
        batch["labels"] = torch.randint(0, LABELS, (3,), generator=generator)
    return batch


def tokens_of(model: Any, sites: Sequence[Any], batches: Iterable[Batch], **what: bool) -> dict[int, Tokens]:
    """Those of these sites in all the data, with the gradients that are asked for."""
    request = TokenRequest(sites=frozenset(site.index for site in sites), **what)
    measured: dict[int, Tokens] = {}
    for number, first, batch in own_batches(batches):
        seen = observe(model, sites, batch, [request], task=task_of(model), number=number, first=first)
        add_gathered(measured, seen.gathered[request])
    return measured


def applicable(entry: Entry, criteria: Iterable[str]) -> list[str]:
    needs_loss = [name for name in criteria if name.startswith(LOSS_BASED) or "objective=loss" in name]
    return [name for name in criteria if entry.name not in PAIRS or name not in needs_loss]


@functools.lru_cache(maxsize=4)
def model_of(name: str, variant: str) -> Any:
    """The family's model, dense or after the removals of the variant; shared, since scoring leaves a model as it is.

    In float64, so that a difference is a mistake and not rounding, which another CPU does otherwise. What is left of
    rounding is in RMS norms, which compute in float32 whatever the model's precision. Two families stay in float32:
    their own attention adds the least number of float64 to what float32 then takes the softmax of.
    """
    model = ZOO[name].build() if variant == "dense" else pruned(ZOO[name], variant)[0]
    return model if name in ("bloom", "gemma2") else model.double()


def some_batches(entry: Entry, *, few: bool = False) -> list[Batch]:
    """Batches of three and of two samples, so that a mean of means is not the mean; `few`: two samples are all."""
    two = {name: value[:2] for name, value in labelled(entry, 5).items()}
    return [two] if few else [labelled(entry, 0), two]


@functools.lru_cache(maxsize=4)
def oracle_of(name: str, variant: str, *, few: bool = False) -> Oracle:
    entry = ZOO[name]
    batches = some_batches(entry, few=few)
    return Oracle(model_of(name, variant), batches, labels_of(entry), next_token=is_language_model(entry))


def floor_of(criterion: str) -> float:
    """As `relative_differences` takes it: relative to the largest score, before the tolerance multiplies it."""
    return FLOORS.get(criterion.partition("(")[0], 1e-7) / TOLERANCE


def scores(model: Any, batches: Sequence[Any], criteria: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    return headprune.score(
        model, [precise(model, batch) for batch in batches], criteria=list(criteria), **options
    ).scores


def precise(model: Any, batch: Batch) -> Batch:
    """The batch in the precision of the model."""
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}


def differing(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: torch.Tensor | None = None
) -> dict[str, float]:
    """Criterion -> its largest relative difference, of those beyond the tolerance; `where` restricts the heads."""
    assert actual.keys() == expected.keys()
    result = {}
    for name, one in actual.items():
        other = expected[name]
        if where is not None:
            one, other = one.masked_fill(~where, torch.nan), other.masked_fill(~where, torch.nan)
        largest = float(relative_differences(one, other, floor=floor_of(name)).max())
        if not largest <= TOLERANCE:
            result[name] = largest
    return result
