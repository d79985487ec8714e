"""Promises of headprune on small random models, each compared with plain torch and transformers code.

A case (tests/property_cases.py) is a model with random weights, random texts or images, and random units to remove. The
expected values use none of the project's computations: columns of output projections are set to zero, gradients come
from autograd over single samples without padding, entropies from `output_attentions`.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import headprune
from headprune.errors import HeadpruneError
from headprune.units import all_sites
from property_cases import EXACT, SAMPLES, Case, without

WITH_ENTROPIES = {"bert", "deberta-v2", "falcon", "gpt2", "llama", "qwen3", "vit", "t5", "bart"}  # not refused
ENTROPY_EPSILON = 1e-7  # of variant C, the default
CROSS = ("EncDecAttention", "encoder_attn", "cross")  # in the paths of cross-attention

# --- plain computations ---


def output_map(model: nn.Module, site: Any) -> tuple[nn.Module, int]:
    """The output projection of a site, and the width of a head: its inputs divided by the number of heads."""
    module = model.get_submodule(site.o)
    weight = module.weight
    inputs = weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1]
    return module, inputs // site.original


@contextmanager
def silenced(model: nn.Module, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """The model with zeros in the columns of these heads or neurons."""
    weights = []
    for site in all_sites(model):
        module, width = output_map(model, site)
        weights.append((module.weight, module.weight.detach().clone()))
        for index, head in heads:
            if index == site.index:
                columns = slice(head * width, (head + 1) * width)
                with torch.no_grad():
                    module.weight[columns if isinstance(module, Conv1D) else (slice(None), columns)] = 0
    try:
        yield
    finally:
        for weight, before in weights:
            weight.data.copy_(before)


def copied(model: Any, **options: Any) -> Any:
    """A new model with the same weights, without what the model keeps of its calls: LeViT keeps position biases."""
    new = type(model)._from_config(copy.deepcopy(model.config), **options).to(model.dtype).eval()
    new.load_state_dict(model.state_dict())
    return new


def no_scores(sites: Sequence[Any]) -> torch.Tensor:
    """Zeros by site and head; NaN where a site has fewer heads than another."""
    widest = max(site.original for site in sites)
    rows = [[0.0] * site.original + [math.nan] * (widest - site.original) for site in sites]
    return torch.tensor(rows, dtype=torch.float64)


def head_importance(case: Case) -> torch.Tensor:
    """The mean over samples of |d loss / d gate|, with a gate at the inputs of every output projection."""
    model, sites = case.model, headprune.resolve(case.model)
    gates = [torch.ones(site.original, dtype=torch.float64, requires_grad=True) for site in sites]
    handles = []
    for site, gate in zip(sites, gates, strict=True):
        module, width = output_map(model, site)

        def scale(_: Any, inputs: Any, gate: torch.Tensor = gate, width: int = width) -> Any:
            return (inputs[0] * gate.repeat_interleave(width).to(inputs[0].dtype), *inputs[1:])

        handles.append(module.register_forward_pre_hook(scale))
    total = no_scores(sites)
    try:
        for row in range(SAMPLES):
            loss = model(**case.batch([row])).loss
            for site, gradient in enumerate(torch.autograd.grad(loss, gates, allow_unused=True)):
                if gradient is not None:
                    total[site, : len(gradient)] += gradient.abs() / SAMPLES
    finally:
        for handle in handles:
            handle.remove()
    return total


def weight_gradient_norms(case: Case) -> torch.Tensor:
    """Greedy-Gnorm: the product over q, k and v of the mean over samples of the norm of the head's weight gradient."""
    model, sites = case.model, headprune.resolve(case.model)
    norms = torch.stack([no_scores(sites)] * 3)
    for row in range(SAMPLES):
        model.zero_grad()
        batch = without(case.batch([row]), "labels")
        model(**batch).logits.double().norm().backward()
        for site in sites:
            for role, axis in enumerate(site.roles[name] for name in "qkv"):
                gradient = model.get_parameter(axis.tensor).grad
                for head in range(site.original):
                    block = axis.units[head * len(axis.units) // site.original]
                    rows = gradient.index_select(axis.dim, torch.tensor(list(block)))
                    norms[role, site.index, head] += rows.double().norm() / SAMPLES
    model.zero_grad()
    return norms.prod(0)


def attention_maps(model: Any, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the model returns as its attention probabilities, in the order of the sites."""
    output = model(**batch, output_attentions=True)
    if not model.config.is_encoder_decoder:
        return list(output.attentions)
    of_kind = {kind: iter(output[f"{kind}_attentions"]) for kind in ("encoder", "decoder", "cross")}
    kinds = []
    for path in (site.o for site in headprune.resolve(model)):
        is_cross = any(word in path for word in CROSS)
        kinds.append("encoder" if "decoder." not in path else "cross" if is_cross else "decoder")
    return [next(of_kind[kind]) for kind in kinds]


def attention_entropy(case: Case) -> torch.Tensor:
    """Entropy of variant C from the attention probabilities that the model returns, by site and head."""
    model = copied(case.model, attn_implementation="eager").double()
    total = no_scores(headprune.resolve(model))
    for row in range(SAMPLES):
        batch = without(case.batch([row]), "labels")
        with torch.no_grad():
            maps = attention_maps(model, batch)
        if len(maps) != len(total):
            pytest.skip(f"the model returns the probabilities of {len(maps)} of its {len(total)} sites")
        for site, attention in enumerate(maps):  # of one sample, or of its windows
            probabilities = attention.double() + ENTROPY_EPSILON
            terms = -probabilities * probabilities.log() * (attention != 0)  # masked keys do not count
            total[site, : terms.shape[1]] += terms.sum(-1).mean((0, -1)) / SAMPLES
    return total


def halved(value: torch.Tensor) -> torch.Tensor:
    """Numbers of half the precision; token ids and labels as they are."""
    return value.float() if value.is_floating_point() else value


# --- promises: each has an empty folder to write to ---


def removed_is_zeroed(case: Case, folder: Path) -> None:
    heads, batch = case.units(), case.batch(range(SAMPLES))
    with silenced(case.model, heads):
        expected = case.outputs(batch)
    pruned = copy.deepcopy(case.model)
    headprune.remove(pruned, heads)
    torch.testing.assert_close(case.outputs(batch, pruned), expected, **EXACT)


def removed_neurons_are_zeroed(case: Case, folder: Path) -> None:
    neurons, batch = case.units(kind="neurons"), case.batch(range(SAMPLES))
    with silenced(case.model, neurons):
        expected = case.outputs(batch)
    pruned = copy.deepcopy(case.model)
    headprune.remove(pruned, neurons=neurons)
    torch.testing.assert_close(case.outputs(batch, pruned), expected, **EXACT)


def generation_is_zeroed(case: Case, folder: Path) -> None:
    if case.kind not in ("decoder", "seq2seq") or not case.model.can_generate():
        return
    heads, text = case.units(), case.batch([0])["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(text)}
    with silenced(case.model, heads):
        expected = case.model.generate(text, **options)
    pruned = copy.deepcopy(case.model)
    headprune.remove(pruned, heads)
    assert torch.equal(pruned.generate(text, **options), expected)


def saving_keeps_everything(case: Case, folder: Path) -> None:
    pruned, batch = copy.deepcopy(case.model), case.batch(range(SAMPLES))
    headprune.remove(pruned, case.units())
    headprune.save(pruned, folder / "first")
    loaded = headprune.load(folder / "first", dtype=torch.float64).eval()
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    stored, again = pruned.state_dict(), loaded.state_dict()
    assert list(stored) == list(again)
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    torch.testing.assert_close(case.outputs(batch, loaded), case.outputs(batch, pruned), **EXACT)
    headprune.save(loaded, folder / "second")
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(part.glob("*.safetensors"))}
        for part in (folder / "first", folder / "second")
    ]
    assert digests[0] == digests[1]


def scores_are_gradients(case: Case, folder: Path) -> None:
    for name, expected in (("his", head_importance), ("gnorm", weight_gradient_norms)):
        try:
            scores = headprune.score(case.model, case.batches(), criterion=name).scores
        except HeadpruneError:  # where q, k and v cannot be told apart
            assert name == "gnorm"
            continue
        torch.testing.assert_close(scores.double(), expected(case).reshape(scores.shape), **EXACT, equal_nan=True)


def entropies_are_those_returned(case: Case, folder: Path) -> None:
    try:
        scores = headprune.score(case.model, case.batches(), criterion="entropy").scores
    except HeadpruneError:  # refused, which is allowed where nobody has seen it right
        assert case.model.config.model_type not in WITH_ENTROPIES
        return
    torch.testing.assert_close(-scores.double(), attention_entropy(case), **EXACT, equal_nan=True)


def scores_do_not_depend_on(case: Case, folder: Path) -> None:
    """Batch size, padding and its side, form of the mask, order of samples and entries, training mode, gradient mode,
    precision of the weights, threads."""
    paddings = case.paddings()
    for criterion in ("his", "residual-gradient", "elimination"):

        def score(batches: Any, model: Any = case.model, criterion: str = criterion) -> torch.Tensor:
            return headprune.score(model, batches, criterion=criterion).scores

        expected = score(case.batches())
        same = {
            "batch size 1": score(case.batches(1)),
            "batch size 5": score(case.batches(SAMPLES)),
            "order": score([case.batch([row]) for row in reversed(range(SAMPLES))]),
            "order of entries": score([dict(reversed(batch.items())) for batch in case.batches()]),
        }
        same |= {name: score(batches) for name, batches in paddings.items()}
        case.model.train()
        same["training mode"] = score(case.batches())
        assert case.model.training
        case.model.eval()
        with torch.no_grad():
            same["no_grad"] = score(case.batches())
        with torch.inference_mode():
            same["inference_mode"] = score(case.batches())
        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(score, case.batches()) for _ in range(2)]
            same |= {f"thread {number}": result.result() for number, result in enumerate(results)}
        rounded = [{name: halved(value) for name, value in batch.items()} for batch in case.batches()]
        rough = score(rounded, copied(case.model).float()).double()
        torch.testing.assert_close(
            rough, expected.double(), rtol=1e-2, atol=1e-3 * float(expected.nan_to_num().max()), equal_nan=True
        )
        for what, scores in same.items():
            torch.testing.assert_close(
                scores, expected, **EXACT, equal_nan=True, msg=lambda text, what=what: f"{what}: {text}"
            )


PROMISES = (
    removed_is_zeroed,
    removed_neurons_are_zeroed,
    generation_is_zeroed,
    saving_keeps_everything,
    scores_are_gradients,
    entropies_are_those_returned,
    scores_do_not_depend_on,
)
