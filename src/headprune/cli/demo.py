"""The demo: real weights and real data that come with package installs, pruned from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from headprune.cli.live import live_curve
from headprune.cli.tables import print_comparison, print_run, print_scores, progress_bar
from headprune.criteria.scoring import score
from headprune.measure.comparing import Comparison
from headprune.papers import langid
from headprune.runs.compare import compare, write_comparison
from headprune.runs.experiment import Experiment, run_experiment

LESSONS = 640  # strings that the first classifier is fitted to
FIRST_LOOK = 64  # strings that the first heat map is made of
FIRST_CRITERION = "his"


def run_demo(out: Path, console: Console | None = None) -> list[Comparison]:
    """Fine-tune once, prune, compare with random; everything is kept in `out`."""
    console = console or Console()
    data = langid.prepare_data(out / "data")
    model = prepare_model(out / "model", data, console)
    experiment = Experiment(
        model=str(model),
        data=str(data / "dev.tsv"),
        calibration=str(data / "train.tsv"),
        evaluation_samples=256,
        max_drop=0.05,
        every=2,  # half the time of one by one
        explore=True,
        max_length=langid.MAX_LENGTH,
        seed=langid.SEED,
    )
    own = str(experiment.criterion)
    console.print(
        "\nPruning: score, remove the two least important heads, let the others take over what they can, score again.",
        highlight=False,
    )
    with live_curve(own) as on_step:
        record = run_experiment(experiment, out / "runs" / own, on_step=on_step)
    print_run(out / "runs" / own, record, console)
    console.print("\nThe same with heads removed at random, and nothing that takes over:", highlight=False)
    with live_curve("random") as on_step:
        rows: list[Any] = compare(experiment, [own, "random+none"], out / "runs", on_run=on_step.start, on_step=on_step)
    write_comparison(out / "runs", rows)
    print_comparison(out / "runs", rows, console)
    console.print(
        f"The report on both, to open in a browser, is {out / 'runs' / 'report.html'}.\n"
        f"\nTry next:\n"
        f"  headprune inspect {out / 'runs' / own / 'model'}\n"
        f"  headprune score {model} --data {data / 'dev.tsv'} --criterion his\n"
        f"  headprune compare {model} --data {data / 'dev.tsv'} --criteria residual-gradient+lstsq,gnorm,his "
        f"--out {out / 'compare'}",
        highlight=False,
        soft_wrap=True,
    )
    return rows


def prepare_model(folder: Path, data: Path, console: Console) -> Path:
    """The fine-tuned classifier, from an earlier demo if there is one. There is something to see before it is there: a
    classifier fitted in a second, and the scores of the heads under it."""
    if (folder / "config.json").is_file():
        console.print(f"Using the fine-tuned model in {folder}.", highlight=False)
        return folder
    model = langid.pretrained()
    examples = langid.read(model, data / "train.tsv", langid.LESSON_LENGTH)
    console.print(
        f"all-MiniLM-L6-v2, with a classifier for {len(langid.LANGUAGES)} languages fitted to {LESSONS} strings. "
        "Its heads before anything else is trained:",
        highlight=False,
    )
    langid.fit_classifier(model, examples.sample(LESSONS, langid.SEED).batches(langid.BATCH))
    shown = langid.read(model, data / "dev.tsv").sample(FIRST_LOOK, langid.SEED)
    print_scores(model, FIRST_CRITERION, score(model, shown.batches(langid.BATCH), criterion=FIRST_CRITERION), console)
    console.print(f"\nFine-tuning all of it on {len(examples)} strings, once over them.", highlight=False)
    with progress_bar("Fine-tuning", len(examples)) as advance:
        langid.fine_tune(model, examples, advance)
    langid.save_model(model, folder)
    return folder
