"""The demo: prunes a real model on real data, both of which are installed with Python packages."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from headprune.cli.progress import live_curve, live_phases
from headprune.cli.score_map import print_scores
from headprune.criteria.scoring import score
from headprune.errors import CheckpointError
from headprune.measure.compare_curves import Comparison
from headprune.papers import langid
from headprune.reports.format import measured_text, removed_text
from headprune.runs.compare import compare
from headprune.runs.experiment import Experiment, run_experiment
from headprune.search.settings import command_words
from headprune.snippets.checkpoints import transformers_snippet

HEAD_SAMPLES = 640  # strings that the first classifier is fitted to
HEAT_MAP_SAMPLES = 64
HEAT_MAP_CRITERION = "his"
HEADS_PER_STEP = 4
CALIBRATION_SAMPLES = 128
MAX_DROP = 0.05
RANDOM = "random+none"
SPEEDUP = 2.0
TIMED_TOKENS = 32  # most strings are shorter


class DemoResult(NamedTuple):
    curves: list[Comparison]  # of heads by the default criterion, and at random
    fast: dict[str, Any]  # the record of the run that makes the model twice as fast
    printed: str  # by the code that loads its model without headprune


def run_demo(out: Path, console: Console | None = None) -> DemoResult:
    """Fine-tune a model, prune it by two criteria to the last head, and make it twice as fast; all files are in
    `out`."""
    console = console or Console()
    data = langid.prepare_data(out / "data")
    model = prepare_model(out / "model", data, console)
    experiment = Experiment(
        model=str(model),
        data=str(data / "dev.tsv"),
        calibration=str(data / "train.tsv"),
        calibration_samples=CALIBRATION_SAMPLES,
        evaluation_samples=256,
        max_length=langid.MAX_LENGTH,
        seed=langid.SEED,
    )
    curves = compare_with_random(experiment, out / "runs", console)
    fast = make_fast(experiment, out / "fast", console)
    printed = show_plain_loading(out / "fast" / "model", fast["task"], console)
    console.print(
        f"\nTry next:\n"
        f"  headprune inspect {out / 'fast' / 'model'}\n"
        f"  headprune score {model} --data {data / 'dev.tsv'} --criterion his",
        highlight=False,
        soft_wrap=True,
    )
    return DemoResult(curves, fast, printed)


def prepare_model(folder: Path, data: Path, console: Console) -> Path:
    """The fine-tuned classifier, from an earlier demo if there is one. Before the training it shows scores of the heads
    with a classifier that is fitted in a second."""
    if (folder / "config.json").is_file():
        console.print(f"Using the fine-tuned model in {folder}.", highlight=False)
        return folder
    model = langid.pretrained()
    examples = langid.read(model, data / "train.tsv", langid.LESSON_LENGTH)
    console.print(
        f"all-MiniLM-L6-v2 learns to tell {len(langid.LANGUAGES)} languages apart. First only its last layer is fitted "
        f"to {HEAD_SAMPLES} strings. How much each attention head then matters:",
        highlight=False,
    )
    langid.fit_classifier(model, examples.sample(HEAD_SAMPLES, langid.SEED).batches(langid.BATCH))
    batches = langid.read(model, data / "dev.tsv").sample(HEAT_MAP_SAMPLES, langid.SEED).batches(langid.BATCH)
    scores = score(model, batches, criterion=HEAT_MAP_CRITERION, progress=False)
    print_scores(model, HEAT_MAP_CRITERION, scores, console)
    console.print(f"\n[bold]1. Fine-tune[/bold] the whole model on {len(examples):,} strings.", highlight=False)
    with live_phases("Fine-tuning"):
        langid.fine_tune(model, examples)
    langid.save_model(model, folder)
    return folder


def compare_with_random(experiment: Experiment, out: Path, console: Console) -> list[Comparison]:
    """The curve of the papers: the metric over the heads removed, by a criterion and at random."""
    experiment = experiment.with_options(max_drop=MAX_DROP, every=HEADS_PER_STEP, explore=True)
    name = str(experiment.criterion)
    console.print(
        f"\n[bold]2. Remove attention heads[/bold], {HEADS_PER_STEP} at a time, to the last: score them, remove the "
        "least important, refit the others by least squares, measure. Then the same at random, without the refit.",
        highlight=False,
    )
    with live_curve(name) as observer:
        rows: list[Any] = compare(experiment, [name, RANDOM], out, observer=observer)
    by_name = {row.name: row.removable[f"{MAX_DROP:.0%}"] for row in rows}
    heads = json.loads((out / name / "run.json").read_text())["result"]["heads_before"]
    console.print(
        f"   {by_name[name]} of {heads} heads can be removed before the accuracy has fallen by {100 * MAX_DROP:.0f} "
        f"points; at random {by_name[RANDOM]}.\n   Both curves are in {out / 'report.html'}, to open in a browser.",
        highlight=False,
        soft_wrap=True,
    )
    return rows


def make_fast(experiment: Experiment, out: Path, console: Console, speedup: float = SPEEDUP) -> dict[str, Any]:
    """Make the same model twice as fast: a budget for heads and neurons together."""
    experiment = experiment.with_options(speedup=speedup, latency_tokens=TIMED_TOKENS)
    console.print(
        "\n[bold]3. Make the model twice as fast[/bold] on this machine, by removing heads and neurons together. On "
        "the command line that is",
        highlight=False,
        soft_wrap=True,
    )
    command = shlex.join([*command_words(experiment.settings()), "--out", str(out)])
    console.print(f"   {command}", highlight=False, markup=False, soft_wrap=True)
    with live_curve("Pruning", "latency") as observer:
        record = run_experiment(experiment, out, observer=observer)
    result = record["result"]
    dense, pruned = (
        measured_text(result["metric"], result[which], result[f"{which}_interval"]) for which in ("dense", "pruned")
    )
    console.print(
        f"   Removed {removed_text(result)}.\n"
        f"   It takes {record['savings']['shares']['latency']:.0%} of the dense model's time: "
        f"{1 / record['savings']['shares']['latency']:.2f} times as fast.\n"
        f"   {result['metric'].capitalize()} {dense} before, {pruned} after; in brackets the 95% interval.",
        highlight=False,
        markup=False,
    )
    return record


def show_plain_loading(folder: Path, task: str, console: Console) -> str:
    """Show the code that loads a checkpoint in plain transformers, and its output without headprune."""
    config = json.loads((folder / "config.json").read_text())
    code = transformers_snippet(config, task, str(folder))
    lines = [line for line in code.splitlines() if line]
    console.print(
        f"\n[bold]4. Use it without headprune.[/bold] {len(lines)} lines of Python, run here in a process that cannot "
        "import headprune:\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print("\n".join(f"   {line}" for line in lines), highlight=False, markup=False, soft_wrap=True)
    printed = run_without_headprune(code)
    console.print(f"   -> {printed}", highlight=False, markup=False, soft_wrap=True)
    if config.get("auto_map"):
        console.print(
            "\n   Its layers differ in width, which the config of transformers' class cannot express. So the folder "
            "carries the\n   code that builds them, and trust_remote_code lets transformers run it; headprune.load "
            "runs no such code.",
            highlight=False,
            soft_wrap=True,
        )
    return printed


def run_without_headprune(code: str) -> str:
    """The last line that Python code prints in a new process that cannot import headprune."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.modules['headprune'] = None\n{code}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(f"Without headprune the saved model did not load: {reason}")
    return (done.stdout.strip().splitlines() or [""])[-1]
