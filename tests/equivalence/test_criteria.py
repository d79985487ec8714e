"""Every criterion against its oracle, on every family, dense and after removals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import headprune
from helpers import SAME_CODE, VARIANTS, families, telling_variant
from oracles import Oracle, relative_differences
from score_helpers import (
    LOSS_BASED,
    TOLERANCE,
    applicable,
    differing,
    labelled,
    labels_of,
    model_of,
    oracle_of,
    scores,
    some_batches,
)
from zoo import BERT, LABELS, LLAMA, VOCAB, ZOO, Entry, spread, text_batch

# The epsilon of 0.01 makes every key count that must not: with 1e-7, a sum over padding would go unnoticed.
GROUPS: dict[str, dict[str, Callable[[Oracle], torch.Tensor]]] = {
    "gnorm": {
        "gnorm": lambda oracle: oracle.gnorm(),
        "gnorm(objective=loss)": lambda oracle: oracle.gnorm("loss"),
        "gnorm(aggregation=batch)": lambda oracle: oracle.gnorm(aggregation="batch"),
        "gnorm(objective=loss,aggregation=batch)": lambda oracle: oracle.gnorm("loss", "batch"),
    },
    "gates": {
        "his": lambda oracle: oracle.his(),
        "his(normalize=True)": lambda oracle: oracle.his(normalize=True),
        "tis": lambda oracle: oracle.tis(),
        "hies": lambda oracle: oracle.hies(),
        "hies(alpha=0.9)": lambda oracle: oracle.hies(0.9),
        "hies(entropy=raw,tokens=sum)": lambda oracle: oracle.hies(raw=True),
    },
    "hies with another importance": {
        "hies(importance=taylor)": lambda oracle: oracle.hies(importance=oracle.taylor()),
        "hies(importance=gnorm)": lambda oracle: oracle.hies(importance=oracle.gnorm()),
        "hies(importance=magnitude)": lambda oracle: oracle.hies(importance=oracle.magnitude()),
        "hies(importance=output-norm)": lambda oracle: oracle.hies(importance=oracle.output_norms()),
    },
    "entropy": {
        "entropy": lambda oracle: oracle.entropy(),
        "entropy(variant=A)": lambda oracle: oracle.entropy("A"),
        "entropy(variant=B,epsilon=0.01)": lambda oracle: oracle.entropy("B", 0.01),
        "entropy(epsilon=0.01)": lambda oracle: oracle.entropy("C", 0.01),
        "deficit": lambda oracle: oracle.deficit(),
        "entropy(kind=renyi,order=2.0)": lambda oracle: -oracle.entropies(kind="renyi", order=2),
        "entropy(kind=tsallis,order=0.5)": lambda oracle: -oracle.entropies(kind="tsallis", order=0.5),
        "deficit(kind=tsallis,order=3.0)": lambda oracle: -oracle.entropies(kind="tsallis", order=3, deficit=True),
    },
    "weights": {"taylor": lambda oracle: oracle.taylor(), "magnitude": lambda oracle: oracle.magnitude()},
    "attribution": {"attribution(steps=2)": lambda oracle: oracle.attribution(2)},
    "residual-gradient": {
        "residual-gradient": lambda oracle: oracle.repair(),
        "residual-gradient(residual=False)": lambda oracle: oracle.repair(residual=False),
        "residual-error": lambda oracle: oracle.lstsq(),
    },
}


def variants() -> list[Any]:
    """Every family dense and after removals; one that shares its code with another in the most telling variant."""
    measured = []
    for case in families():
        entry = case.values[0]
        names = [telling_variant(entry)] if entry.name in SAME_CODE else ["dense", *VARIANTS]
        measured += [pytest.param(entry, name, id=f"{case.id}-{name}", marks=case.marks) for name in names]
    return measured


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("entry", "variant"), variants())
def test_scores_are_those_of_the_oracle(entry: Entry, variant: str, group: str) -> None:
    names = applicable(entry, GROUPS[group])
    if not names:
        pytest.skip("a dual encoder has no loss")
    few = group == "attribution"  # which costs many passes, and in the oracle many more
    oracle = oracle_of(entry.name, variant, few=few)
    batches = some_batches(entry, few=few)
    actual = scores(model_of(entry.name, variant), batches, names, labels=labels_of(entry))
    assert differing(actual, {name: GROUPS[group][name](oracle) for name in names}) == {}


@pytest.mark.parametrize("name", ["bert", "llama", "albert"])
def test_attribution_in_the_twenty_steps_of_the_paper(name: str) -> None:
    actual = scores(model_of(name, "dense"), some_batches(ZOO[name], few=True), ["attribution"])
    assert differing(actual, {"attribution": oracle_of(name, "dense", few=True).attribution()}) == {}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("entropy", ["raw", "normalized"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_hies_is_made_of_his_and_entropy(name: str, entropy: str, alpha: float) -> None:
    """Both scaled to [0, 1] over the heads that are left, whatever site they are in; normalised entropy is 1 - AD."""
    hies, other = f"hies(alpha={alpha},entropy={entropy},tokens=sum)", "entropy" if entropy == "raw" else "deficit"
    measured = scores(model_of(name, "some-heads"), some_batches(ZOO[name]), [hies, "his", other])
    kept = ~measured["his"].isnan()
    his, spread_out = measured["his"][kept], -measured[other][kept]
    spread_out = spread_out if entropy == "raw" else 1 - spread_out
    focus = (spread_out.max() - spread_out) / (spread_out.max() - spread_out.min())
    expected = alpha * (his - his.min()) / (his.max() - his.min()) + (1 - alpha) * focus
    made = next(value for key, value in measured.items() if key.startswith("hies"))
    assert torch.allclose(made[kept], expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(made.isnan(), ~kept)


# --- random shapes --------------------------------------------------------------------------------------------------


def _shaped(kind: str, seed: int) -> tuple[Any, list[dict[str, torch.Tensor]], Oracle]:
    """A model and batches whose every dimension is drawn; long rows on narrow models and short ones on wide models make
    both ways of contracting gradients cheaper in turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    heads, group, layers = draw(1, 5), draw(1, 3), draw(1, 4)
    width = 2 * draw(2, 6) if heads > 1 else 12  # a norm over two or four numbers forgets what it normalises
    if kind == "bert":
        settings = {**BERT, "hidden_size": heads * width, "num_attention_heads": heads, "num_hidden_layers": layers}
        build, config = transformers.BertForSequenceClassification, transformers.BertConfig
    elif kind == "llama":
        settings = {**LLAMA, "head_dim": width, "num_attention_heads": heads * group, "num_key_value_heads": heads}
        settings |= {"hidden_size": heads * group * draw(2, 9), "num_hidden_layers": layers}
        build, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
    else:
        settings = {"vocab_size": VOCAB, "n_embd": heads * width, "n_layer": layers, "n_head": heads}
        settings |= {"n_positions": 40, "eos_token_id": 2, "bos_token_id": 0}
        build, config = transformers.GPT2LMHeadModel, transformers.GPT2Config
    model = build(config(**settings)).eval()
    spread(model)
    batches = [text_batch(seed + part, size=draw(1, 4), length=draw(6, 36)) for part in range(2)]
    if kind == "bert":
        for batch in batches:
            batch["labels"] = torch.randint(0, LABELS, (len(batch["input_ids"]),), generator=generator)
    return model, batches, Oracle(model, batches, next_token=kind != "bert")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_shapes_do_not_matter(kind: str, seed: int) -> None:
    model, batches, oracle = _shaped(kind, seed)
    expected = {
        "gnorm": oracle.gnorm(),
        "gnorm(aggregation=batch)": oracle.gnorm(aggregation="batch"),
        "his": oracle.his(),
        "entropy(epsilon=0.01)": oracle.entropy("C", 0.01),
        "taylor": oracle.taylor(),
        "attribution(steps=2)": oracle.attribution(2),
        "residual-gradient": oracle.repair(),
        "residual-gradient(residual=False)": oracle.repair(residual=False),
        "residual-error": oracle.lstsq(),
    }
    assert differing(scores(model, batches, list(expected)), expected) == {}


# --- other tasks ----------------------------------------------------------------------------------------------------


def _task(name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A model of another task than those of the zoo, with two labelled batches."""
    settings: dict[str, Any] = {**BERT}
    build, config = {
        "regression": (transformers.BertForSequenceClassification, transformers.BertConfig),
        "multi-label": (transformers.BertForSequenceClassification, transformers.BertConfig),
        "token-classification": (transformers.BertForTokenClassification, transformers.BertConfig),
        "masked-language-model": (transformers.BertForMaskedLM, transformers.BertConfig),
        "decoder-classifier": (transformers.LlamaForSequenceClassification, transformers.LlamaConfig),
        "language-model-with-labels": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    }[name]
    if name == "regression":
        settings["num_labels"] = 1
    decoder = config is transformers.LlamaConfig
    if decoder:
        settings = {**LLAMA}
    model = build(config(**settings)).eval()
    spread(model)
    batches = []
    for seed in (0, 5):
        # Where a label says so, transformers lets even padding predict, so the text comes first.
        batch = text_batch(seed, left=decoder and name != "language-model-with-labels")
        generator = torch.Generator().manual_seed(seed)
        shape = batch["input_ids"].shape
        if name == "regression":
            batch["labels"] = torch.randn(3, generator=generator)
        elif name == "multi-label":
            batch["labels"] = torch.randint(0, 2, (3, LABELS), generator=generator).float()
        elif name == "decoder-classifier":
            batch["labels"] = torch.randint(0, LABELS, (3,), generator=generator)
        else:
            labels = torch.randint(0, LABELS, shape, generator=generator)
            skipped = (batch["attention_mask"] == 0) | (torch.rand(shape, generator=generator) < 0.3)
            batch["labels"] = labels.masked_fill(skipped, -100)
        batches.append(batch)
    return model, batches


TASKS = (
    "regression",
    "multi-label",
    "token-classification",
    "masked-language-model",
    "decoder-classifier",
    "language-model-with-labels",
)


@pytest.mark.parametrize("task", TASKS)
def test_losses_of_other_tasks(task: str) -> None:
    model, batches = _task(task)
    oracle = Oracle(model, batches, next_token=task == "language-model-with-labels")
    expected = {"gnorm(objective=loss)": oracle.gnorm("loss"), "his": oracle.his(), "taylor": oracle.taylor()}
    expected |= {
        "residual-gradient": oracle.repair(),
        "residual-error": oracle.lstsq(),
    }  # which need no loss, but logits of any shape
    assert differing(scores(model, batches, list(expected)), expected) == {}


# --- the oracles themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "gpt-neox", "bart", "vit"])
def test_the_oracle_of_his_agrees_with_finite_differences(name: str) -> None:
    """On families without RMS norms, which compute in float32 whatever the model's precision."""
    oracle = oracle_of(name, "some-heads", few=True)
    assert float(relative_differences(oracle.his_by_differences(), oracle.his()).max()) <= 1e-7


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "albert"])
def test_the_oracle_of_repair_fits_what_leaves_least(name: str) -> None:
    """No other combination of the other units comes nearer to a unit's outputs, ridge included: all gradients are 0."""
    oracle = oracle_of(name, "dense")
    outputs: dict[int, list[torch.Tensor]] = {site.index: [] for site in oracle.sites}
    for sample in oracle.samples:
        with torch.no_grad(), oracle.head_outputs() as seen:
            oracle.logits(sample)
        for site, values in seen:
            outputs[site.index].append(values.flatten(0, -2))
    for site in oracle.sites:
        values = torch.cat(outputs[site.index])
        offset, expressed = oracle.fits()[site.index]
        has_bias = oracle.model.get_submodule(site.o).bias is not None
        assert torch.allclose(offset, values.mean(0) if has_bias else torch.zeros_like(offset), atol=1e-12)
        ridge = 1e-3 * (values - offset).square().mean()
        for own in oracle.units(site):
            others = [column for column in range(values.shape[1]) if column not in own]
            assert (expressed[own][:, own] == 0).all()
            left = oracle.residual(site, values)[:, own]
            slope = (values - offset)[:, others].T @ left / len(values) - ridge * expressed[others][:, own]
            assert float(slope.abs().max()) <= 1e-12 * float(values.square().mean())


@pytest.mark.parametrize("entry", [e for e in families() if applicable(e.values[0], LOSS_BASED)])
def test_the_oracle_has_the_loss_of_the_model_itself(entry: Entry) -> None:
    """transformers computes the same loss on the unpadded sample, where its models compute one."""
    oracle = oracle_of(entry.name, "dense")
    if labels_of(entry) == "self":
        pytest.skip("a model without a head has no loss of its own")
    for sample in oracle.samples:
        labels = sample.get("labels", sample.get("input_ids"))
        theirs = oracle.model(**{**sample, "labels": labels}).loss
        assert oracle.loss(sample).item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "albert", "bloom", "mistral", "t5", "gpt2-cross"])
def test_the_oracle_sees_the_attention_that_the_model_reports(name: str) -> None:
    oracle = oracle_of(name, "dense", few=True)
    for sample in oracle.samples:
        maps, _ = oracle.maps(sample, oracle.logits)
        inputs = {key: value for key, value in sample.items() if key != "labels"}
        output = oracle.model(**inputs, output_attentions=True)
        if name == "t5":
            told = [*output.encoder_attentions]
            pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
            told += [attention for pair in pairs for attention in pair]
        elif "cross" in name:
            told = [a for pair in zip(output.attentions, output.cross_attentions, strict=True) for a in pair]
        else:
            told = list(output.attentions)
        assert len(maps) == len(told)
        assert all((one - other).abs().max() < 1e-6 for one, other in zip(maps, told, strict=True))


@pytest.mark.parametrize(("name", "window"), [("llama", 99), ("mistral", 4), ("bert", None)])
def test_in_float64_only_masked_keys_have_no_probability(name: str, window: int | None) -> None:
    """The entropy oracle takes the keys above 0 for those that a row may look at."""
    oracle = oracle_of(name, "dense", few=True)
    for sample in oracle.samples:
        for attention in oracle.maps(sample, oracle.logits)[0]:
            rows, keys = torch.meshgrid(*[torch.arange(attention.shape[-1])] * 2, indexing="ij")
            visible = torch.ones_like(rows, dtype=torch.bool)
            if window is not None:
                visible = (keys <= rows) & (rows - keys < window)
            assert torch.equal(attention[0] > 0, visible.expand(attention.shape[1:]))


def test_a_score_is_nan_exactly_where_a_head_is_gone() -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, [(0, 1), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
    batch = labelled(ZOO["bert"], 0)
    for name, measured in scores(model, [batch], [n for group in GROUPS.values() for n in group]).items():
        assert measured.isnan().tolist() == [[False, True, False, True], [False] * 4, [True] * 4], name


def test_the_tolerance_would_catch_a_wrong_score() -> None:
    """One head off by a thousandth, or swapped with its neighbour, is beyond the tolerance."""
    oracle = oracle_of("bert", "dense")
    true = oracle.gnorm()
    wrong, swapped = true.clone(), true.clone()
    wrong[1, 2] *= 1.001
    swapped[0, [0, 1]] = true[0, [1, 0]]
    for mistake in (wrong, swapped):
        assert float(relative_differences(mistake, true).max()) > TOLERANCE
