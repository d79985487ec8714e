"""What the tests of runs share: tiny model folders with a real tokenizer, data files of every kind, and the program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headprune.cli import main as cli
from headprune.measure.trajectory import Step
from zoo import BERT, LABELS, VOCAB, ZOO, spread

SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")  # [PAD] is 1, as in the zoo's configs
WORDS = tuple(f"w{number}" for number in range(len(SPECIAL), VOCAB))
COLOURS = ("red", "green", "blue")
STEP_KEYS = {"step", "removed", "metric", "agreement", "loss", "parameters", "scores", "compensation"}
ROWS = 36


@dataclass(frozen=True)
class Material:
    """A folder with model folders and data files; the properties name them."""

    root: Path

    def __getattr__(self, name: str) -> str:
        """`material.bert` is the folder models/bert; `material.data_csv` the file data.csv."""
        folder = self.root / "models" / name
        stem, _, suffix = name.rpartition("_")
        file = self.root / f"{stem}.{suffix}"
        actual = folder if folder.exists() else file
        if not actual.exists():
            raise AttributeError(name)
        return str(actual)


def tokenizer(*, token_types: bool = True) -> Any:
    """One id per word; texts start with [CLS] and end with [SEP], pairs have token types 0 and 1."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])],
    )
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=inputs, **dict(zip(names, SPECIAL, strict=True))
    )


def bert(model_class: Any = transformers.BertForSequenceClassification, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(transformers.BertConfig(**{**BERT, **settings}))
    spread(model)
    return model.eval()


def classifier(**settings: Any) -> Any:
    """Its labels have names, and it says each of them often: on average over some texts, none has the larger logit."""
    names = {"id2label": dict(enumerate(COLOURS)), "label2id": {name: n for n, name in enumerate(COLOURS)}}
    model = bert(**{**names, **settings})
    with torch.no_grad():
        encoded = tokenizer()(sentences(50, seed=9), padding=True, return_tensors="pt")
        model.classifier.bias -= model(**encoded).logits.mean(0)
    return model


def sentences(count: int, seed: int = 0, longest: int = 9) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, longest))) for _ in range(count)]


def mostly_right(model: Any, texts: Sequence[str], seed: int = 0) -> list[int]:
    """Labels of which the model gets about five in six right, so that a curve has somewhere to fall from."""
    rng = random.Random(seed)
    with torch.no_grad():
        encoded = tokenizer()(list(texts), padding=True, return_tensors="pt")
        said = model(**encoded).logits.argmax(-1).tolist()
    return [label if rng.random() < 5 / 6 else rng.randrange(LABELS) for label in said]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    import pandas

    frame = pandas.DataFrame(list(rows))
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl")
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return str(path)


@functools.cache
def material() -> Material:
    """Made once per process, gone when it ends."""
    root = Path(tempfile.mkdtemp(prefix="headprune-runs-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    _write_models(root / "models")
    texts = sentences(ROWS)
    named = [COLOURS[label] for label in mostly_right(classifier(), texts)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, named, strict=True)]
    for suffix in ("csv", "tsv", "jsonl", "json", "parquet"):
        write_rows(root / f"data.{suffix}", rows)
    write_rows(root / "unlabelled.csv", [{"text": text} for text in texts])
    other = sentences(ROWS, seed=1)
    pairs = [
        {"sentence1": a, "second": b, "target": n % LABELS} for n, (a, b) in enumerate(zip(texts, other, strict=True))
    ]
    write_rows(root / "pairs.tsv", pairs)
    numbers = [{"text": text, "label": round(0.37 * n - 3, 2)} for n, text in enumerate(texts)]
    write_rows(root / "numbers.csv", numbers)
    (root / "words.txt").write_text(" ".join(sentences(30, seed=2)) + "\n")
    _write_images(root)
    return Material(root)


def _write_models(folder: Path) -> None:
    lm = transformers.BertForMaskedLM
    built = {
        "bert": classifier(),
        "wide": classifier(hidden_size=32, num_hidden_layers=4, num_attention_heads=8),  # more steps to be killed in
        "regressor": bert(num_labels=1, problem_type="regression"),
        "masked": bert(lm),
        "gpt2": ZOO["gpt2"].build(),
        "llama": ZOO["llama-gqa"].build(),
        "albert": ZOO["albert"].build(),
        "vit": ZOO["vit"].build(),
    }
    for name, model in built.items():
        model.save_pretrained(folder / name)
        if name != "vit":
            tokenizer(token_types=name not in ("gpt2", "llama")).save_pretrained(folder / name)


def _write_images(root: Path) -> None:
    from PIL import Image

    generator = numpy.random.default_rng(0)
    pictures = generator.integers(0, 256, (12, 16, 16, 3), dtype=numpy.uint8)
    labels = numpy.arange(12) % LABELS
    numpy.savez(root / "pictures.npz", x=pictures, y=labels)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        folder = root / "pictures.folder" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number:02}.png")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What stdout holds if it holds JSON alone."""
        return json.loads(self.out)


def headprune(*arguments: str | Path) -> Done:
    """The program as the console script runs it, in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["headprune", *map(str, arguments)]
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", argv):
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
    return Done(int(code), out.getvalue(), err.getvalue())


def prune_command(model: str, data: str, out: Path, *more: str) -> list[str]:
    """A small, quick run: few calibration samples, small batches."""
    return [
        *("prune", model, "--data", data, "--out", str(out)),
        *("--calibration-samples", "8", "--batch-size", "6", *more),
    ]


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def removal_order(steps: Sequence[Step]) -> list[list[tuple[int, int]]]:
    return [[tuple(head) for head in step.removed] for step in steps[1:]]


def same_but_timing(one: Path, other: Path) -> None:
    """The journal, the curve and the model of two runs are the same byte for byte."""
    for name in ("steps.jsonl", "curve.csv", "model/model.safetensors", "model/config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@contextlib.contextmanager
def counted_calls(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, int]]:
    """How often each module computes."""
    # A hook for all modules, since one on the module itself would be a change that the model's memory has to notice.
    counts = dict.fromkeys(modules, 0)
    names = {id(module): name for name, module in modules.items()}

    def count(module: torch.nn.Module, *_: Any) -> None:
        if id(module) in names:
            counts[names[id(module)]] += 1

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def interrupt(out: Path, lines: int, *, torn: str = "") -> None:
    """Make a finished run look like one that was killed after this many journal lines."""
    record = json.loads((out / "run.json").read_text())
    record = {name: record[name] for name in ("format", "settings", "versions")}
    (out / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    kept = (out / "steps.jsonl").read_text().splitlines(keepends=True)[:lines]
    (out / "steps.jsonl").write_text("".join(kept) + torn)
    (out / "curve.csv").unlink()
    shutil.rmtree(out / "model")


def in_fork(work: Callable[[], None]) -> int:
    """Do the work in a process of its own, a fork of this one; its exit code, 0 if it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def trapezoids(points: Sequence[tuple[float, float]]) -> float:
    return sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in itertools.pairwise(points))


def environment() -> dict[str, str]:
    """For programs in processes of their own: offline, and one thread each."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
