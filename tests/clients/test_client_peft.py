"""peft's LoRA on a pruned model: a step of training, the adapter saved, loaded onto the pruned base, and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from helpers import first_site_and_some
from zoo import ZOO

peft = pytest.importorskip("peft", reason="peft is not installed")
AUTO = {
    "bert": (transformers.AutoModelForSequenceClassification, "SEQ_CLS"),
    "llama-gqa": (transformers.AutoModelForCausalLM, "CAUSAL_LM"),
}


def logits(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("name", AUTO)
@pytest.mark.parametrize("by", ["headprune", "transformers"])
def test_lora_trains_saves_loads_and_merges(name: str, by: str, tmp_path: Path) -> None:
    auto, task = AUTO[name]
    model, batch = ZOO[name].build(), ZOO[name].batch(3)
    headprune.remove(model, first_site_and_some(headprune.resolve(model)))
    headprune.save(model, tmp_path / "base")

    def base() -> Any:
        if by == "headprune":
            return headprune.load(tmp_path / "base")
        return auto.from_pretrained(tmp_path / "base", trust_remote_code=True)

    torch.manual_seed(0)
    adapted = peft.get_peft_model(base(), peft.LoraConfig(task_type=task, r=2, lora_alpha=8))  # targets by model type
    torch.testing.assert_close(logits(adapted, batch), logits(model, batch), atol=1e-6, rtol=1e-5)
    labels = batch["input_ids"] if task == "CAUSAL_LM" else torch.arange(len(batch["input_ids"])) % 2
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted.train()
    adapted(**batch, labels=labels).loss.backward()
    optimizer.step()
    expected = logits(adapted, batch)
    assert (expected - logits(model, batch)).abs().max() > 1e-4
    adapted.save_pretrained(tmp_path / "adapter")

    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, batch), expected, atol=1e-6, rtol=1e-5)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged, batch), expected, atol=1e-5, rtol=1e-4)
    headprune.save(merged, tmp_path / "merged")
    torch.testing.assert_close(logits(headprune.load(tmp_path / "merged"), batch), logits(merged, batch))
