"""`headprune reproduce gates`: learned gates on an encoder-decoder, as in Voita et al. 2019 (arXiv 1905.09418).

The paper prunes translation models of three types of attention: of the encoder and the decoder to themselves, and of
the decoder to the encoder. Here a small model of the same kind learns to translate a made-up language: a sentence is
reversed, and each letter replaced by one of two tables, which the letter before it decides.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

from headprune.batches import IGNORED
from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.checkpoint.save_load import load, save
from headprune.extras import require
from headprune.json_forms import differing, other_settings
from headprune.papers.all_attention.study import made_by
from headprune.papers.all_attention.summary import check_seeds, format_spread, spread
from headprune.papers.all_attention.training import Optimizing, train_on
from headprune.papers.paper_models import ReproductionError
from headprune.papers.tables import Cell, Table
from headprune.search.pruner import prune
from headprune.training.learned_gates import LearnedGates
from headprune.units import sites_of

with require("cli", "Reproducing a paper needs"):
    from rich.console import Console

PAPER = "arXiv 1905.09418"
RESULTS, ROWS = "results.json", "rows.json"
PAD, START, END, FIRST = 0, 1, 2, 3  # ids; letters of the source, then those of the target, come after them
TYPES = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "decoder to encoder"}
# Options of GateConfig for each way to train gates; both have the targets and rates of the settings.
GATES: dict[str, dict[str, Any]] = {"gates": {}, "voita": {"setting": "voita", "start": 2.0}}
Batch = dict[str, torch.Tensor]
Report = Callable[[str], None]  # is called with a line about every finished row


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 0
    scale: float = 1.0
    layers: int = 2  # of the encoder, and of the decoder
    heads: int = 8
    hidden: int = 64
    feed_forward: int = 128
    letters: int = 16  # of the source, and as many of the target
    shortest: int = 5
    longest: int = 9
    batch: int = 64
    dense_steps: int = 800
    gate_steps: int = 300
    tuning_steps: int = 100
    rate: float = 3e-3
    later: float = 0.25  # share of this rate in trainings that start from the dense model
    gate_rate: float = 0.03
    keeps: tuple[float, ...] = (0.5, 0.25)
    calibration: int = 256  # sentences on which his scores
    sentences: int = 2000  # that are translated to measure a model

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ReproductionError(f"--scale multiplies the steps and must be above 0, not {self.scale}.")
        if self.seed < 0:
            raise ReproductionError(f"A seed must be 0 or more, but --seeds has {self.seed}.")

    def scaled(self, scale: float) -> Settings:
        """The settings with more or fewer steps, at least two of each."""
        names = ("dense_steps", "gate_steps", "tuning_steps")
        steps = {name: max(2, round(scale * getattr(self, name))) for name in names}
        return dataclasses.replace(self, scale=scale, **steps)


class Language:
    """Sentences and their translations, drawn by a seed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        generator = torch.Generator().manual_seed(1000 + settings.seed)
        self.tables = torch.stack([torch.randperm(settings.letters, generator=generator) for _ in range(2)])

    def translation(self, letters: torch.Tensor) -> torch.Tensor:
        """Of one sentence [length], letters from 0: the table of a letter is the second if the letter before it is in
        the second half of the alphabet."""
        before = torch.cat([letters.new_zeros(1), letters[:-1]])
        return self.tables[(before >= self.settings.letters // 2).long(), letters].flip(0)

    def batches(self, count: int, size: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield self._batch(size, generator)

    def _batch(self, size: int, generator: torch.Generator) -> Batch:
        s = self.settings
        lengths = torch.randint(s.shortest, s.longest + 1, (size,), generator=generator).tolist()
        source = torch.full((size, s.longest + 1), PAD)
        target = torch.full((size, s.longest + 1), IGNORED)
        for row, length in enumerate(lengths):
            letters = torch.randint(s.letters, (length,), generator=generator)
            source[row, : length + 1] = torch.cat([FIRST + letters, torch.tensor([END])])
            translated = FIRST + s.letters + self.translation(letters)
            target[row, : length + 1] = torch.cat([translated, torch.tensor([END])])
        return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": target}


def build(settings: Settings) -> Any:
    """A new model; its weights depend on the seed of torch."""
    shape: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        shape[f"{side}_layers"] = settings.layers
        shape[f"{side}_attention_heads"] = settings.heads
        shape[f"{side}_ffn_dim"] = settings.feed_forward
    config = MarianConfig(
        vocab_size=FIRST + 2 * settings.letters,
        d_model=settings.hidden,
        max_position_embeddings=settings.longest + 1,
        dropout=0.0,
        init_std=settings.hidden**-0.5,
        scale_embedding=False,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=END,
        forced_eos_token_id=None,
        **shape,
    )
    return MarianMTModel(config)


@torch.no_grad()
def exact_matches(model: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """Whether each sentence is translated without an error. Greedy decoding gives the target if, and only if, every
    token of it has the largest logit after those before it."""
    model.eval()
    right = []
    for batch in batches:
        labels = batch["labels"]
        right.append(((model(**batch).logits.argmax(-1) == labels) | (labels == IGNORED)).all(1))
    return torch.cat(right)


def attention_type(path: str) -> str:
    """A key of TYPES, from the path of a site."""
    if path.endswith("encoder_attn"):
        return "cross"
    return "encoder" if re.search(r"\bencoder\b", path) else "decoder"


def kept_by_type(model: Any) -> dict[str, list[int]]:
    """How many heads are left, per type of attention and layer."""
    kept: dict[str, list[int]] = {key: [] for key in TYPES}
    for site in sites_of(model):
        kept[attention_type(site.path)].append(len(site.kept))
    return kept


class Study:
    """The rows of one seed in a directory; finished ones are not made again."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.settings, self.language = out, settings, Language(settings)
        self.header = {"paper": PAPER, "settings": json.loads(json.dumps(dataclasses.asdict(settings)))}
        self.done = self._read()
        self.test = list(self.language.batches(-(-settings.sentences // 200), 200, 10_000 + settings.seed))

    @property
    def plan(self) -> list[str]:
        pruned = [f"{way} keep={keep}" for keep in self.settings.keeps for way in (*GATES, "his")]
        return ["dense", "trained on", *pruned]

    def run(self, report: Report) -> list[dict[str, Any]]:
        self.out.mkdir(parents=True, exist_ok=True)
        for name in self.plan:
            start = {"dense": "dense", "trained on": "before removal"}.get(name)
            if name in self.done and (start is None or self.folder(start).is_dir()):
                continue
            with torch.random.fork_rng(devices=[]):
                self.done[name] = self._make(name)
            write_text(self.out / ROWS, json.dumps({**self.header, "made_by": made_by(), "rows": self.rows}, indent=1))
            report(f"{name}: {100 * self.done[name]['exact']:.1f} % exact, {self.done[name]['heads']} heads")
        return self.rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.done[name] for name in self.plan if name in self.done]

    def folder(self, name: str) -> Path:
        return self.out / "models" / name.replace(" ", "-")

    def _make(self, name: str) -> dict[str, Any]:
        s, extra = self.settings, {}
        if name == "dense":
            torch.manual_seed(s.seed)
            model = build(s)
            self._train(model, s.dense_steps, s.seed, Optimizing(s.rate, 0, s.dense_steps))
            save(model, self.folder("dense"), overwrite=True)
        else:
            model = self._at_tuning(name)
            if name != "trained on":
                extra["exact_before_tuning"] = float(exact_matches(model, self.test).double().mean())
            self._train(model, s.tuning_steps, s.seed + 2, self._later(s.gate_steps))
        right = exact_matches(model, self.test).double()
        kept = kept_by_type(model)
        return {
            "name": name,
            "heads": sum(map(sum, kept.values())),
            "exact": float(right.mean()),
            "interval": float(1.96 * (right.mean() * (1 - right.mean()) / len(right)).sqrt()),
            **extra,
            "kept": kept,
        }

    def _at_tuning(self, name: str) -> Any:
        """The model before the steps in which all rows are fine-tuned alike."""
        s, (way, _, share) = self.settings, name.partition(" keep=")
        model: Any
        if way == "his":
            model = load(self.folder("before removal"))
            batches = list(self.language.batches(-(-s.calibration // s.batch), s.batch, s.seed + 3))
            prune(
                model, batches, criterion="his", schedule="one-shot", repair="none", keep=float(share), progress=False
            )
            return model
        model = load(self.folder("dense"))
        options: dict[str, Any] = {"rate": s.gate_rate / (s.later * s.rate), **GATES.get(way, {})}
        gates = LearnedGates(model, steps=s.gate_steps, keep=float(share), **options) if share else None
        self._train(model, s.gate_steps, s.seed + 1, self._later(0), gates)
        if gates is None:
            save(model, self.folder("before removal"), overwrite=True)
        else:
            gates.remove(verify={key: value[:4] for key, value in self.test[0].items()})
        return model

    def _later(self, done: int) -> Optimizing:
        s = self.settings
        return Optimizing(s.later * s.rate, done, s.gate_steps + s.tuning_steps)

    def _train(self, model: Any, steps: int, seed: int, how: Optimizing, gates: LearnedGates | None = None) -> None:
        train_on(model, self.language.batches(steps, self.settings.batch, seed), how, seed=seed, gates=gates)

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self.out / ROWS
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text())
            done, recorded = {row["name"]: row for row in content["rows"]}, dict(content["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ReproductionError(f"{path} is damaged; delete it, or choose another directory.") from None
        settings = dict(self.header["settings"])
        different = differing(recorded, settings)
        if different:
            fix = "or another directory"
            raise ReproductionError(other_settings(self.out, "reproduction", different, recorded, settings, fix))
        return done


def reproduce_gates(
    out: Path,
    *,
    scale: float = 1.0,
    seeds: Sequence[int] = (0,),
    console: Console | None = None,
    settings: Settings | None = None,
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Train, prune and measure the models of all seeds, and write the results to `out`; returns the files and the rows,
    over all seeds. Finished rows in `out` are not repeated."""
    console = console or Console()
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the results.")
    check_seeds(seeds)
    base = settings or Settings()
    studies = {seed: Study(out / f"seed-{seed}", dataclasses.replace(base, seed=seed).scaled(scale)) for seed in seeds}
    rows = []
    try:
        for seed, study in studies.items():

            def report(line: str, seed: int = seed) -> None:
                console.print(f"seed {seed}, {line}", highlight=False, soft_wrap=True)

            rows.append(study.run(report))
        shown = {key: value for key, value in studies[seeds[0]].header["settings"].items() if key != "seed"}
        results: dict[str, Any] = {
            "paper": PAPER,
            "command": f"headprune reproduce gates --seeds {','.join(map(str, seeds))} --scale {scale:g} --out DIR",
            "settings": shown,
            "seeds": list(seeds),
            "made_by": made_by(),
            "rows": [_summary(of_seeds) for of_seeds in zip(*rows, strict=True)],
        }
        (table,) = tables_of(results)
        files = {
            out / RESULTS: json.dumps(results, indent=1) + "\n",
            out / f"{table.name}.md": table.markdown(),
            out / f"{table.name}.csv": table.csv(),
        }
        for path, content in files.items():
            write_text(path, content)
    except OSError as error:
        raise ReproductionError(f"Cannot write to {out}: {error.strerror}; choose another directory.") from None
    console.print(table.markdown(), highlight=False, soft_wrap=True, markup=False)
    console.print(f"{len(files)} files are in {out}, and the models of each seed in its folder.", highlight=False)
    return list(files), results["rows"]


def tables_of(results: Mapping[str, Any]) -> list[Table]:
    """How well pruned models translate, and where their heads are."""
    settings, seeds = results["settings"], results["seeds"]
    over = f"means over the seeds {', '.join(map(str, seeds))} with the standard deviation"
    most = settings["layers"] * settings["heads"]
    cells: list[list[Cell]] = [
        [
            row["name"],
            row["heads"],
            format_spread(row.get("exact_before_tuning"), ".1f"),
            format_spread(row["exact"], ".1f"),
            *(format_spread(row["kept"][key], ".1f") for key in TYPES),
        ]
        for row in results["rows"]
    ]
    return [
        Table(
            1,
            f"Heads removed from a small translation model, after {PAPER}: which type of attention keeps them.",
            f"Sentences translated without an error, in per cent of {settings['sentences']:,}; "
            f"{over if len(seeds) > 1 else f'of seed {seeds[0]}'}. Each type has {most} heads in the dense model. "
            f"All rows but the first are trained for {settings['gate_steps']} more steps, with gates or without, lose "
            f"their heads, and are fine-tuned for {settings['tuning_steps']}.",
            ("heads removed by", "heads", "exact after removal", "exact", *TYPES.values()),
            cells,
        )
    ]


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of all seeds."""
    first = rows[0]
    kept = {key: spread([float(sum(row["kept"][key])) for row in rows]) for key in TYPES}
    before = "exact_before_tuning"
    return {
        "name": first["name"],
        "heads": first["heads"],
        "exact": spread([100 * row["exact"] for row in rows]),
        "interval": [round(100 * row["interval"], 3) for row in rows],
        **({before: spread([100 * row[before] for row in rows])} if before in first else {}),
        "kept": kept,
        "kept_per_layer": {key: [row["kept"][key] for row in rows] for key in TYPES},
    }
