"""`inspect --plan`: published sizes, terms by hand, passes that real runs take, and the page that shows all of it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.checkpoint.save_load import load_structure
from headprune.measure.costs import total_parameters
from headprune.repair.dense_targets import DenseTargets
from headprune.runs.experiment import cast_like_checkpoint
from headprune.search.config import PruneConfig
from headprune.search.forecast import Calibration, Need, Shape, forecast, shared_terms
from headprune.search.forecast import repair_passes as planned_passes
from headprune.search.pruner import Pruner
from headprune.signals.tokens import draws_for
from headprune.tasks import task_of
from headprune.units import all_sites
from run_helpers import headprune as program

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (
        {
            **LLAMA,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "dtype": "float16",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
        6_738_415_616,
    ),
    "Llama-3-70B": (
        {
            **LLAMA,
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "dtype": "bfloat16",
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
        70_553_706_496,
    ),
    "BERT-base": ({"architectures": ["BertModel"], "model_type": "bert"}, 109_482_240),
}
TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def structures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The models of these configs without their weights."""
    folder = tmp_path_factory.mktemp("configs")
    actual = {}
    for name, (settings, _) in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
        actual[name] = load_structure(folder / f"{name}.json")
    return actual


@pytest.fixture(scope="module")
def plans(structures: dict[str, Any]) -> dict[str, dict[str, Need]]:
    return {
        name: {need.schedule: need for need in forecast(model, Calibration())} for name, model in structures.items()
    }


def tiny(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **settings})).eval()


def batches(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(size)
    ids = [torch.randint(5, 50, (size, 8), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_the_published_ones(name: str, structures: dict[str, Any]) -> None:
    assert total_parameters(structures[name]) == CONFIGS[name][1]


def test_terms_of_a_7b_by_hand(plans: dict[str, dict[str, Need]]) -> None:
    """4,096 wide, 11,008 neurons, 32 layers; 128 samples of 128 tokens, 32 at once, in float32."""
    terms = plans["Llama-2-7B"]["greedy"].phases["scoring"]
    assert terms["tokens of sites"] == 8 * 128 * 128 * 2 * 4096 * 4 == 2**32  # of eight layers of 32
    assert plans["Llama-2-7B"]["greedy"].per_step == 4 * 3
    assert terms["weights"] == terms["dense copy"] == 4 * CONFIGS["Llama-2-7B"][1]
    assert plans["Llama-2-7B"]["greedy"].phases["fitting"]["moments"] == 2 * 4096**2 * 8
    maps = 4 * 4096 + 2 * 11008 + 4096  # what q, k, v, o, gate, up and down give
    assert terms["saved for backward"] == 32 * 128 * 32 * (maps + 4096 + 11008) * 4
    assert terms["logits"] == 3 * 32 * 8 * 32000 * 4 + 32 * 128 * 4096 * 4  # 8 tokens of each are 32 MB in float32
    assert plans["Llama-2-7B"]["greedy"].phases["evaluating"]["logits"] == 2 * 32 * 8 * 32000 * 4
    held = plans["Llama-2-7B"]["rounds"].phases["repairing"]
    assert held["dense outputs"] == 2**32  # the rest is in files
    assert held["moments"] == 2 * 11008 * (11008 + 4096) * 8
    assert "logits" not in held
    swept = plans["Llama-2-7B"]["layerwise"].phases["repairing"]
    assert swept["two layers"] == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) * 4
    streams = 2 * (128 + 128) + 2 * 2 * 128  # samples in both models; for two sites what they give, and add to
    assert swept["activations"] == streams * 128 * 4096 * 4
    assert swept["moments"] == 2 * 11008 * (11008 + 4096) * 4


def test_targets_of_repairs_are_counted_where_memory_holds_them(structures: dict[str, Any]) -> None:
    needs = forecast(structures["Llama-2-7B"], Calibration(memory=2**40))
    (rounds,) = [need for need in needs if need.schedule == "rounds"]
    assert rounds.phases["repairing"]["dense outputs"] == 128 * 128 * 64 * 2 * 4096 * 4


def test_small_logits_and_those_of_other_tasks_are_counted_whole() -> None:
    data = Calibration(samples=4, length=8, batch_size=4)
    shape = Shape.of(tiny(), torch.float32)
    assert shape.in_blocks
    assert shared_terms(shape, data)["logits, backward"] == 3 * 4 * 8 * 50 * 4
    masked = transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    )
    data = Calibration(samples=32, length=128, batch_size=32)
    assert shared_terms(Shape.of(masked, torch.float32), data)["logits, backward"] == 3 * 32 * 128 * 30522 * 4


def test_layerwise_needs_as_much_whatever_the_depth() -> None:
    needs = [
        {need.schedule: need.memory for need in forecast(tiny(num_hidden_layers=layers), Calibration())}
        for layers in (2, 4)
    ]
    assert needs[0]["layerwise"] == needs[1]["layerwise"]
    assert needs[0]["greedy"] < needs[1]["greedy"]


class Counter:
    """Forward and backward passes over batches of so many samples, as the last layer sees them."""

    def __init__(self, model: Any, size: int) -> None:
        self.forwards = self.backwards = 0
        self.size = size
        self.model = model

    def __enter__(self) -> Counter:
        layer = self.model.model.layers[-1]

        def starts(module: Any, args: Any) -> None:  # a pass may end within the layer
            self.forwards += module is layer and len(args[0]) == self.size

        def ends(module: Any, args: Any, output: Any) -> None:
            if module is layer and len(args[0]) == self.size and output.requires_grad:
                output.register_hook(self._back)

        every = torch.nn.modules.module
        self.handles = [every.register_module_forward_pre_hook(starts), every.register_module_forward_hook(ends)]
        return self

    def _back(self, gradient: torch.Tensor) -> None:
        self.backwards += 1

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("schedule", ["greedy", "rounds"])
def test_scoring_takes_as_many_passes_as_planned(schedule: str) -> None:
    model = tiny()
    data = batches(2, 3)
    config = PruneConfig(schedule=schedule, **({"keep_parameters": 0.9, "rounds": 2} if schedule == "rounds" else {}))
    pruner = Pruner(model, data, config, evaluation=batches(1, 2))
    next(pruner)
    with Counter(model, 3) as count:
        pruner.state.scorer.scores(pruner.state.sites)
    needs = {need.schedule: need for need in forecast(tiny(), Calibration(samples=6, length=8, batch_size=3))}
    planned = needs[schedule].per_step
    if schedule == "rounds":  # without the repair
        shape = Shape.of(tiny(), torch.float32)
        planned -= planned_passes(shape)
        assert draws_for(torch.zeros(1, 8, 50)) == 2
    assert (count.forwards + 2 * count.backwards) / len(data) == planned


def test_one_shot_scores_once_and_then_takes_a_pass_as_far_as_a_site() -> None:
    model, data = tiny(), batches(2, 3)
    pruner = Pruner(model, data, PruneConfig(schedule="one-shot"), evaluation=batches(1, 2))
    next(pruner)
    passed: list[Any] = []

    def seen(module: Any, args: Any) -> None:
        if module in list(model.model.layers) and len(args[0]) == 3:
            passed.append(module)

    next(pruner)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(seen)
    try:
        step = next(pruner)
    finally:
        handle.remove()
    site = step.removed[0][0]
    assert len(passed) == len(data) * (site + 1)  # layers up to the one that lost a head


def test_repairs_take_as_many_passes_as_planned() -> None:
    """Counted in layers; the last one need not run once it is repaired, and the first tells how layers are called."""
    model, data = tiny(), batches(2, 3)
    task, sites = task_of(model), all_sites(model)
    with Counter(model, 3) as count:
        dense = DenseTargets(model, sites, data, task)
    assert count.forwards + 2 * count.backwards == 3 * len(data)
    runs: list[int] = []
    handles = [layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1)) for layer in model.model.layers]
    dense.repair(model, sites, "dense")
    for handle in handles:
        handle.remove()
    passes = len(runs) / len(data) / len(model.model.layers)
    assert passes == planned_passes(Shape.of(model, torch.float32))


def test_a_backward_pass_keeps_about_what_the_plan_says() -> None:
    """Every tensor that the graph of a Llama holds, by its storage; the first layer has no gradient up to its heads."""
    model = tiny(hidden_size=64, intermediate_size=172)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    data = batches(1, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        headprune.score(model, data, criterion="residual-gradient(residual=False)")
    planned = data[0]["input_ids"].numel() * Shape.of(model, torch.float32).saved * 4
    assert 0.85 < sum(storage.nbytes() for storage in held.values()) / planned < 1.0


def test_the_copy_to_write_is_the_model_in_the_other_precision(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    written = cast_like_checkpoint(tmp_path, model)
    expected = copy.deepcopy(model).to(torch.bfloat16)
    assert written.lm_head.weight is written.model.embed_tokens.weight
    assert [name for name, _ in written.named_buffers()] == [name for name, _ in expected.named_buffers()]
    for one, other in zip(
        (*written.parameters(), *written.buffers()), (*expected.parameters(), *expected.buffers()), strict=True
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    assert next(model.parameters()).dtype == torch.float32


def test_the_program_says_it_and_refuses_a_precision_that_there_is_not(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, **TINY}))
    asked = ("inspect", config, "--plan", "--calibration-samples", "16", "--max-length", "4096", "--batch-size", "4")
    said = program(*asked, "--json").json
    assert said["data"] == {"samples": 16, "evaluation": 16, "length": 64, "batch_size": 4, "dtype": "float32"}
    assert [need["schedule"] for need in said["plan"]] == ["greedy", "one-shot", "rounds", "layerwise"]
    for need in said["plan"]:
        assert need["memory"] == max(sum(terms.values()) for terms in need["phases"].values())
    shown = program(*asked)
    assert shown.code == 0
    assert "passes a step" in shown.out
    refused = program(*asked, "--dtype", "float8")
    assert (refused.code, refused.out) == (2, "")
    assert "There is no precision 'float8'" in refused.err


# --- the page ---


def test_the_page_has_every_term(plans: dict[str, dict[str, Need]]) -> None:
    written = set(re.findall(r"^\| `([a-z ]+)` \| ", PAGE, re.MULTILINE))
    terms = {
        term for needs in plans.values() for need in needs.values() for own in need.phases.values() for term in own
    }
    assert written == terms


def test_the_page_has_the_numbers_of_the_plan(plans: dict[str, dict[str, Need]]) -> None:
    rows = re.findall(r"^\| ([A-Z][^|]*) \| ([a-z-]+) \| ([\d.]+) \| ([^|]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    expected = [
        (name, schedule, f"{need.memory / 1e9:.1f}", need.phase, f"{need.forwards:,.0f}")
        for name, needs in plans.items()
        for schedule, need in needs.items()
    ]
    assert rows == expected
