"""Learned gates in transformers' Trainer: one callback, whatever else the training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import forked_python
import headprune
from gate_helpers import DROPLESS, QUIET, gates_after, rows, trainer_of
from headprune.errors import GateError
from headprune.training.learned_gates import NAME
from helpers import difference, identical, outputs
from recovery_helpers import build, labelled, same, weights

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "gates_together.py"


def test_one_callback_and_gates_learn(tmp_path: Path) -> None:
    model = build()
    trainer, callback = trainer_of(model, tmp_path, headprune.GateCallback(l0=0.1, warmup=0.5))
    start = callback.gates.bias.detach().clone()
    trainer.train()
    gates = callback.gates
    assert int(gates.taken) == 6
    assert not torch.equal(gates.bias, start)
    logged = [entry for entry in trainer.state.log_history if "l0_loss" in entry]
    assert len(logged) == 6
    for step, entry in enumerate(logged):
        assert entry["task_loss"] == entry["loss"]
        assert 0 < entry["expected_units"] < 12
        assert entry["open_units"] <= 12
        # After the step of this number: the warm-up takes three.
        assert entry["l0_loss"] <= 0.1 * min(1.0, (step + 1) / 3) * 12
    with torch.no_grad():
        gates.bias[:2] = -3.0
    batch = labelled(1)[0]
    model.eval()
    expected = outputs(model, batch)
    removed = gates.remove(verify=batch)
    assert removed is model
    assert difference(expected, outputs(model, batch)) < 1e-5
    assert NAME not in dict(model.named_modules())


def test_gates_take_steps_of_ten_times_the_learning_rate_without_decay(tmp_path: Path) -> None:
    """The first step of Adam is its learning rate; that of the model is compared in the same run."""
    model = build(**DROPLESS)
    trainer, callback = trainer_of(
        model, tmp_path, max_steps=1, lr_scheduler_type="constant", learning_rate=1e-3, weight_decay=0.5
    )
    before, model_before = callback.gates.bias.detach().clone(), weights(model)
    trainer.train()
    moved = (callback.gates.bias.detach() - before).abs()
    assert moved.max().item() == pytest.approx(1e-2, rel=1e-3)
    others = {name: value for name, value in weights(model).items() if "bias" in name and NAME not in name}
    changed = max((value - model_before[name]).abs().max().item() for name, value in others.items())
    assert changed == pytest.approx(1e-3, rel=1e-3)


def test_accumulated_gradients_are_those_of_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same draw in all forward passes of a step: what gates cost counts once per step, not per batch."""

    def draw(gates: Any) -> None:
        noise = torch.rand(len(gates), generator=torch.Generator().manual_seed(int(gates.taken)))
        gates.noise = noise.to(gates.bias)

    monkeypatch.setattr(headprune.LearnedGates, "draw", draw)
    one, four = (gates_after(tmp_path / str(n), batch_size=4 // n, accumulated=n) for n in (1, 4))
    assert len(set(one)) > 1
    # The same sums in another order, float32 where gates are, over four steps.
    assert four == pytest.approx(one, rel=1e-5)


def resumed(tmp_path: Path, make: Any, callback: Any) -> tuple[Any, Any]:
    """The same training, in one go and from its checkpoint of step 4."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    one = make()
    trainer, first = trainer_of(one, tmp_path / "one", callback(), **options)
    trainer.train()
    other = make()
    trainer, second = trainer_of(other, tmp_path / "two", callback(), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    assert int(first.gates.taken) == int(second.gates.taken) == 6
    assert first.gates.bias.std() > 0
    return one, other


@pytest.mark.parametrize("options", [{"l0": 0.1}, {"keep": 0.5, "difference": 0.1}])
def test_a_resumed_training_ends_at_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    one, other = resumed(tmp_path, build, lambda: headprune.GateCallback(**options))
    assert same(weights(one), weights(other))
    assert same(dict(one.named_buffers()), dict(other.named_buffers()))


def adapted() -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["query", "dense"], task_type="SEQ_CLS", lora_dropout=0.0)
    return peft.get_peft_model(build(), config)


def test_lora_trains_beside_gates_and_resumes(tmp_path: Path) -> None:
    """The Trainer's checkpoint of an adapter has no gates in it; the callback's does."""
    one, other = resumed(tmp_path, adapted, lambda: headprune.GateCallback(keep=0.5))
    assert same(weights(one), weights(other))
    gates = getattr(one.get_base_model(), NAME)
    assert len(gates.closed()) == 6
    batch = labelled(1)[0]
    one.eval()
    expected = outputs(one, batch)
    model = gates.remove(verify=batch)
    assert isinstance(model, transformers.BertForSequenceClassification)
    assert not any(hasattr(module, "lora_A") for module in model.modules())
    assert sum(site.size for site in headprune.resolve(model)) == 6
    assert difference(expected, outputs(model, batch)) < 1e-5


def test_a_trainer_that_restores_its_callbacks(tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "restore_callback_states_from_checkpoint": True,
    }
    one, other = build(), build()
    trainer, _ = trainer_of(one, tmp_path / "one", **options)
    trainer.train()
    trainer, _ = trainer_of(other, tmp_path / "two", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert same(weights(one), weights(other))


def test_a_checkpoint_of_other_gates_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer, _ = trainer_of(adapted(), tmp_path / "one", **options)
    trainer.train()
    callback = headprune.GateCallback(l0=0.1, start=2.5)
    trainer, _ = trainer_of(adapted(), tmp_path / "two", callback, **options)
    with pytest.raises(GateError, match=r"start was 2\.0 and is now 2\.5"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))


def test_bfloat16_and_gradient_checkpointing_in_the_trainer(tmp_path: Path) -> None:
    model = build()
    trainer, callback = trainer_of(model, tmp_path, bf16=True, gradient_checkpointing=True, max_steps=2)
    start = callback.gates.bias.detach().clone()
    trainer.train()
    assert torch.isfinite(callback.gates.bias).all()
    assert not torch.equal(callback.gates.bias, start)


def test_clipping_leaves_the_weight_of_gates_against_the_task_as_it_is(tmp_path: Path) -> None:
    """The Trainer clips the gradient of the task before a callback can add to it."""
    actual = []
    for limit in (0.0, 1e-3):
        callback = headprune.GateCallback(l0=0.1, warmup=0.0, start=0.0)  # where float32 knows the smallest steps
        trainer, _ = trainer_of(build(**DROPLESS), tmp_path, callback, max_steps=1, max_grad_norm=limit, optim="sgd")
        before = callback.gates.bias.detach().clone()
        trainer.train()
        moved = callback.gates.bias.detach() - before
        actual.append(moved / moved.norm())
    assert torch.allclose(*actual, atol=1e-5)


def test_the_best_checkpoint_brings_its_gates(tmp_path: Path) -> None:
    """Also with an adapter, whose checkpoint has none in it."""
    for name, make in (("full", build), ("adapter", adapted)):
        values = iter([1.0, 3.0, 2.0])
        trainer, callback = trainer_of(
            make(),
            tmp_path / name,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="good",
            greater_is_better=True,
        )
        trainer.compute_metrics = lambda _, values=values: {"good": next(values)}
        trainer.train()
        state = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        saved = state["stateful_callbacks"]["GateCallback"]["attributes"]["saved"]["values"]
        assert callback.gates.bias.tolist() == saved["bias"]
        assert int(callback.gates.taken) == 4


def test_a_trainer_without_the_gates_of_its_callback_is_told(tmp_path: Path) -> None:
    callback = headprune.GateCallback(l0=0.1)
    trainer_of(build(), tmp_path, callback)
    trainer, _ = trainer_of(build(), tmp_path, callback)
    with pytest.raises(GateError, match="new callback for every Trainer"):
        trainer.train()
    args = transformers.TrainingArguments(str(tmp_path), **QUIET)
    late = transformers.Trainer(build(), args, train_dataset=rows())
    late.add_callback(headprune.GateCallback(l0=0.1))
    with pytest.raises(GateError, match="when that is made"):
        late.train()
    trainer, _ = trainer_of(None, tmp_path, headprune.GateCallback(l0=0.1), model_init=lambda: build())
    with pytest.raises(GateError, match="model_init"):
        trainer.train()


def test_evaluating_before_training(tmp_path: Path) -> None:
    trainer, _ = trainer_of(build(), tmp_path, headprune.GateCallback(keep=0.5))
    assert trainer.evaluate()["eval_loss"] > 0


def test_half_precision_with_scaled_gradients_is_refused(tmp_path: Path) -> None:
    trainer, callback = trainer_of(build(), tmp_path)
    trainer.args.fp16 = True
    with pytest.raises(GateError, match="use bf16"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_evaluation_sees_decided_gates(tmp_path: Path) -> None:
    model = build()
    callback = headprune.GateCallback(keep=0.5, warmup=0.0)
    trainer, _ = trainer_of(model, tmp_path, callback, max_steps=2)
    trainer.train()
    batch = labelled(1)[0]
    model.eval()
    first = outputs(model, batch)
    assert identical(first, outputs(model, batch))
    assert int(callback.gates.open().sum()) == 6


def test_gates_are_there_only_with_a_trainer() -> None:
    with pytest.raises(GateError, match="Trainer"):
        _ = headprune.GateCallback(l0=0.1).gates


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """The data is shared out, gradients are averaged, and every process holds the same gates."""
    for done in forked_python.run_together(PROGRAM, tmp_path, processes=2):
        assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = gates_after(tmp_path / "alone", batch_size=4)
    # The same sums in another order, float32 where gates are, over four steps.
    assert first == pytest.approx(alone, rel=1e-5)
    assert len(set(first)) > 1
