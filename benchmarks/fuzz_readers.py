"""Fuzzing of everything that reads a file: a mutated file is read or refused in a sentence, and nothing else changes.

    python -m benchmarks.fuzz_readers [--cases 10000] [--seed 0] [--only journal,config] [--out FILE]

One file of a tiny run, checkpoint, table or list of options is mutated, and then read by the functions that read it in
a command, in this process. Three things are counted: files that could still be read, files that were refused by a
`HeadpruneError`, and failures: any other exception, a call that takes longer than a minute, and a file that has changed
although the reader has no business to write it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

from benchmarks.fuzz_fixtures import make_fixtures, recovery_request
from benchmarks.fuzz_mutations import (
    Mutate,
    inside_gzip,
    mutate_bytes,
    mutate_config,
    mutate_json,
    mutate_jsonl,
    mutate_safetensors,
    mutate_yaml,
)

OUT = Path("benchmarks/results/fuzz_readers.json")
SECONDS = 60  # after which a call counts as hanging
SHOWN = 5  # failures of each kind of file that are kept

Read = Callable[[Path], Any]  # with the folder of the fixtures


@dataclass(frozen=True)
class Target:
    """A file, how it is mutated, what reads it, and which files that may write."""

    name: str
    file: str
    mutate: Mutate
    read: Read
    weight: float = 1.0
    writes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # files that are not there, so that another check does not come first


@dataclass
class Count:
    """What came of the mutated files of one target."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)  # files that a reader wrote

    def to_json(self) -> dict[str, Any]:
        lists = {"failures": self.failures, "changed": self.changed}
        counts = {"cases": self.cases, "read": self.read, "refused": self.refused}
        return {
            **counts,
            **{name: len(entries) for name, entries in lists.items()},
            **{f"first {name}": entries[:SHOWN] for name, entries in lists.items() if entries},
        }


# --- readers ---


def open_run(root: Path) -> None:
    """As a command that resumes the run does."""
    from headprune.run_folder import Run
    from headprune.search.config import stop_settings

    settings = ORIGINAL[root, "runs/run/run.json"]["settings"]
    with Run(root / "runs" / "run", settings, free=stop_settings()) as run:
        _ = run.finished, [step.removed for step in run.steps]


def view_run(root: Path) -> None:
    """As a report, a model card and a comparison do, without drawing."""
    from headprune.reports.card import run_card
    from headprune.reports.page import _replay, _savings_section
    from headprune.reports.run_view import comparison_command, entries, load_runs

    folder = root / "runs" / "run"
    runs = load_runs([folder])
    _ = entries(runs), comparison_command(runs), runs[0].command, runs[0].samples
    _replay(runs[0], "red")
    if runs[0].record.get("savings"):
        _savings_section(runs[0])
    run_card(folder)


def render_page(root: Path) -> None:
    from headprune.reports.page import render
    from headprune.reports.run_view import load_runs

    render(load_runs([root / "runs"]))


def evaluate_run(root: Path) -> None:
    import headprune

    headprune.evaluate(root / "runs" / "run", root / "data" / "more.csv", progress=False)


def settings_of_run(root: Path) -> None:
    from headprune.run_folder import finished_record
    from headprune.runs.experiment import experiment_of

    experiment_of(finished_record(root / "runs" / "run"))


def exports_of_run(root: Path) -> None:
    from headprune.reports.card import run_card
    from headprune.reports.exports import columns, exports_of, how

    records = exports_of(root / "runs" / "run")
    if records:
        _ = columns(records), how(records)
    run_card(root / "runs" / "run")


def recovery_of_run(root: Path) -> None:
    from headprune.cli.finetune import print_recovery
    from headprune.reports.recovery import recovery_of, section
    from headprune.reports.run_view import load_runs

    (run,) = load_runs([root / "runs" / "run"])
    record = recovery_of(run)
    if record is not None:
        section(run, record)
        with contextlib.redirect_stdout(io.StringIO()):
            print_recovery(run.path, record)


def resume_recovery(root: Path) -> None:
    """`finetune RUN`, which prints the record of a recovery that has ended, and else resumes it, up to the training."""
    from headprune.cli.finetune import print_recovery
    from headprune.runs.finetune import run_finetune

    request = recovery_request(root)
    started = mock.patch("headprune.runs.finetune._recover_once", side_effect=StartedError)
    with started, contextlib.suppress(StartedError), contextlib.redirect_stdout(io.StringIO()):
        print_recovery(request.run, run_finetune(request))


def layers_of_run(root: Path) -> None:
    """As a layer-wise run that resumes does."""
    from types import SimpleNamespace

    import torch

    from headprune.checkpoint.save_load import load_structure
    from headprune.runs.layerwise import LayerFolder
    from headprune.search.config import PruneConfig
    from headprune.search.layerwise.pruning import LayerwisePruning
    from headprune.tasks import task_of

    model = load_structure(root / "dense")
    pruning = LayerwisePruning(model, (), PruneConfig(schedule="layerwise", keep_flops=0.9), task_of(model))
    run: Any = SimpleNamespace(path=root / "runs" / "run")
    layers = [f"bert.encoder.layer.{number}" for number in range(2)]
    LayerFolder(run, model, layers, stored=None, device=torch.device("cpu")).widths(pruning)


def cycle_of_recovery(root: Path) -> None:
    from headprune.runs.finetune import _fit_from_json, _read_cycle

    record = _read_cycle(root / "runs" / "run" / "finetuned" / "round-1")
    assert record is not None
    _fit_from_json(record["fitted"])


def gates_of_run(root: Path) -> None:
    from headprune.reports.gate_training import values
    from headprune.reports.run_view import load_runs

    values(load_runs([root / "runs" / "run"])[0])


def load_model(folder: str) -> Read:
    def read(root: Path) -> None:
        import headprune

        headprune.load(root / folder)

    return read


def load_shapes(folder: str) -> Read:
    def read(root: Path) -> None:
        from headprune.checkpoint.save_load import load_structure

        load_structure(root / folder)

    return read


def load_tokens(root: Path) -> None:
    from headprune.data.tokenizers import load_tokenizer

    load_tokenizer(str(root / "dense"))


def load_table(name: str, model_class: str = "BertForSequenceClassification") -> Read:
    def read(root: Path) -> None:
        import headprune

        examples = headprune.load_examples(_model(model_class), root / "data" / name, processor=_tokenizer())
        examples.batches(4)

    return read


def load_images(name: str) -> Read:
    """An archive of images or a folder of files, with the preparation that models without a processor get."""

    def read(root: Path) -> None:
        import transformers

        import headprune

        if "images" not in MODELS:
            sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
            names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
            config = transformers.ViTConfig(**sizes, **names, image_size=8, patch_size=4)
            MODELS["images"] = transformers.ViTForImageClassification(config)
        headprune.load_examples(MODELS["images"], root / "data" / name, processor=root / "options").batches(2)

    return read


def read_study(root: Path) -> None:
    from headprune.runs.studies.spec import read_study, study_of
    from headprune.runs.studies.study_runs import make_groups

    make_groups(study_of(read_study(root / "options" / "study.yaml")), root / "study")


def command_with(file: str) -> Read:
    """`prune --config FILE`, up to the run."""

    def read(root: Path) -> None:
        from headprune.cli import main

        words = ["headprune", "prune", str(root / "dense"), "--data", str(root / "data" / "rows.csv")]
        words += ["--config", str(root / file), "--out", str(root / "new")]
        started = mock.patch("headprune.runs.experiment.run_experiment", side_effect=StartedError)
        with mock.patch.object(sys, "argv", words), started, contextlib.suppress(StartedError):
            try:
                main.main()
            except SystemExit as end:
                if end.code == 2:
                    raise _refusal() from None
                if end.code:
                    raise RuntimeError(f"exit code {end.code}") from None

    return read


class StartedError(Exception):
    """All options were accepted, and a run would start now."""


def _refusal() -> Exception:
    from headprune.errors import HeadpruneError

    return HeadpruneError("exit code 2")


def cached_layout(root: Path) -> None:
    """As a proof on disk is read, whose own file name depends on the machine."""
    from headprune import cache
    from headprune.discovery.attention import Discovery

    with mock.patch.object(cache, "_file", return_value=root / "cache" / "entry.json.gz"):
        cache._memory.pop((object, root / "cache" / "entry.json.gz"), None)
        cache.remembered(
            object, "", lambda: Discovery((), ()), to_json=Discovery.to_plain, from_json=Discovery.from_plain
        )


def kept_tokens(root: Path) -> None:
    """As the save of a model whose vocabulary is shrunk a second time does."""
    from headprune.checkpoint.processors import _write_kept_tokens
    from headprune.vocabulary.shrink import Shrunk

    (root / "new").mkdir(exist_ok=True)
    _write_kept_tokens(Shrunk(None, range(4), 8, 0), root / "shrunk", root / "new")


def earlier_export(root: Path) -> None:
    """As an export over an earlier one does, which deletes files of that."""
    from headprune.exports.export_model import files_of_export

    files_of_export(root / "export")


def latency_times(root: Path) -> None:
    from headprune.measure.latency import _read

    table = _read(root / "cache" / "latency.json")
    if table is not None:
        _ = table.dense, table.estimate({0: 2}), table.unit_cost(0, 2), table.to_json(), table.curves[0].nearest(0.5)


def marks_of_training(root: Path) -> None:
    """As a training that resumes does."""
    from headprune.training.checkpoints import claim, last_whole

    claim(root / "training", {"epochs": 1.0, "seed": 0})
    last_whole(root / "training")


MODELS: dict[str, Any] = {}
ORIGINAL: dict[tuple[Path, str], Any] = {}  # JSON files as they were


def _tokenizer() -> Any:
    if "tokenizer" not in MODELS:
        from benchmarks.synthetic_text import tokenizer

        MODELS["tokenizer"] = tokenizer()
    return MODELS["tokenizer"]


def _model(name: str) -> Any:
    if name not in MODELS:
        import transformers

        sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=40, num_labels=3)
        MODELS[name] = getattr(transformers, name)(config)
    return MODELS[name]


RUN, MODEL = "runs/run", "runs/run/model"
RESUMED = (f"{RUN}/steps.jsonl", f"{RUN}/timing.jsonl", f"{RUN}/.lock", f"{RUN}/run.json")
RESUMED_RECOVERY = tuple(f"{RUN}/{name}" for name in ("finetuned/finetune.json", "finetuned/.lock", ".lock", ".card"))
PUBLISHED = (f"{RUN}/report.html", f"{MODEL}/README.md")
FINGERPRINT = (f"{MODEL}/headprune.json",)
TASKS = {
    "tags": "BertForTokenClassification",
    "answers": "BertForQuestionAnswering",
    "choices": "BertForMultipleChoice",
}
TABLES = ("rows.csv", "rows.tsv", "rows.parquet", "rows.txt")

TARGETS = (
    Target("journal: resumed", f"{RUN}/steps.jsonl", mutate_jsonl, open_run, writes=RESUMED),
    Target("journal: viewed", f"{RUN}/steps.jsonl", mutate_jsonl, view_run, 1.5),
    Target("journal: drawn", f"{RUN}/steps.jsonl", mutate_jsonl, render_page, 0.2),
    Target("run.json: resumed", f"{RUN}/run.json", mutate_json, open_run, writes=RESUMED),
    Target("run.json: viewed", f"{RUN}/run.json", mutate_json, view_run, 1.5),
    Target("run.json: drawn", f"{RUN}/run.json", mutate_json, render_page, 0.3),
    Target("run.json: settings", f"{RUN}/run.json", mutate_json, settings_of_run, 1.5),
    Target("run.json: evaluated", f"{RUN}/run.json", mutate_json, evaluate_run, 0.3),
    Target("run.json: --config", f"{RUN}/run.json", mutate_json, command_with(f"{RUN}/run.json")),
    Target("exports.json", f"{RUN}/exports.json", mutate_json, exports_of_run),
    Target("finetune.json", f"{RUN}/finetuned/finetune.json", mutate_json, recovery_of_run),
    Target(
        "finetune.json: resumed",
        f"{RUN}/finetuned/finetune.json",
        mutate_json,
        resume_recovery,
        writes=(*RESUMED_RECOVERY, *PUBLISHED),
    ),
    Target("comparison.json", "runs/comparison.json", mutate_json, view_run, 0.5),
    Target(
        "layers.jsonl",
        f"{RUN}/layers/layers.jsonl",
        mutate_jsonl,
        layers_of_run,
        0.5,
        writes=(f"{RUN}/layers/layers.jsonl",),
    ),
    Target(
        "widths.json",
        f"{RUN}/layers/widths.json",
        mutate_json,
        layers_of_run,
        0.5,
        writes=(f"{RUN}/layers/layers.jsonl",),
    ),
    Target("round.json", f"{RUN}/finetuned/round-1/round.json", mutate_json, cycle_of_recovery, 0.5),
    Target("gates.jsonl", f"{RUN}/gates.jsonl", mutate_jsonl, gates_of_run, 0.5),
    Target("config.json: pruned", f"{MODEL}/config.json", mutate_config, load_model(MODEL), 2, without=FINGERPRINT),
    Target("config.json: shapes", f"{MODEL}/config.json", mutate_config, load_shapes(MODEL), 1.5),
    Target(
        "config.json: dense", "dense/config.json", mutate_config, load_model("dense"), without=("dense/headprune.json",)
    ),
    Target("fingerprint", f"{MODEL}/headprune.json", mutate_json, load_model(MODEL)),
    Target("weights", f"{MODEL}/model.safetensors", mutate_safetensors, load_model(MODEL), 2, without=FINGERPRINT),
    Target("weights: fingerprint", f"{MODEL}/model.safetensors", mutate_safetensors, load_model(MODEL), 0.5),
    Target(
        "index of weights",
        "sharded/model.safetensors.index.json",
        mutate_json,
        load_model("sharded"),
        without=("sharded/headprune.json",),
    ),
    Target("tokenizer.json", "dense/tokenizer.json", mutate_json, load_tokens, 0.5),
    Target("tokenizer_config.json", "dense/tokenizer_config.json", mutate_json, load_tokens, 0.5),
    *(Target(f"table: {name}", f"data/{name}", mutate_bytes, load_table(name)) for name in TABLES),
    Target("table: rows.csv.gz", "data/rows.csv.gz", inside_gzip(mutate_bytes), load_table("rows.csv.gz"), 0.5),
    Target("table: rows.jsonl", "data/rows.jsonl", mutate_jsonl, load_table("rows.jsonl")),
    Target("table: rows.json", "data/rows.json", mutate_json, load_table("rows.json")),
    *(
        Target(f"table: {name}.jsonl", f"data/{name}.jsonl", mutate_jsonl, load_table(f"{name}.jsonl", kind), 0.7)
        for name, kind in TASKS.items()
    ),
    *(
        Target(f"table: {name}.csv", f"data/{name}.csv", mutate_bytes, load_table(f"{name}.csv", kind), 0.5)
        for name, kind in TASKS.items()
    ),
    Target("images: npz", "data/images.npz", mutate_bytes, load_images("images.npz"), 0.7),
    Target("images: folder", "data/images/cat/0.png", mutate_bytes, load_images("images"), 0.7),
    Target("kept tokens", "shrunk/kept_tokens.json", mutate_json, kept_tokens, 0.5, writes=("new/kept_tokens.json",)),
    Target("export.json", "export/export.json", mutate_json, earlier_export, 0.5),
    Target("latency table", "cache/latency.json", mutate_json, latency_times, 0.5),
    Target("training: mark", "training/checkpoint-1/whole.json", mutate_json, marks_of_training, 0.5),
    Target("training: settings", "training/training.json", mutate_json, marks_of_training, 0.5),
    *(
        (
            Target(
                "quantised weights",
                "quantized/quantized.safetensors",
                mutate_safetensors,
                load_model("quantized"),
                without=("quantized/headprune.json",),
            ),
        )
        if importlib.util.find_spec("torchao")
        else ()
    ),
    Target("study file", "options/study.yaml", mutate_yaml, read_study, 1.5),
    Target("--config file", "options/prune.yaml", mutate_yaml, command_with("options/prune.yaml"), 1.5),
    Target(
        "cached layout",
        "cache/entry.json.gz",
        inside_gzip(mutate_json),
        cached_layout,
        0.5,
        writes=("cache/entry.json.gz",),
    ),
)


# --- cases ---


class Files:
    """All files below a folder and beside it as they were, to see what a case has changed, and to put it back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = [file for file in root.parent.rglob("*") if file.is_file()]
        self.contents = {os.path.relpath(file, root): file.read_bytes() for file in files}

    def states(self) -> dict[str, tuple[int, int, int]]:
        """Size, time stamp and inode of every file now."""
        states = {}
        for folder, _, names in os.walk(self.root.parent):
            for name in names:
                path = os.path.join(folder, name)
                stat = os.stat(path)
                states[os.path.relpath(path, self.root)] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        return states

    def restore(self, before: dict[str, tuple[int, int, int]]) -> None:
        now = self.states()
        for name in now.keys() - self.contents.keys():
            (self.root / name).unlink()
        for name, content in self.contents.items():
            if now.get(name) != before.get(name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                (self.root / name).write_bytes(content)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(target: Target, files: Files, rng: random.Random, count: Count, number: int) -> None:
    """Mutate the file of a target, read it, and put everything back."""
    from headprune.errors import HeadpruneError

    original = files.states()
    for name in target.without:
        (files.root / name).unlink()
    content = target.mutate(files.contents[target.file], rng)
    (files.root / target.file).write_bytes(content)
    before = files.states()
    count.cases += 1
    try:
        with time_limit():
            target.read(files.root)
        count.read += 1
    except HeadpruneError:
        count.refused += 1
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        count.failures.append(
            {
                "case": number,
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                "at": f"{Path(place.filename).name}:{place.lineno} {place.name}",
                "ours": next(
                    (
                        f"{frame.filename.rpartition('headprune/')[2]}:{frame.lineno} {frame.name}"
                        for frame in reversed(traceback.extract_tb(error.__traceback__))
                        if "src/headprune" in frame.filename
                    ),
                    "",
                ),
            }
        )
    after = files.states()
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in different:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in target.writes):
            count.changed.append({"case": number, "file": name})
    files.restore(original)


def fuzz(
    cases: int,
    seed: int,
    root: Path,
    targets: Sequence[Target] = TARGETS,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Count]:
    """Mutate and read this many files, each target in turn as often as its weight says."""
    make_fixtures(root)
    files = Files(root)
    ORIGINAL.update(
        {(root, name): json.loads(content) for name, content in files.contents.items() if name.endswith("run.json")}
    )
    counts = {target.name: Count() for target in targets}
    chosen = random.Random(seed).choices(targets, [target.weight for target in targets], k=cases)
    started = time.monotonic()
    with quiet(), mock.patch.dict(os.environ, {"HEADPRUNE_CACHE": str(root / "cache")}):
        for target in targets:  # a reader that refuses the file as it is would tell nothing
            original = files.states()
            target.read(root)
            files.restore(original)
        for number, target in enumerate(chosen):
            run_case(target, files, random.Random(f"{seed} {number}"), counts[target.name], number)
            if number % 500 == 499:
                failures = sum(len(count.failures) + len(count.changed) for count in counts.values())
                tell(f"{number + 1} of {cases} cases, {failures} failures, {time.monotonic() - started:.0f} s")
    return counts


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries print and log about damaged files."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="beginnings of names of targets, with commas")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    names = tuple((options.only or "").split(","))
    targets = [target for target in TARGETS if target.name.startswith(names)]
    terminal = sys.stderr
    with tempfile.TemporaryDirectory(prefix="headprune-fuzz-") as folder:
        counts = fuzz(
            options.cases, options.seed, Path(folder) / "files", targets, tell=lambda line: print(line, file=terminal)
        )
    total = Counter[str]()
    for count in counts.values():
        total.update(
            cases=count.cases,
            read=count.read,
            refused=count.refused,
            failures=len(count.failures),
            changed=len(count.changed),
        )
    result = {"seed": options.seed, **total, "targets": {name: count.to_json() for name, count in counts.items()}}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    counted = ", ".join(f"{total[name]} {name}" for name in ("read", "refused", "failures", "changed"))
    print(f"{total['cases']} mutated files: {counted}")
    return 1 if total["failures"] or total["changed"] else 0


if __name__ == "__main__":
    sys.exit(main())
