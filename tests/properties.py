"""Promises of headprune on small random models, each compared with plain torch and transformers code.

A case is a classifier or decoder of texts with random weights, texts of random lengths and random units to remove. The
expected values use none of the project's computations: columns of output projections are set to zero, gradients come
from autograd over single samples without padding, entropies from `output_attentions`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

import headprune
from headprune.discovery.twin import randomise, small_config
from headprune.errors import HeadpruneError
from headprune.units import all_sites

MAPPINGS = {
    "classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING",
}
SAMPLES, LONGEST, FIRST_TOKEN, PADDING = 5, 9, 5, 1
# Sums over a few hundred float64 numbers; some models take steps in float32 whatever their weights are.
EXACT = {"rtol": 1e-5, "atol": 1e-7}
SIDES, FORMS = ("right", "left"), ("tokens", "allowed", "added")
WITH_ENTROPIES = {"bert", "deberta-v2", "falcon", "gpt2", "llama", "qwen3"}  # whose entropies are not refused
ENTROPY_EPSILON = 1e-7  # of variant C, the default


def model_types(kind: str) -> list[str]:
    """The model types with a class for texts of this kind."""
    mapping = getattr(modeling_auto, MAPPINGS[kind])
    return sorted(name for name, config in CONFIG_MAPPING.items() if config in mapping)


@dataclass(frozen=True)
class Case:
    model: Any
    kind: str
    texts: list[torch.Tensor]  # token ids without padding
    labels: torch.Tensor
    seed: int

    def batch(
        self, rows: Sequence[int], length: int | None = None, *, side: str = "right", form: str = "tokens"
    ) -> dict[str, torch.Tensor]:
        """These samples, padded on this side to the longest, or to this length, with a mask in one of FORMS."""
        length = length or max(len(self.texts[row]) for row in rows)
        ids = torch.full((len(rows), length), PADDING)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            text = self.texts[row]
            place = slice(0, len(text)) if side == "right" else slice(length - len(text), length)
            ids[number, place], mask[number, place] = text, 1
        # The first token has no prediction; without this, that at padding in front of it would count.
        predicted = (mask == 1) & (mask.cumsum(-1) > 1)
        labels = self.labels[list(rows)] if self.kind == "classifier" else ids.masked_fill(~predicted, -100)
        batch = {"input_ids": ids, "attention_mask": self._in_form(mask, form), "labels": labels}
        if (side, form) != ("right", "tokens") and "position_ids" in inspect.signature(self.model.forward).parameters:
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        return batch

    def _in_form(self, mask: torch.Tensor, form: str) -> torch.Tensor:
        if form == "tokens":
            return mask
        tokens = mask.shape[1]
        allowed = mask.bool()[:, None, None, :].expand(-1, 1, tokens, tokens)
        if self.kind == "decoder":
            allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # a softmax over no keys is NaN
        return allowed if form == "allowed" else torch.zeros(allowed.shape).double().masked_fill(~allowed, -1e9)

    def batches(self, size: int = 2, length: int | None = None, **options: str) -> list[dict[str, torch.Tensor]]:
        rows = range(SAMPLES)
        return [self.batch(rows[start : start + size], length, **options) for start in range(0, SAMPLES, size)]

    def takes(self, side: str, form: str) -> bool:
        """Whether the model itself says the same of these batches: positions or masks of some are of one kind only."""
        rows = range(SAMPLES)
        real = [self.batch(rows, side=one)["attention_mask"].bool() for one in ("right", side)]
        try:
            expected, actual = (
                logits(self.model, batch, mask)
                for batch, mask in zip((self.batch(rows), self.batch(rows, side=side, form=form)), real, strict=True)
            )
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return torch.allclose(actual, expected, **EXACT)

    def units(self, share: float = 0.5, kind: str = "heads") -> list[tuple[int, int]]:
        """Heads or neurons drawn at random, in whole units; every site keeps one unit."""
        draw = random.Random(self.seed)
        chosen = []
        for site in all_sites(self.model):
            units = [] if site.obstacle or site.kind != kind else site.units()
            chosen += [tuple(head) for unit in draw.sample(units, int(share * len(units))) for head in unit]
        return chosen


def build_case(kind: str, model_type: str, seed: int) -> Case:
    config = small_config(CONFIG_MAPPING[model_type](), keep_heads=False, depth=2)
    config.num_labels, config.pad_token_id = 3, PADDING
    config.get_text_config().pad_token_id = PADDING
    torch.manual_seed(seed)
    classes = getattr(modeling_auto, MAPPINGS[kind])[type(config)]
    model = (classes[0] if isinstance(classes, tuple) else classes)(config).eval().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    randomise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LONGEST + 1, (SAMPLES,), generator=draw).tolist()
    words = config.get_text_config().vocab_size
    texts = [torch.randint(FIRST_TOKEN, words, (length,), generator=draw) for length in lengths]
    return Case(model, kind, texts, torch.randint(3, (SAMPLES,), generator=draw), seed)


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


@torch.no_grad()
def logits(model: Any, batch: Mapping[str, torch.Tensor], real: torch.Tensor | None = None) -> torch.Tensor:
    """Logits at real tokens, which a mask of tokens tells, unless `real` does."""
    values = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    real = batch["attention_mask"].bool() if real is None else real
    return values[real] if values.dim() == 3 else values


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
    total = torch.zeros(len(sites), max(site.original for site in sites), dtype=torch.float64)
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
    norms = torch.zeros(3, len(sites), max(site.original for site in sites), dtype=torch.float64)
    for row in range(SAMPLES):
        model.zero_grad()
        batch = {name: value for name, value in case.batch([row]).items() if name != "labels"}
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


def attention_entropy(case: Case) -> torch.Tensor:
    """Entropy of variant C from the attention probabilities that the model returns, by site and head."""
    model = type(case.model)._from_config(copy.deepcopy(case.model.config), attn_implementation="eager").eval().double()
    model.load_state_dict(case.model.state_dict())
    total: Any = 0
    for row in range(SAMPLES):
        batch = {name: value for name, value in case.batch([row]).items() if name != "labels"}
        with torch.no_grad():
            maps = model(**batch, output_attentions=True).attentions
        values = []
        for attention in maps:
            probabilities = attention[0].double() + ENTROPY_EPSILON
            terms = -probabilities * probabilities.log() * (attention[0] != 0)  # masked keys do not count
            values.append(terms.sum(-1).mean(-1))
        total = total + torch.stack(values) / SAMPLES
    return total


# --- promises: each has an empty folder to write to ---


def removed_is_zeroed(case: Case, folder: Path) -> None:
    heads, batch = case.units(), case.batch(range(SAMPLES))
    with silenced(case.model, heads):
        expected = logits(case.model, batch)
    pruned = copy.deepcopy(case.model)
    headprune.remove(pruned, heads)
    torch.testing.assert_close(logits(pruned, batch), expected, **EXACT)


def removed_neurons_are_zeroed(case: Case, folder: Path) -> None:
    neurons, batch = case.units(kind="neurons"), case.batch(range(SAMPLES))
    with silenced(case.model, neurons):
        expected = logits(case.model, batch)
    pruned = copy.deepcopy(case.model)
    headprune.remove(pruned, neurons=neurons)
    torch.testing.assert_close(logits(pruned, batch), expected, **EXACT)


def generation_is_zeroed(case: Case, folder: Path) -> None:
    if case.kind != "decoder" or not case.model.can_generate():
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
    torch.testing.assert_close(logits(loaded, batch), logits(pruned, batch), **EXACT)
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
    torch.testing.assert_close(-scores.double(), attention_entropy(case), **EXACT)


def scores_do_not_depend_on(case: Case, folder: Path) -> None:
    """Batch size, padding and its side, form of the mask, order of samples, training mode, gradient mode, precision of
    the weights, threads."""
    variants = [(side, form) for side in SIDES for form in FORMS if case.takes(side, form)]
    for criterion in ("his", "residual-gradient"):

        def score(batches: Any, model: Any = case.model, criterion: str = criterion) -> torch.Tensor:
            return headprune.score(model, batches, criterion=criterion).scores

        expected = score(case.batches())
        same = {
            "batch size 1": score(case.batches(1)),
            "batch size 5": score(case.batches(SAMPLES)),
            "padding": score(case.batches(length=LONGEST + 3)),
            "order": score([case.batch([row]) for row in reversed(range(SAMPLES))]),
        }
        for side, form in variants:
            same[f"{side} padding, mask of {form}"] = score(case.batches(side=side, form=form))
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
        rough = score(case.batches(), copy.deepcopy(case.model).float()).double()
        torch.testing.assert_close(
            rough, expected.double(), rtol=1e-2, atol=1e-3 * float(expected.max()), equal_nan=True
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
