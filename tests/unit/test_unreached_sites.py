"""Sites that no calibration sample reaches, such as the vision tower of a LLaVA on text alone: they have no score, stay
whole and are named, by every criterion, in every schedule and budget, unless they are named as those to prune."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_layerwise_runs import KilledAfter, _KilledError, same_runs

import headprune
from headprune.criteria.registry import REGISTRY
from headprune.errors import DataError, GateError, ScheduleError
from headprune.runs.experiment import run_experiment
from headprune.runs.layerwise import LayerFolder
from headprune.search.budget import prices
from headprune.search.config import Experiment, PruneConfig
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.selection import choose
from headprune.search.settings import command_words
from headprune.search.step_rule import StepRule
from headprune.signals.reached_sites import unreached_sites
from headprune.tasks import task_of
from headprune.units import sites_of
from run_helpers import headprune as program
from run_helpers import material, prune_command, tokenizer
from task_models import CASES
from zoo import ZOO

LLAVA = next(case for case in CASES if case.id == "image-text-to-text-llava")
KINDS = ("heads", "neurons")
IMAGE, OTHER = 3, 7  # the token of an image, and any other
VISION = {0: "model.vision_tower.encoder.layers.0.self_attn", 1: "model.vision_tower.encoder.layers.1.self_attn"}
TOWER = {*VISION, 4, 5}  # with its feed-forward layers


def texts(seed: int) -> dict[str, torch.Tensor]:
    batch = {name: value for name, value in LLAVA.batch(seed).items() if name != "pixel_values"}
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, OTHER)}


def text_batches() -> list[dict[str, torch.Tensor]]:
    return [texts(0), texts(1)]


def language_model(model: Any) -> Any:
    """The language model of a LLaVA as a model of its own, with the same weights: what is left of it on text."""
    plain = transformers.LlamaForCausalLM(model.config.text_config).eval()
    weights = {name.replace("model.language_model", "model"): value for name, value in model.state_dict().items()}
    missing = plain.load_state_dict(
        {name: value for name, value in weights.items() if "vision" not in name}, strict=False
    )
    assert not missing.missing_keys
    return plain


def kept(model: Any) -> list[tuple[int, ...]]:
    return [site.kept for site in sites_of(model, KINDS)]


# --- scores ---


@pytest.mark.parametrize("criterion", sorted(REGISTRY))
def test_scores_are_those_of_the_part_that_runs(criterion: str, caplog: pytest.LogCaptureFixture) -> None:
    """The vision tower had 0 everywhere, and hies was scaled by that 0."""
    model = LLAVA.build()
    with caplog.at_level(logging.WARNING):
        result = headprune.score(model, text_batches(), criterion=criterion)
    assert result.scores[:2].isnan().all()
    assert result.unreached == VISION
    assert VISION[0] in caplog.text
    if criterion == "random":  # which draws numbers for all sites
        assert result.scores[2:].isfinite().all()
    else:
        expected = headprune.score(language_model(model), text_batches(), criterion=criterion).scores
        assert torch.allclose(result.scores[2:], expected, rtol=1e-4, atol=1e-7 * float(expected.abs().max()))


@pytest.mark.parametrize("criterion", ["wanda", "elimination", "magnitude", "taylor"])
def test_neurons_of_a_tower_that_does_not_run_have_no_score(criterion: str) -> None:
    result = headprune.score(LLAVA.build(), text_batches(), criterion=criterion, units="heads,neurons")
    assert {*result.unreached} == TOWER
    for site in result.sites:
        assert result.scores[site.index, list(site.kept)].isnan().all() == (site.index in TOWER)


def test_one_image_is_enough() -> None:
    criteria = ["gnorm", "magnitude", "residual-gradient", "residual-error"]
    result = headprune.score(LLAVA.build(), [texts(0), LLAVA.batch(1)], criteria=criteria)
    assert not result.unreached
    assert all(table.isfinite().all() for table in result.scores.values())


def test_weights_alone_score_every_site() -> None:
    result = headprune.score(LLAVA.build(), criterion="magnitude")
    assert not result.unreached
    assert result.scores.isfinite().all()


def test_shards_of_text_and_of_images_add_up() -> None:
    model, batches, criteria = LLAVA.build(), [texts(0), LLAVA.batch(1)], ["his", "hies", "magnitude"]
    whole = headprune.score(model, batches, criteria=criteria)
    first, second = (headprune.score(model, [batch], criteria=criteria) for batch in batches)
    assert first.unreached == VISION
    for one in (first + second, second + first):
        assert not one.unreached
        assert all(torch.allclose(one.scores[name], whole.scores[name], rtol=1e-9) for name in criteria)
    assert (first + first).unreached == VISION
    assert (first + first).scores["magnitude"][:2].isnan().all()


def test_results_show_sites_without_a_score() -> None:
    result = headprune.score(LLAVA.build(), text_batches(), criterion="gnorm")
    frame = result.to_frame()
    assert frame[frame.site < 2].score.isna().all()
    assert "nan" not in result._repr_html_()
    shown = json.dumps(result.plot().to_dict())
    assert "NaN" not in shown


# --- pruning ---

WAYS: dict[str, dict[str, Any]] = {
    "default": {"keep": 0.8},
    "auto": {"keep": 0.8, "rescore": "auto"},
    "every": {"keep": 0.8, "rescore": "every", "criterion": "gnorm"},
    "every-second": {"keep": 0.8, "rescore": "2", "criterion": "his", "repair": "none"},
    "one-shot": {"keep": 0.8, "schedule": "one-shot", "criterion": "entropy"},
    "weights": {"keep": 0.8, "criterion": "magnitude"},
    "weights-at-once": {"keep": 0.8, "criterion": "magnitude", "schedule": "one-shot"},
    "random": {"keep": 0.8, "criterion": "random"},
    "inverse": {"keep": 0.8, "criterion": "inverse:his"},
    "to-the-end": {"criterion": "gnorm", "explore": True, "max_drop": 0.5},
    "rounds": {"keep_flops": 0.8, "rounds": 2},
    "rounds-of-weights": {"keep_parameters": 0.9, "rounds": 2, "criterion": "magnitude"},
    "uniform": {"keep_flops": 0.85, "rounds": 2, "widths": "uniform"},
    "threshold": {"keep_flops": 0.85, "rounds": 2, "widths": "threshold", "criterion": "wanda"},
    "kwon": {"keep_flops": 0.85, "method": "kwon"},
    "neurons": {"keep": 0.7, "units": "neurons", "rounds": 2, "round_to": 2},
    "layerwise": {"keep_parameters": 0.9, "schedule": "layerwise"},
    "layerwise-uniform": {"keep_parameters": 0.9, "schedule": "layerwise", "widths": "uniform", "round_to": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held_out", [False, True], ids=["", "evaluation"])
def test_a_tower_that_does_not_run_stays_whole(way: str, held_out: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It was the first to be removed, heads and neurons, by every default."""
    model = LLAVA.build()
    before = kept(model)
    evaluation = [LLAVA.batch(5)] if held_out and "layerwise" not in way else None  # whose images change nothing
    with caplog.at_level(logging.WARNING):
        result = headprune.prune(model, text_batches(), evaluation=evaluation, **WAYS[way])
    after = kept(model)
    assert after != before
    assert all(after[index] == before[index] for index in TOWER)
    units = PruneConfig(**WAYS[way]).units
    expected = {site.index for site in sites_of(model, KINDS) if site.index in TOWER and site.kind in units}
    assert {*result.unreached} == expected
    first = next(iter(result.unreached.values()))
    assert caplog.text.count(f"No calibration sample reaches {first}") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 7},
        {"keep": 0.4, "criterion": "magnitude", "schedule": "one-shot"},
        {"keep": 0.3, "units": "neurons"},
        {"keep_parameters": 0.5},
        {"keep_parameters": 0.5, "schedule": "layerwise"},
    ],
)
def test_a_budget_that_needs_the_tower_is_refused(options: dict[str, Any]) -> None:
    model = LLAVA.build()
    before = kept(model)
    with pytest.raises(
        ScheduleError, match=r"would still be .*left whole: .*and \d more: no calibration sample reaches"
    ):
        headprune.prune(model, text_batches(), **options)
    assert kept(model) == before


def test_data_that_reaches_nothing_to_prune_is_refused() -> None:
    model = LLAVA.build()
    units = [member for site in sites_of(model)[2:] for unit in site.units() for member in unit]
    headprune.remove(model, units)  # what is left are the heads of the vision tower
    with pytest.raises(DataError, match=r"No calibration sample reaches .*and 1 more, so there is nothing to prune"):
        headprune.prune(model, text_batches(), keep=0.9)


# --- sites that are named ---


def test_named_sites_are_pruned_alone() -> None:
    entry = ZOO["bert"]
    model, batches = entry.build(), [entry.batch(0), entry.batch(1)]
    headprune.prune(model, batches, criterion="gnorm", sites="1", keep=9)
    assert [site.size for site in headprune.resolve(model)] == [4, 1, 4]
    model = entry.build()
    headprune.prune(model, batches, keep_parameters=0.9, sites=[0, 3], rounds=2, round_to=2)
    assert [site.index for site in sites_of(model, KINDS) if site.size < site.original] in ([0], [3], [0, 3])
    with pytest.raises(ScheduleError, match=r"left whole: .*it is not among the sites to prune"):
        headprune.prune(entry.build(), batches, criterion="gnorm", sites="1", keep=7)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.8, "repair": "none"},
        {"keep": 0.8, "repair": "lstsq"},
        {"keep": 0.8, "schedule": "one-shot"},
        {"keep_parameters": 0.97, "units": "heads", "rounds": 2},
        {"keep_parameters": 0.97, "units": "heads", "rounds": 2, "repair": "lstsq"},
    ],
)
def test_a_tower_that_is_named_is_pruned_by_its_weights(options: dict[str, Any]) -> None:
    model = LLAVA.build()
    before = kept(model)
    result = headprune.prune(model, text_batches(), criterion="magnitude", sites="0-1", **options)
    after = kept(model)
    assert any(after[index] != before[index] for index in VISION)
    assert all(after[index] == before[index] for index in range(len(after)) if index not in VISION)
    assert not result.unreached
    assert result.result.agreement == 1.0  # text does not reach what was removed


def test_a_tower_that_is_named_has_no_score_by_data() -> None:
    with pytest.raises(DataError, match=r"so residual-gradient has no score there; .*such as magnitude"):
        headprune.prune(LLAVA.build(), text_batches(), keep=0.9, sites=[0])
    with pytest.raises(ScheduleError, match="prunes layers as they run, and no calibration sample reaches"):
        headprune.prune(
            LLAVA.build(), text_batches(), keep_parameters=0.99, schedule="layerwise", criterion="magnitude", sites=[0]
        )


@pytest.mark.parametrize("sites", ["a", "3-1", "", [], [1.5], [-1], "-1", 5.0])
def test_what_are_no_numbers_of_sites_is_refused(sites: Any) -> None:
    with pytest.raises(ScheduleError, match="sites takes numbers of sites"):
        PruneConfig(sites=sites)


def test_sites_that_there_are_not_are_refused() -> None:
    batches = [ZOO["bert"].batch(0)]
    with pytest.raises(ScheduleError, match="There is no site 3: the model has sites 0 to 2"):
        headprune.prune(ZOO["bert"].build(), batches, sites="1-3", keep=9)
    with pytest.raises(ScheduleError, match=r"Site 0 .* has heads, and neurons are pruned"):
        headprune.prune(ZOO["bert"].build(), batches, sites="0", keep=0.9, units="neurons")


def test_sites_are_a_setting_of_a_run() -> None:
    config = PruneConfig(sites=[5, 0, 1, 2])
    assert config.sites == (0, 1, 2, 5)
    assert config.settings()["sites"] == "0-2,5"
    assert PruneConfig(sites=config.settings()["sites"]).sites == config.sites
    assert config.with_options(keep=3).sites == config.sites


# --- data that reaches a site only at times ---


def test_a_site_that_a_later_batch_reaches_is_no_exception() -> None:
    """Widths that are the same everywhere were decided by the first sample alone."""
    entry = ZOO["gpt2-cross"]
    without = {name: value for name, value in entry.batch(1).items() if "encoder" not in name}
    model = entry.build()
    config = PruneConfig(keep_parameters=0.9, schedule="layerwise", widths="uniform", round_to=2)
    for batches, reached in (([without, entry.batch(2)], True), ([without, without], False)):
        pruning = LayerwisePruning(model, batches, config, task_of(model))
        pruning.widths()
        cross = {site.index for site in sites_of(model, KINDS) if site.attention == "cross"}
        assert cross
        assert {*pruning.candidates.unreached} == (set() if reached else cross)


def test_units_without_a_score_are_not_chosen() -> None:
    """A site that samples reached when the model was dense, and do not reach any more."""
    model = ZOO["bert"].build()
    sites = sites_of(model, KINDS)
    scores = torch.rand(len(sites), max(site.original for site in sites), generator=torch.Generator().manual_seed(0))
    scores[1] = torch.nan
    assert {member.site for member in StepRule(every=99).choose(scores, sites[:3])} == {0, 2}
    model_prices = prices(model, sites, "parameters")
    for widths in ("global", "uniform", "threshold"):
        target = 0.9 * model_prices.dense
        chosen = choose(scores, sites, model_prices, target, kinds=KINDS, round_to=2, widths=widths)
        assert chosen
        assert 1 not in {member.site for member in chosen}


# --- the command line ---


@pytest.fixture(scope="module")
def saved_llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = headprune.save(LLAVA.build(), tmp_path_factory.mktemp("llava") / "model")
    tokenizer(token_types=False).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow  # the layout of LLaVA is discovered for its checkpoint
@pytest.mark.parametrize("budget", [("--keep", "0.8"), ("--keep-parameters", "0.95", "--schedule", "layerwise")])
def test_a_run_on_text_names_the_tower(
    saved_llava: str, budget: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    done = program(*prune_command(saved_llava, material().unlabelled_csv, out, *budget, "--json"))
    assert done.code == 0, done.err
    unreached = {str(site): path for site, path in VISION.items()}
    assert done.json["unreached"].items() >= unreached.items()
    assert f"No calibration sample reaches {VISION[0]}" in caplog.text
    record = json.loads((out / "run.json").read_text())
    assert record["result"]["unreached"] == done.json["unreached"]
    assert "so nothing was removed there." in (out / "model" / "README.md").read_text()
    assert [site.size for site in headprune.resolve(headprune.load(out))][:2] == [4, 4]


@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_a_resumed_run_names_the_tower(
    widths: str, saved_llava: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The widths of the killed process were read again, and with them no word of the tower."""
    experiment = Experiment(
        model=saved_llava,
        data=str(material().unlabelled_csv),
        keep_parameters=0.95,
        schedule="layerwise",
        widths=widths,
        batch_size=4,
        max_length=12,
    )
    whole = run_experiment(experiment, tmp_path / "whole", publish=False)
    assert whole["result"]["unreached"].items() >= {str(site): path for site, path in VISION.items()}.items()
    with pytest.raises(_KilledError):
        run_experiment(experiment, tmp_path / "parts", publish=False, observer=KilledAfter(1))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resumed = run_experiment(experiment, tmp_path / "parts", publish=False)
    assert resumed["result"] == whole["result"]
    assert caplog.text.count(f"No calibration sample reaches {VISION[0]}") == 1
    same_runs(tmp_path / "whole", tmp_path / "parts")
    file = tmp_path / "parts" / "layers" / "widths.json"
    former = json.loads(file.read_text())["widths"]
    file.write_text(json.dumps(former))  # the form of an earlier version
    pruning = LayerwisePruning(LLAVA.build(), text_batches(), experiment, task_of(LLAVA.build()))
    assert LayerFolder.widths(SimpleNamespace(parts=file.parent), pruning) == {int(k): v for k, v in former.items()}


def test_a_budget_that_needs_the_tower_writes_nothing(saved_llava: str, tmp_path: Path) -> None:
    for budget in (("--keep", "4"), ("--keep-parameters", "0.5")):
        out = tmp_path / "run"
        done = program(*prune_command(saved_llava, material().unlabelled_csv, out, *budget))
        assert done.code == 2
        assert "no calibration sample reaches it" in done.err
        assert not out.exists()


def test_scores_of_text_name_the_tower(saved_llava: str) -> None:
    done = program("score", saved_llava, "--data", material().unlabelled_csv, "--criterion", "gnorm", "--json")
    assert done.json["unreached"] == {str(site): path for site, path in VISION.items()}
    assert done.json["scores"][:2] == [[None] * 4] * 2
    shown = program("score", saved_llava, "--data", material().unlabelled_csv, "--criterion", "gnorm")
    assert shown.code == 0
    assert "nan" not in shown.out


def test_sites_on_the_command_line(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    done = program(*prune_command(m.bert, m.data_csv, out, "--sites", "1-2", "--keep", "8", "--criterion", "gnorm"))
    assert done.code == 0, done.err
    sizes = [site.size for site in headprune.resolve(headprune.load(out))]
    assert sizes[0] == 4
    assert sum(sizes) == 8
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert settings["sites"] == "1-2"
    words = command_words(settings)
    assert words[words.index("--sites") + 1] == "1-2"
    refused = program(*prune_command(m.bert, m.data_csv, tmp_path / "other", "--sites", "7", "--keep", "8"))
    assert refused.code == 2
    assert "There is no site 7" in refused.err
    assert not (tmp_path / "other").exists()


# --- learned gates ---


def learn(gates: headprune.LearnedGates, batches: Any, steps: int) -> None:
    model, optimizer = gates.model, torch.optim.AdamW(gates.parameter_groups(1e-3))
    for step in range(steps):
        batch = batches(step)
        batch.setdefault("labels", batch["input_ids"])
        (model(**batch).loss + gates.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.6},
        {"keep": 0.6, "straight_through": False},
        {"keep_parameters": 0.9, "group": 4},
        {"l0": 1.0, "rate": 300.0},
    ],
)
def test_gates_of_a_tower_that_does_not_run_stay_open(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They make no difference to the loss, so they were the first to close."""
    torch.manual_seed(0)
    model = LLAVA.build().train()
    gates = headprune.LearnedGates(model, steps=30, **options)
    learn(gates, texts, 30)
    closed = gates.closed()
    assert closed
    assert not {member.site for member in closed} & TOWER
    assert {site.index for site in gates.reach.sites()} == {site.index for site in gates.sites if site.index in TOWER}
    assert gates.report()["open_units"] == int(gates.sizes.sum()) - len(closed)
    if "keep" in options:
        assert len(closed) == 16 - 10
        assert gates.report()["expected_units"] == pytest.approx(16 * 0.6, abs=0.5)
    tower = {name: value.clone() for name, value in model.state_dict().items() if "vision" in name}
    with caplog.at_level(logging.WARNING):
        gates.remove(verify=texts(0))
    assert f"No training sample reaches {VISION[0]} and" in caplog.text
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in tower.items())


def test_gates_of_a_tower_that_runs_later_can_close() -> None:
    torch.manual_seed(0)
    gates = headprune.LearnedGates(LLAVA.build().train(), keep=0.5, steps=20)
    learn(gates, texts, 2)
    assert [site.index for site in gates.reach.sites()] == [*VISION]
    gates.model.eval()
    gates.model(**LLAVA.batch(1))  # an evaluation teaches the gates nothing
    gates.model.train()
    learn(gates, texts, 1)
    assert gates.reach.sites()
    learn(gates, LLAVA.batch, 1)
    assert not gates.reach.sites()


def test_a_target_that_needs_gates_of_the_tower_is_refused() -> None:
    torch.manual_seed(0)
    model = LLAVA.build().train()
    gates = headprune.LearnedGates(model, keep=0.4, steps=4)
    learn(gates, texts, 4)
    with pytest.raises(ScheduleError, match=r"which no training sample reaches, 0\.5 is the least"):
        gates.remove()
    assert gates.attached


def test_gates_that_no_sample_reaches_cannot_learn() -> None:
    model = LLAVA.build().train()
    units = [member for site in sites_of(model)[2:] for unit in site.units() for member in unit]
    headprune.remove(model, units)
    gates = headprune.LearnedGates(model, keep=0.5, steps=4)
    with pytest.raises(GateError, match="No training sample reaches a unit that has a gate"):
        learn(gates, texts, 1)


def test_a_training_on_text_names_the_tower(saved_llava: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "run"
    words = ["--data", material().unlabelled_csv, "--keep", "0.7", "--epochs", "1", "--finetune-epochs", "0"]
    done = program("train", saved_llava, *words, "--out", out, "--json")
    assert done.code == 0, done.err
    assert f"No training sample reaches {VISION[0]} and 1 more, so nothing is removed there" in caplog.text
    record = json.loads((out / "run.json").read_text())
    assert record["result"]["unreached"] == {str(site): path for site, path in VISION.items()}
    sizes = [site.size for site in headprune.resolve(headprune.load(out))]
    assert sizes[:2] == [4, 4]
    assert sum(sizes) == 12


# --- experts ---

PAD, ROUTED = 0, 5  # the tokens that the second expert gets


def mixture() -> Any:
    """An encoder whose layer of two experts sends PAD and ROUTED to the second, and all other tokens to the first."""
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        vocab_size=12,
        d_model=8,
        d_kv=4,
        num_heads=2,
        num_layers=2,
        num_sparse_encoder_layers=1,
        d_ff=6,
        num_experts=2,
        expert_capacity=64,
        router_jitter_noise=0.0,
    )
    model = transformers.SwitchTransformersEncoderModel(config).eval()
    with torch.no_grad():
        direction = model.shared.weight.new_full((8,), 50.0)
        for token, row in enumerate(model.shared.weight):
            row += -direction if token in (PAD, ROUTED) else direction
        classifier = model.encoder.block[1].layer[1].mlp.router.classifier
        classifier.weight.copy_(torch.stack([direction, -direction]))
    return model


@pytest.mark.parametrize(
    ("last", "unreached"), [(7, {"encoder.block.1.layer.1.mlp.experts.expert_1"}), (ROUTED, set())]
)
def test_an_expert_that_gets_only_padding_is_not_reached(last: int, unreached: set[str]) -> None:
    """Its neurons had the score 0, so that they were removed first."""
    ids = torch.tensor([[3, 4, 6, last], [8, 9, PAD, PAD]])
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    model = mixture()
    result = headprune.score(model, [batch], criterion="wanda", units="heads,neurons")
    assert {*result.unreached.values()} == unreached
    sites = sites_of(model, KINDS)
    assert {site.path for site in unreached_sites(model, sites, [batch], task_of(model))} == unreached
    # Without padding, the second expert is called without a token, or with one.
    alone = [{"input_ids": ids[:1]}, {"input_ids": ids[1:, :2]}]
    assert {*headprune.score(model, alone, criterion="wanda", units="heads,neurons").unreached.values()} == unreached
