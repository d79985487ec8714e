"""Tiny models and data for random_kills, and the comparison of journals and weights of two runs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.synthetic_text import sentences, tokenizer

ROWS = 36
SAME = ("steps.jsonl", "gates.jsonl", "curve.csv", "config.json")  # and all weights, byte for byte


@dataclass(frozen=True)
class Material:
    root: Path

    @property
    def bert(self) -> Path:
        return self.root / "bert"

    @property
    def llama(self) -> Path:
        return self.root / "llama"

    @property
    def rows(self) -> Path:
        return self.root / "rows.csv"

    @property
    def more(self) -> Path:
        return self.root / "more.csv"

    @property
    def text(self) -> Path:
        return self.root / "text.txt"

    @property
    def run(self) -> Path:
        """A finished run of the classifier, which is fine-tuned; made when it is first asked for."""
        return self.root / "run"


def make_material(folder: Path) -> Material:
    """Models, rows and texts in this folder."""
    import torch
    import transformers

    material = Material(folder)
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    words = tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(words), "hidden_size": 32, "pad_token_id": 1}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 64, "initializer_range": 0.2}
    sizes["max_position_embeddings"] = 64
    bert = transformers.BertConfig(**sizes, num_labels=3, hidden_dropout_prob=0.1)
    llama = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=2)
    built = {
        material.bert: transformers.BertForSequenceClassification(bert),
        material.llama: transformers.LlamaForCausalLM(llama),
    }
    for directory, model in built.items():
        model.save_pretrained(directory)
        words.save_pretrained(directory)
    for file, seed in ((material.rows, 0), (material.more, 1)):
        with file.open("w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(("text", "label"))
            rows.writerows((text, number % 3) for number, text in enumerate(sentences(ROWS, seed)))
    material.text.write_text(" ".join(sentences(120, 2)) + "\n")
    return material


# --- journals ---


def whole_lines(out: Path) -> dict[str, list[bytes]]:
    """The whole lines of every journal in this folder."""
    return {
        str(file.relative_to(out)): [line for line in file.read_bytes().splitlines(True) if line.endswith(b"\n")]
        for file in sorted(out.rglob("steps.jsonl"))
    }


def lost(
    before: dict[str, list[bytes]], now: dict[str, list[bytes]], alone: dict[str, list[bytes]], tolerance: float
) -> Iterator[str]:
    """Steps that were in a journal and are not there any more, and steps that the run left alone did not take."""
    for name, lines in before.items():
        if now.get(name, [])[: len(lines)] != lines:
            yield f"{name} had {len(lines)} steps that are not there any more"
    for name, lines in now.items():
        expected = alone.get(name, [])
        if len(lines) > len(expected) or not all(map(alike, lines, expected, [tolerance] * len(lines))):
            yield f"{name} has steps that the run left alone did not take"


def alike(one: bytes, other: bytes, tolerance: float) -> bool:
    """Whether two lines say the same: every byte, or every number within the tolerance."""
    return one == other or (tolerance > 0 and near(json.loads(one), json.loads(other), tolerance))


def near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name], tolerance) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


def differences(alone: Path, killed: Path, tolerance: float) -> Iterator[str]:
    """What differs between two finished folders in journals, curves, configs and weights; and models do load."""
    one, other = ({str(f.relative_to(out)): f for f in _compared(out)} for out in (alone, killed))
    for name in sorted(one.keys() ^ other.keys()):
        yield f"{name} is in one of them only"
    for name in sorted(one.keys() & other.keys()):
        if one[name].read_bytes() != other[name].read_bytes() and not (tolerance and _close(one[name], other[name])):
            yield f"{name} is another"
    for config in sorted(killed.rglob("model/config.json")):
        try:
            import headprune

            headprune.load(config.parent)
        except Exception as error:
            yield f"{config.parent.relative_to(killed)} does not load: {error}"


def _compared(out: Path) -> list[Path]:
    kept = [file for file in out.rglob("*") if file.name in SAME or file.suffix == ".safetensors"]
    return [file for file in kept if not any(part.startswith(".") for part in file.relative_to(out).parts)]


def _close(one: Path, other: Path) -> bool:
    """Steps line by line to 1e-6, weights to what float32 makes of it."""
    if one.name == "steps.jsonl":
        lines = [file.read_bytes().splitlines() for file in (one, other)]
        return len(lines[0]) == len(lines[1]) and all(alike(a, b, 1e-6) for a, b in zip(*lines, strict=True))
    if one.suffix != ".safetensors":
        return one.name == "curve.csv"  # the same numbers as the journal, rounded
    import torch
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape and torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-6)
        for name in first
    )
