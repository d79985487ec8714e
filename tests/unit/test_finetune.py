"""Recovery from Python: every task, labels or none, LoRA or all weights, the best checkpoint, and kills on the way."""

from __future__ import annotations

import copy
import errno
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from transformers import TrainerCallback

import forked_python
import headprune
from headprune.data import Examples
from headprune.errors import DataError, HeadpruneError, MissingPackageError, NonFiniteError, TrainingError
from headprune.training import checkpoints
from headprune.training.lora import linear_maps
from headprune.training.schedule import Evaluation, TrainingSchedule, best_evaluation
from helpers import hook_count, outputs
from recovery_helpers import MOMENTS, build, killed, labelled, pair, same, train, unlabelled, weights
from task_models import CASES
from zoo import text_batch

ONE_OF_EACH = list({case.task: case for case in CASES}.values())
PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "train_together.py"


@pytest.mark.slow  # every task of the table
@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)
def test_models_of_every_task_learn(case: Any, lora: int) -> None:
    """From labels, predictions and hidden states; the losses stand in the history, and shapes stay as they were."""
    model = case.build()
    dense = copy.deepcopy(model)
    sites = headprune.resolve(model)
    headprune.remove(model, [head for unit in sites[0].units() for head in unit])
    before, shapes = weights(model), {name: p.shape for name, p in model.named_parameters()}
    batches = [case.batch(seed) for seed in range(2)]
    result = headprune.finetune(model, batches, teacher=dense, batch_size=2, warmup=0.0, lora=lora, evaluation=batches)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert not same(weights(model), before)
    assert result.fitted.steps == len(result.history) == 3
    for entry in result.history:
        parts = [entry[name] for name in ("task_loss", "logits_loss", "hidden_loss")]
        assert entry["loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert result.before is not None
    assert result.after is not None
    assert result.metric is not None
    assert result.metric.name in repr(result)


def test_models_without_a_head_learn_from_the_dense_one() -> None:
    model, dense = pair(transformers.BertModel)
    result = headprune.finetune(
        model, unlabelled(), teacher=dense, epochs=6, learning_rate=1e-3, evaluation=unlabelled()
    )
    assert result.metric is not None
    assert result.metric.name == "fidelity"
    assert result.dense is not None
    assert result.dense.value == pytest.approx(1.0)
    assert result.after.value > result.before.value  # type: ignore[union-attr]


def test_inference_mode_around_a_training_changes_nothing() -> None:
    trained = []
    for inference in (False, True):
        model, dense = pair()
        with torch.inference_mode(inference):
            headprune.finetune(model, labelled(), teacher=dense)
        trained.append(weights(model))
    assert same(*trained)


def test_no_labels_are_needed_with_a_teacher() -> None:
    model, dense = pair()
    result = headprune.finetune(
        model, unlabelled(), teacher=dense, epochs=8, learning_rate=1e-3, validation=unlabelled()
    )
    assert "task_loss" not in result.history[0]
    assert result.history[-1]["logits_loss"] < result.history[0]["logits_loss"]
    assert result.fitted.metric == "fidelity"


def test_no_teacher_is_needed_with_labels(tmp_path: Path) -> None:
    model, _ = pair()
    fitted = train(model, labelled(), tmp_path, epochs=10, validation=labelled())
    assert set(fitted.history[0]) == {"step", "epoch", "loss", "task_loss", "learning_rate"}
    assert fitted.evaluations[-1].loss < fitted.evaluations[0].loss  # type: ignore[operator]


def test_a_teacher_may_be_where_it_was_saved(tmp_path: Path) -> None:
    model, dense = pair()
    other, _ = pair()
    headprune.save(dense, tmp_path / "dense")
    headprune.finetune(model, labelled(), teacher=dense)
    headprune.finetune(other, labelled(), teacher=tmp_path / "dense")
    assert same(weights(model), weights(other))


@pytest.mark.parametrize(
    ("data", "options", "error", "sentence"),
    [
        (unlabelled(), {}, TrainingError, "nothing to learn from"),
        (unlabelled(), {"epochs": 2, "metric": "accuracy", "teach": True}, DataError, "has no labels"),
        ([], {}, DataError, "no training data"),
        (
            [{"input_ids": torch.ones(2, 3).long(), "position_ids": torch.ones(3, 3).long()}],
            {},
            DataError,
            "'position_ids' of batch 0",
        ),
        ([labelled(1)[0], unlabelled(1)[0]], {}, DataError, "entries that others have not"),
        (labelled(), {"epochs": 0}, TrainingError, "epochs must be a number above 0, not 0"),
        (labelled(), {"learning_rate": float("nan")}, TrainingError, "learning_rate must be a number above 0"),
        (labelled(), {"batch_size": 2.5}, TrainingError, "batch_size must be a whole number at least 1, not 2.5"),
        (labelled(), {"validation": 1.0}, TrainingError, "validation must be a number at least 0 and below 1"),
        (labelled(), {"seed": -1}, TrainingError, "seed must be a whole number at least 0 and below"),
        (labelled(), {"report_to": "nowhere"}, TrainingError, "cannot be logged to 'nowhere' here"),
        (labelled(), {"patience": 0}, TrainingError, "patience must be a whole number at least 1, not 0"),
        (labelled(), {"learning": 1}, TrainingError, "no option 'learning'; there are: batch_size,"),
        (labelled(1, size=1), {"epochs": 2}, DataError, "cannot be split"),
    ],
)
def test_bad_input_is_one_sentence(data: Any, options: Any, error: type, sentence: str) -> None:
    model, dense = pair()
    before = weights(model)
    options = dict(options)
    teacher = dense if options.pop("teach", False) else None
    share = {"validation": options.pop("validation")} if "validation" in options else {}
    with pytest.raises(error, match=sentence) as refused:
        headprune.finetune(model, data, teacher=teacher, config=headprune.TrainConfig(**share), **options)
    assert isinstance(refused.value, HeadpruneError)
    assert same(weights(model), before)


@pytest.mark.parametrize(("package", "extra"), [("accelerate", "train"), ("peft", "lora")])
def test_a_missing_package_is_named(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    model, _ = pair()
    with pytest.raises(MissingPackageError, match=rf"{package}; install it with pip install 'headprune\[{extra}\]'"):
        headprune.finetune(model, labelled(), lora=2)


def test_gates_train_with_their_callback_or_not_at_all(tmp_path: Path) -> None:
    model = build()
    callback = headprune.GateCallback(keep=0.5, rate=100)
    asked = {"teacher": build(), "callbacks": [callback], "batch_size": 4, "folder": tmp_path}
    result = headprune.finetune(model, labelled(), **asked)
    assert len(callback.gates.closed()) == 6
    assert result.history[-1]["task_loss"] < result.history[-1]["loss"]
    with pytest.raises(TrainingError, match="train them with a GateCallback"):
        headprune.finetune(model, labelled())
    with pytest.raises(TrainingError, match="leave LoRA out"):
        headprune.finetune(build(), labelled(), lora=2, callbacks=[headprune.GateCallback(keep=0.5)])


def test_a_folder_belongs_to_its_data_and_its_teacher(tmp_path: Path) -> None:
    model, dense = pair()
    train(model, labelled(), tmp_path, teacher=dense)
    for other in ({"teacher": build(hidden_dropout_prob=0.3).requires_grad_(False)}, {"data": labelled(seed=7)}):
        again, dense = pair()
        if "teacher" in other:
            other["teacher"].classifier.bias.data += 1
        settings = {"data": labelled(), "teacher": dense, **other}
        with pytest.raises(HeadpruneError, match="belongs to a training with other settings"):
            train(again, settings["data"], tmp_path, teacher=settings["teacher"])


def test_a_model_cannot_teach_itself(tmp_path: Path) -> None:
    model, _ = pair()
    with pytest.raises(TrainingError, match="its own teacher"):
        train(model, labelled(), tmp_path, teacher=model)
    with pytest.raises(TrainingError, match="frozen"):
        train(model.requires_grad_(False), labelled(), tmp_path)


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    model, dense = pair()
    dense.classifier.bias.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="NaN or Inf at step 1 of training"):
        train(model, labelled(), tmp_path, teacher=dense)


# --- data ---


def test_batches_examples_and_data_sets_are_the_same(tmp_path: Path) -> None:
    batches = labelled()
    rows = [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(4)]
    listed = [{"text": "w1 w2", "label": int(row["labels"]), **_lists(row)} for row in rows]
    import datasets

    found = []
    for number, data in enumerate(
        (batches, Examples(rows, {"input_ids": 1}), datasets.Dataset.from_list(listed), iter(batches))
    ):
        model, _ = pair()
        train(model, data, tmp_path / str(number))
        found.append(weights(model))
    assert all(same(found[0], other) for other in found[1:])


def _lists(row: Any) -> dict[str, Any]:
    return {name: row[name].tolist() for name in ("input_ids", "attention_mask")}


def test_batches_of_other_lengths_are_mixed(tmp_path: Path) -> None:
    """Rows are padded again, and what is padding is no part of the text, whether the batches had a mask or not."""
    short, long = text_batch(0, length=4, size=1), text_batch(1, length=9, size=1)
    found = []
    for number, names in enumerate((("input_ids", "attention_mask"), ("input_ids",))):
        data = [{**{name: b[name] for name in names}, "labels": torch.tensor([1])} for b in (short, long)]
        model, _ = pair()
        train(model, data, tmp_path / str(number))
        found.append(weights(model))
    assert same(*found)


# --- what is kept ---


class Snapshots(TrainerCallback):
    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights[state.global_step] = weights(model)


def scripted(values: list[float]) -> Any:
    """A metric that says these values one after the other."""
    left = iter(values)
    return lambda labels, predictions: next(left)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    model, _ = pair()
    seen = Snapshots()
    said = [0.1, 0.2, 0.9, 0.3, float("nan")]
    fitted = train(
        model, labelled(), tmp_path, epochs=4, callbacks=[seen], metric=scripted(said), validation=labelled(1)
    )
    assert [one.step for one in fitted.evaluations] == [0, 4, 8, 12, 16]
    assert fitted.best_step == 8
    assert same(weights(model), seen.weights[8])
    assert not same(weights(model), seen.weights[16])
    assert sorted(checkpoints.checkpoints(tmp_path)) == [8, 16]  # the best and the last


def test_a_model_that_only_gets_worse_stays_as_it_was(tmp_path: Path) -> None:
    model, _ = pair()
    before = weights(model)
    fitted = train(model, labelled(), tmp_path, epochs=2, metric=scripted([0.5, 0.4, 0.3]), validation=labelled(1))
    assert fitted.best_step == 0
    assert same(weights(model), before)


def test_early_stop(tmp_path: Path) -> None:
    model, _ = pair()
    said = [0.1, 0.5, 0.4, 0.3, 0.9]
    fitted = train(model, labelled(), tmp_path, epochs=4, patience=2, metric=scripted(said), validation=labelled(1))
    assert fitted.stopped_early
    assert (fitted.steps, fitted.best_step) == (12, 4)


def test_a_stopped_training_stays_stopped(tmp_path: Path) -> None:
    """Killed after its last checkpoint, it does not go on; called again when all is done, neither."""

    def go(model: Any) -> Any:
        return train(
            model, labelled(), tmp_path, epochs=4, patience=1, metric=scripted([0.5, 0.4]), validation=labelled(1)
        )

    model, _ = pair()
    killed(lambda: go(pair()[0]), "marked", 1)
    fitted = go(model)
    assert fitted.stopped_early
    assert (fitted.steps, fitted.best_step, fitted.resumed_from) == (4, 0, 4)


def test_part_of_the_data_is_held_out_where_there_is_a_choice(tmp_path: Path) -> None:
    one, several = pair()[0], pair()[0]
    assert train(one, labelled(5), tmp_path / "one").samples == 20
    fitted = train(several, labelled(5), tmp_path / "several", evaluations=2)
    assert fitted.samples == 18
    assert [found.step for found in fitted.evaluations] == [0, 2, 5]
    assert fitted.metric == "accuracy"


def test_equal_metrics_are_told_apart_by_the_loss() -> None:
    from headprune.measure.metrics import METRICS

    found = [
        Evaluation(0, 0.5, 1.0),
        Evaluation(1, 0.5, 0.7),
        Evaluation(2, 0.5, 0.7),
        Evaluation(3, float("nan"), 0.1),
    ]
    assert best_evaluation(found, METRICS["accuracy"]).step == 1
    lower = [Evaluation(0, 20.0), Evaluation(1, 10.0), Evaluation(2, 10.0)]
    assert best_evaluation(lower, METRICS["perplexity"]).step == 1


@pytest.mark.parametrize(
    ("options", "batches", "steps"),
    [
        ({"epochs": 2}, 4, {4, 8}),
        ({"epochs": 1, "evaluations": 2}, 5, {2, 5}),
        ({"epochs": 1.5}, 4, {4, 6}),
        ({"epochs": 1, "evaluations": 9}, 3, {1, 2, 3}),
        ({"epochs": 2, "gradient_accumulation": 3}, 4, {2, 4}),
    ],
)
def test_when_evaluations_are(options: Any, batches: int, steps: set[int]) -> None:
    schedule = TrainingSchedule.of(headprune.TrainConfig(**options), batches, True)
    assert schedule.evaluation_steps == steps
    assert schedule.steps == max(steps)
    assert not TrainingSchedule.of(headprune.TrainConfig(**options), batches, False).evaluation_steps


# --- arithmetic ---


class Gradients(TrainerCallback):
    """Those of the first step, before clipping is of any effect."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.found:
            self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["token-classification-bert", "question-answering-bert-beyond", "causal-lm-own-gpt2"])
def test_accumulated_gradients_are_those_of_one_large_batch(name: str, tmp_path: Path) -> None:
    """Though samples have different numbers of labels, which a mean of means would get wrong."""
    case = next(case for case in CASES if case.id == name)
    found = []
    for size, batches in ((8, 1), (2, 4)):
        model = _without_dropout(case.build())
        dense = copy.deepcopy(model)
        headprune.remove(model, list(headprune.resolve(model)[0].units()[0]))
        seen = Gradients()
        train(
            model,
            [case.batch(seed) for seed in range(4)],
            tmp_path / str(size),
            teacher=dense,
            batch_size=size,
            gradient_accumulation=batches,
            callbacks=[seen],
        )
        found.append(seen.found)
    large, small = found
    norm = torch.stack([value.norm() for value in large.values()]).norm()
    for key, value in large.items():
        assert torch.allclose(value, small[key], atol=1e-10 * float(norm)), key  # float64


def _without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double()


# --- LoRA ---


def test_lora_is_merged_and_leaves_an_ordinary_pruned_model(tmp_path: Path) -> None:
    model, dense = pair()
    before, names = weights(model), [name for name, _ in model.named_modules()]
    train(model, labelled(), tmp_path / "work", teacher=dense, lora=2, warmup=0.0)
    assert [name for name, _ in model.named_modules()] == names
    assert type(model) is transformers.BertForSequenceClassification
    assert all(parameter.requires_grad for parameter in model.parameters())
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {f"{path}.weight" for path in linear_maps(model)}
    for name in changed:
        assert int(torch.linalg.matrix_rank((weights(model)[name] - before[name]).double(), rtol=1e-3)) <= 2
    headprune.save(model, tmp_path / "model")
    loaded = headprune.load(tmp_path / "model")
    batch = text_batch(0)
    assert torch.equal(outputs(loaded, batch)["logits"], outputs(model, batch)["logits"])


def test_lora_leaves_tied_weights_alone() -> None:
    tied = build(transformers.BertForMaskedLM)
    assert "cls.predictions.decoder" not in linear_maps(tied)
    assert "cls.predictions.transform.dense" in linear_maps(tied)


def test_a_failed_lora_leaves_nothing_behind(tmp_path: Path) -> None:
    model, dense = pair()
    dense.classifier.bias.data.fill_(torch.nan)
    before, state = weights(model), [name for name, _ in model.named_modules()]
    with pytest.raises(NonFiniteError):
        train(model, labelled(), tmp_path, lora=2, teacher=dense)
    assert same(weights(model), before)
    assert [name for name, _ in model.named_modules()] == state


# --- nothing else changes ---


def test_all_but_the_weights_is_as_it_was(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == "causal-lm-llama")
    model = case.build()
    dense = copy.deepcopy(model).train()
    headprune.remove(model, list(headprune.resolve(model)[0].units()[0]))
    config, hooks = model.config.to_dict(), hook_count(model) + hook_count(dense)
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    expected = (random.random(), numpy.random.rand(), torch.rand(1).item())
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    train(model, [case.batch(0)], tmp_path, teacher=dense)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == expected
    assert model.config.to_dict() == config
    assert hook_count(model) + hook_count(dense) == hooks
    assert not model.training
    assert dense.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, dense = pair()
    train(model, labelled(), tmp_path, teacher=dense, epochs=2)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""


# --- kills ---


def go(folder: Path, model: Any, dense: Any, **options: Any) -> Any:
    settings = {"epochs": 2, "evaluations": 2, "save_steps": 1, "dropout": True, **options}
    settings["validation"] = labelled(1, seed=9)
    return train(model, labelled(), folder, teacher=dense, **settings)


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
def test_a_killed_training_goes_on_to_the_same_weights(lora: int, tmp_path: Path) -> None:
    """Killed in the midst of writing weights, before and after a checkpoint is whole, again and again, with dropout."""
    model, dense = pair()
    whole = go(tmp_path / "whole", model, dense, lora=lora)
    for number, moment in enumerate(MOMENTS):
        killed(lambda: go(tmp_path / "killed", *pair(), lora=lora), moment, 1 + number % 2)
    other, dense = pair()
    resumed = go(tmp_path / "killed", other, dense, lora=lora)
    assert resumed.resumed_from == 4  # of 8: none, one, one and two checkpoints became whole
    assert same(weights(model), weights(other))
    assert resumed.history == whole.history
    assert resumed.evaluations == whole.evaluations
    assert resumed.best_step == whole.best_step


def test_nothing_is_drawn_unless_it_is_asked_for(tmp_path: Path) -> None:
    """A copy of the teacher has nothing to learn from it in its first step, but for its dropout."""
    for dropout in (False, True):
        dense = build()
        fitted = train(copy.deepcopy(dense), unlabelled(), tmp_path / str(dropout), teacher=dense, dropout=dropout)
        first = fitted.history[0]
        assert (first["logits_loss"] > 1e-3) == dropout
        assert (first["hidden_loss"] > 1e-3) == dropout
        assert first["loss"] < 1e-5 or dropout


def test_checkpoints_that_are_not_whole_are_not_used(tmp_path: Path) -> None:
    model, dense = pair()
    go(tmp_path, model, dense)
    (last,) = [path for step, path in checkpoints.checkpoints(tmp_path).items() if step == 8]
    assert checkpoints.last_whole(tmp_path) == last
    file = last / checkpoints.WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoints.whole(last) is None
    checkpoints.drop_unfinished(tmp_path)
    assert 8 not in checkpoints.checkpoints(tmp_path)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense = pair()
    whole = go(tmp_path / "whole", model, dense)
    write, saves = checkpoints.write_state, []

    def full(model: Any, file: Path) -> None:
        saves.append(file)
        if len(saves) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(model, file)

    monkeypatch.setattr(checkpoints, "write_state", full)
    with pytest.raises(TrainingError, match="No space left on device; make room"):
        go(tmp_path / "full", *pair())
    monkeypatch.setattr(checkpoints, "write_state", write)
    other, dense = pair()
    assert go(tmp_path / "full", other, dense).history == whole.history
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("what", ["option", "model", "damage"])
def test_the_folder_of_another_training_is_refused(what: str, tmp_path: Path) -> None:
    model, dense = pair()
    train(model, labelled(), tmp_path, teacher=dense)
    if what == "damage":
        (tmp_path / checkpoints.RECORD).write_text("{")
    other, dense = pair() if what != "model" else (model, dense)
    rate = 2e-3 if what == "option" else 1e-3
    refused = {
        "option": r"belongs to a training with other settings: learning_rate was 0.001 and is now 0.002; use the same",
        "model": "belongs to a training with other settings: ",
        "damage": r"training\.json is damaged; use another folder\.",
    }[what]
    with pytest.raises(TrainingError, match=refused):
        train(other, labelled(), tmp_path, teacher=dense, learning_rate=rate)


@pytest.mark.slow
def test_two_processes_train_as_one_with_larger_batches(tmp_path: Path) -> None:
    """The losses of 2 x 2 samples a step are those of 4, and both end with one model."""
    for done in forked_python.run_together(PROGRAM, tmp_path, processes=2):
        assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    model, dense = (_without_dropout(one) for one in pair())
    alone = train(model, labelled(), tmp_path / "alone", teacher=dense, epochs=2, validation=labelled(3, seed=9))
    assert len(first["history"]) == len(alone.history) == 8
    for together, own in zip(first["history"], alone.history, strict=True):
        for name in ("loss", "task_loss", "logits_loss", "hidden_loss"):
            assert together[name] == pytest.approx(own[name], rel=1e-6)  # logged in float32
    for together, own in zip(first["evaluations"], alone.evaluations, strict=True):
        assert together == pytest.approx(list(own), rel=1e-6)
