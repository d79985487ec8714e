"""Pruning runs against an obvious loop: gates instead of surgery, slow scores, plain forwards.

The oracle never removes anything: it scores all heads in float64, one sample at a time, with the gates of the heads
that are gone at 0, and takes the unit with the lowest mean score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import headprune
from headprune.hooks.module_paths import layer_path
from headprune.measure.evaluator import Evaluator
from helpers import REPRESENTATIVE, all_units, gates_without, label
from oracles import IGNORED, Oracle
from run_helpers import counted_calls, removal_order
from score_helpers import is_language_model, labelled, labels_of
from zoo import ZOO

FAMILIES = ("bert", "albert", "gpt2", "llama-gqa", "t5", "bart", "vit")
PUBLISHED = {"criterion": "gnorm", "repair": "none"}  # the loop of the paper: gates at 0 are all that happens
DEFAULTS = {"criterion": "repair", "repair": "lstsq"}
Batches = list[dict[str, torch.Tensor]]
Removals = list[list[tuple[int, int]]]


def slow_unless_representative(name: str) -> Any:
    return [] if name in REPRESENTATIVE else pytest.mark.slow


def families(*names: str) -> list[Any]:
    chosen = names or FAMILIES
    return [pytest.param(name, id=label(ZOO[name]), marks=slow_unless_representative(name)) for name in chosen]


def batches_of(name: str, *seeds: int) -> Batches:
    return [labelled(ZOO[name], seed) for seed in seeds]


def few_samples(name: str) -> Batches:
    """Batches of two and of one sample, each with padding: a mean of means is not the mean, and the oracle is slow."""
    first, second = batches_of(name, 0, 5)
    return [{key: value[:2] for key, value in first.items()}, {key: value[2:] for key, value in second.items()}]


class Loop:
    """Greedy pruning by hand."""

    def __init__(self, name: str, batches: Batches, criterion: Callable[[Oracle], torch.Tensor]) -> None:
        entry = ZOO[name]
        self.oracle = Oracle(entry.build(), batches, labels_of(entry), next_token=is_language_model(entry))
        self.criterion = criterion
        self.sites = self.oracle.sites
        self.units = all_units(self.sites)
        self.gone: list[tuple[int, int]] = []

    def scores(self) -> torch.Tensor:
        with self.oracle.gates(gates_without(self.sites, self.gone).double()):
            self.oracle.forget()
            return self.criterion(self.oracle)

    def take(self, scores: torch.Tensor, count: int) -> list[tuple[int, int]]:
        """The heads of the lowest units that are left; of equal ones, the first by site and head."""
        left = [unit for unit in self.units if tuple(unit[0]) not in self.gone]
        lowest = sorted(left, key=lambda unit: sum(float(scores[head]) for head in unit) / len(unit))[:count]
        taken = [tuple(head) for unit in lowest for head in unit]
        self.gone += taken
        return taken

    def greedy(self, every: int = 1) -> Removals:
        removals = []
        while len(self.gone) < sum(map(len, self.units)):
            removals.append(self.take(self.scores(), every))
        return removals

    def one_shot(self, every: int = 1) -> Removals:
        scores = self.scores()
        removals = []
        while len(self.gone) < sum(map(len, self.units)):
            removals.append(self.take(scores, every))
        return removals


def gnorm(oracle: Oracle) -> torch.Tensor:
    return oracle.gnorm()


def his(oracle: Oracle) -> torch.Tensor:
    return oracle.his()


def pruned_by(name: str, batches: Batches, **options: Any) -> Any:
    return headprune.prune(ZOO[name].build(), batches, **{**PUBLISHED, **options})


@pytest.mark.parametrize("name", families())
def test_the_same_order_as_the_oracle_down_to_no_heads(name: str) -> None:
    batches = few_samples(name)
    result = pruned_by(name, batches, evaluation=batches_of(name, 7))
    units = all_units(headprune.resolve(ZOO[name].build()))
    assert removal_order(result.trajectory) == Loop(name, batches, gnorm).greedy()
    assert len(result.trajectory) == len(units) + 1  # one unit per step, a group where KV heads are shared
    assert not result.mask.any()
    assert all(not site.kept for site in headprune.resolve(result.model))


def hies(oracle: Oracle) -> torch.Tensor:
    """Scaled anew at every step, over the heads that are left: a gated head has no part in a loss, so its HIS is 0."""
    importance, entropy = oracle.his_of_a_token(), 1 - oracle.entropies(deficit=True)
    left = importance > 0
    scaled = [(v - v[left].min()) / (v[left].max() - v[left].min()) for v in (importance, entropy) if left.sum() > 1]
    return 0.7 * scaled[0] + 0.3 * (1 - scaled[1]) if scaled else importance


CASES = {
    "his": ("bert", "his", his),
    "his-groups": ("llama-gqa", "his", his),
    "inverse": ("bert", "inverse:gnorm", lambda oracle: -oracle.gnorm()),
    "inverse-groups": ("llama-gqa", "inverse:his", lambda oracle: -oracle.his()),
    "hies": ("bert", "hies(alpha=0.7)", hies),
    "entropy": ("vit", "entropy", lambda oracle: oracle.entropy()),
    "residual-gradient": ("bert", "residual-gradient(residual=False)", lambda oracle: oracle.repair(residual=False)),
    "repair-groups": ("llama-gqa", "residual-gradient(residual=False)", lambda oracle: oracle.repair(residual=False)),
    "repair-tied": ("albert", "residual-gradient(residual=False)", lambda oracle: oracle.repair(residual=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_other_criteria(case: str) -> None:
    name, criterion, oracle = CASES[case]
    batches = few_samples(name)
    result = pruned_by(name, batches, criterion=criterion, evaluation=batches_of(name, 7), rescore="every")
    assert removal_order(result.trajectory) == Loop(name, batches, oracle).greedy()


@pytest.mark.parametrize(("name", "every"), [("bert", 1), ("bert", 5), ("llama-gqa", 2), ("bart", 1)])
def test_one_shot(name: str, every: int) -> None:
    batches = batches_of(name, 0, 5)
    result = pruned_by(name, batches, schedule="one-shot", every=every, evaluation=batches_of(name, 7))
    assert removal_order(result.trajectory) == Loop(name, batches, gnorm).one_shot(every)
    first = result.trajectory[1].scores
    for step in result.trajectory[2:]:  # scored once: the same numbers all along, blank where a head is gone
        assert torch.equal(step.scores[~step.scores.isnan()], first[~step.scores.isnan()])


@pytest.mark.parametrize("name", families("bert", "gpt2", "llama-gqa", "albert"))
def test_two_units_per_scoring(name: str) -> None:
    batches = few_samples(name)
    result = pruned_by(name, batches, every=2, evaluation=batches_of(name, 7))
    expected = Loop(name, batches, gnorm).greedy(every=2)
    assert removal_order(result.trajectory) == expected


def test_scoring_again_matters() -> None:
    """Otherwise the tests above could not tell greedy from one-shot."""
    batches = few_samples("bert")
    orders = [removal_order(pruned_by("bert", batches, schedule=kind).trajectory) for kind in ("greedy", "one-shot")]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("options", [PUBLISHED, DEFAULTS], ids=["published", "defaults"])
@pytest.mark.parametrize(("name", "apart"), [("bert", True), ("bert", False), ("llama-gqa", True), ("t5", False)])
def test_two_runs_are_identical(name: str, apart: bool, options: dict[str, Any]) -> None:
    batches = few_samples(name)
    lines = []
    for _ in range(2):
        result = pruned_by(name, batches, evaluation=batches_of(name, 7) if apart else None, **options)
        lines.append([step.to_json() for step in result.trajectory])
    assert lines[0] == lines[1]


# --- what is measured after each step ---


def plain(model: Any, batch: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n x classes] and labels [n] of everything that is judged, from a plain forward of a whole batch."""
    with torch.no_grad():
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if is_language_model(ZOO[name]):
        real = batch["attention_mask"].bool()  # padding neither predicts nor is predicted
        labels = batch["input_ids"][:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED).flatten()
        logits = logits[:, :-1].flatten(0, 1)
    else:
        logits, labels = logits.reshape(-1, logits.shape[-1]), batch["labels"].flatten()
    return logits[labels != IGNORED], labels[labels != IGNORED]


def plain_logits(model: Any, batches: Batches, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    actual = [plain(model, batch, name) for batch in batches]
    return torch.cat([part[0] for part in actual]), torch.cat([part[1] for part in actual])


def measured_by_hand(model: Any, before: torch.Tensor, batches: Batches, name: str) -> dict[str, float]:
    """`before`: the logits of the dense model."""
    logits, labels = plain_logits(model, batches, name)
    loss = float(torch.nn.functional.cross_entropy(logits.double(), labels))
    per_token = len(labels) > sum(len(next(iter(batch.values()))) for batch in batches)
    return {
        "metric": math.exp(loss) if per_token else float((logits.argmax(-1) == labels).double().mean()),
        "agreement": float((logits.argmax(-1) == before.argmax(-1)).double().mean()),
    }


@pytest.mark.parametrize("options", [PUBLISHED, DEFAULTS], ids=["published", "defaults"])
@pytest.mark.parametrize(
    ("name", "apart"),
    [pytest.param(name, True, id=label(ZOO[name]), marks=slow_unless_representative(name)) for name in FAMILIES]
    + [pytest.param(name, False, id=f"{name}-same-data") for name in ("bert", "albert", "gpt2")],
)
def test_every_step_is_measured_as_a_plain_forward_of_that_model_would_be(
    name: str, apart: bool, options: dict[str, Any]
) -> None:
    batches, held_out = batches_of(name, 0), batches_of(name, 7, 8)
    result = pruned_by(name, batches, evaluation=held_out if apart else None, **options)
    judged = held_out if apart else batches
    model = ZOO[name].build()
    before = plain_logits(model, judged, name)[0]
    values = set()
    for step in result.trajectory:
        headprune.remove(model, step.removed, repair=options["repair"], batches=batches)
        expected = measured_by_hand(model, before, judged, name)
        assert step.metric == pytest.approx(expected["metric"], rel=1e-4), step.step
        assert step.agreement == pytest.approx(expected["agreement"], abs=1e-12), step.step
        assert step.heads == sum(site.heads for site in headprune.resolve(model))
        assert step.parameters == sum(parameter.numel() for parameter in model.parameters())
        values.add(round(step.loss, 9))
    assert len(values) > len(result.trajectory) // 2  # most removals can be seen in the loss, so a stale one would be


# --- the layer cache ---


def layers_of(model: Any) -> list[str]:
    return list(dict.fromkeys(layer_path(site.path) for site in headprune.resolve(model)))


def inside(model: Any, layers: Sequence[str]) -> dict[str, torch.nn.Module]:
    """A module within each layer, which runs when the layer computes and not when its output is handed out."""
    actual = {}
    for layer in layers:
        norms = [(path, m) for path, m in model.get_submodule(layer).named_modules() if "Norm" in type(m).__name__]
        actual[layer] = norms[0][1]
    return actual


CACHED = ("bert", "gpt2", "llama-gqa", "t5", "bart", "vit")


@pytest.mark.parametrize("name", families(*CACHED))
def test_layers_below_a_change_are_not_computed_again(name: str) -> None:
    model, batches = ZOO[name].build(), batches_of(name, 7, 8, 9)
    cached, uncached = Evaluator(batches), Evaluator(batches, cache_bytes=0)
    layers = layers_of(model)
    for evaluator in (cached, cached, uncached, uncached):  # the second time looks up what nobody reads
        evaluator(model, headprune.resolve(model))
    for unit in [units[0] for units in (site.units() for site in reversed(headprune.resolve(model)))]:
        headprune.remove(model, unit)
        sites = headprune.resolve(model)
        lowest = layers.index(layer_path(sites[unit[0].site].path))
        with counted_calls(inside(model, layers)) as counts:
            predictions = cached(model, sites, [unit[0].site])
        assert counts == {layer: len(batches) * (n >= lowest) for n, layer in enumerate(layers)}
        with counted_calls(inside(model, layers)) as counts:
            truth = uncached(model, sites, [unit[0].site])
        assert set(counts.values()) == {len(batches)}
        assert torch.equal(predictions.values, truth.values)
        assert predictions.loss == truth.loss  # bit for bit


@pytest.mark.parametrize("name", families(*CACHED))
def test_the_cache_changes_nothing_over_random_removals(name: str) -> None:
    model, batches = ZOO[name].build(), batches_of(name, 7, 8)
    cached, uncached = Evaluator(batches), Evaluator(batches, cache_bytes=0)
    units = all_units(headprune.resolve(model))
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(3)).tolist()
    changed = None
    for number in [None, *order]:
        if number is not None:
            headprune.remove(model, units[number])
            changed = [units[number][0].site]
        sites = headprune.resolve(model)
        assert cached(model, sites, changed).loss == uncached(model, sites, changed).loss


def test_a_tied_layer_is_not_cached() -> None:
    """ALBERT runs one layer again and again: its last output is not that of its first application."""
    model, batches = ZOO["albert"].build(), batches_of("albert", 7, 8)
    evaluator = Evaluator(batches)
    evaluator(model, headprune.resolve(model))
    headprune.remove(model, [(0, 1)])
    sites = headprune.resolve(model)
    with counted_calls({"query": model.get_submodule(sites[0].roles["q"].module)}) as counts:
        predictions = evaluator(model, sites, [0])
    assert counts["query"] == len(batches) * sites[0].applications > len(batches)
    assert predictions.loss == Evaluator(batches, cache_bytes=0)(model, sites, [0]).loss


@pytest.mark.parametrize("share", [0.2, 0.999999, 1.0, 1.5, 2.0, 2.5], ids=str)
def test_any_budget_of_memory_gives_the_same(share: float) -> None:
    """`share` is in outputs of all layers on one batch: budgets that end in the midst of a batch, or just after it."""
    model, batches = ZOO["bert"].build(), batches_of("bert", 7, 8, 9)
    rows, tokens = batches[0]["input_ids"].shape
    first_batch = 3 * rows * tokens * 24 * 4
    limited, uncached = Evaluator(batches, cache_bytes=int(share * first_batch)), Evaluator(batches, cache_bytes=0)
    for evaluator in (limited, uncached):
        evaluator(model, headprune.resolve(model))
    for head in ((2, 0), (1, 3), (2, 1)):
        headprune.remove(model, [head])
        sites = headprune.resolve(model)
        assert limited(model, sites, [head[0]]).loss == uncached(model, sites, [head[0]]).loss


# --- nothing is computed twice ---


def forwards(name: str, **options: Any) -> tuple[int, int]:
    """How often the model ran on a whole batch, and in how many steps.

    The first batch shows at the start that it reaches all sites, which is not counted. A removal is verified on two
    samples, gated and removed: the first one, and the first that empties a site.
    """
    model = ZOO[name].build()
    sizes: list[int] = []

    def note(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    result = headprune.prune(model, batches_of(name, 0, 5), **{**PUBLISHED, **options})
    handle.remove()
    assert set(sizes) <= {2, 3}
    assert sizes.count(2) in (2, 4)
    return sizes.count(3) - 1, len(result.trajectory) - 1


@pytest.mark.parametrize("criterion", ["gnorm", "his", "entropy", "hies", "magnitude", "random"])
def test_scoring_and_evaluation_on_the_same_data_share_one_forward_per_step(criterion: str) -> None:
    calls, steps = forwards("bert", criterion=criterion)
    # Two batches; reading probabilities must not change the logits, which the first batch shows each time.
    batches = 3 if criterion in ("entropy", "hies") else 2
    assert calls == batches * (steps + 1)  # the dense model and every step


def test_held_out_data_is_a_pass_of_its_own() -> None:
    calls, steps = forwards("bert", evaluation=batches_of("bert", 7, 8, 9))
    assert calls == 2 * steps + 3 * (steps + 1)


def test_compensation_takes_what_the_criterion_was_fitted_on() -> None:
    """The pass that scores and measures gathers the moments as well, and nothing is gathered again to repair."""
    calls, steps = forwards("bert", **DEFAULTS)
    assert calls == 2 * (steps + 1)  # two batches; the dense model and every step


def test_compensation_of_other_criteria_is_one_pass_per_step() -> None:
    calls, steps = forwards("bert", repair="lstsq")
    assert calls == 2 * (steps + 1) + 2 * steps


def test_one_shot_scores_once() -> None:
    calls, steps = forwards("bert", schedule="one-shot", evaluation=batches_of("bert", 7, 8, 9))
    assert calls == 2 + 3 * (steps + 1)


@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_a_criterion_of_the_weights_runs_no_scoring_pass(criterion: str) -> None:
    calls, steps = forwards("bert", criterion=criterion, evaluation=batches_of("bert", 7))
    assert calls == steps + 1
