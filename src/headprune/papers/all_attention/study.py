"""Trains the rows one after the other; finished rows are stored, so an interruption loses one training at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import headprune
from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.save_load import load, save
from headprune.json_forms import differing, other_settings
from headprune.measure.costs import total_parameters
from headprune.papers.all_attention.plan import PAPER, Row, Settings, build, rows_of
from headprune.papers.all_attention.speed import measure_speeds
from headprune.papers.all_attention.text import Text
from headprune.papers.all_attention.training import OnLoss, interval, train, window_losses
from headprune.papers.paper_models import ReproductionError
from headprune.search.pruner import prune
from headprune.training.learned_gates import LearnedGates
from headprune.units import sites_of

ROWS = "rows.json"
SPEED = "speed.json"
ATTENTION = "eager"  # faster for models of this size
Begin = Callable[[Row], OnLoss | None]  # called with the row that begins


class Study:
    """The rows of one seed in a directory: `rows.json` with those so far, and a checkpoint of each in `models`."""

    def __init__(self, out: Path, settings: Settings, text: Text) -> None:
        self.out, self.settings, self.text = out, settings, text
        self.plan = rows_of(settings)
        self.header: dict[str, Any] = {"paper": PAPER, "settings": settings.to_json(), "text": text.to_json()}
        self.done = self._read()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The finished rows, in the order of the plan."""
        return [self.done[row.name] for row in self.plan if row.name in self.done]

    def missing(self) -> list[Row]:
        # Other rows start from the checkpoints of these: without one, such a row is not finished.
        starts = {"dense": self.folder, "trained on": self.before_removal}
        return [
            row
            for row in self.plan
            if row.name not in self.done or (row.kind in starts and not starts[row.kind](row.name).is_dir())
        ]

    def folder(self, name: str) -> Path:
        return self.out / "models" / name

    def before_removal(self, name: str) -> Path:
        """Where a model trained on without gates is when gates remove heads from the others."""
        return self.out / "models" / f"{name}-before-removal"

    def steps(self, row: Row) -> int:
        if row.kind == "dense":
            return self.settings.dense_steps
        return self.settings.tuning_steps + (0 if row.kind == "criterion" else self.settings.gate_steps)

    def run(self, begin: Begin, on_finished: Callable[[dict[str, Any]], None]) -> None:
        for row in self.missing():
            with torch.random.fork_rng(devices=[]):
                result = self._make(row, begin(row))
            self.done[row.name] = result
            self._write()
            on_finished(result)

    def speeds(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Of every row of these kinds, measured in one run; stored, as other runs would give other numbers."""
        names = [row.name for row in self.plan if row.kind in kinds]
        path = self.out / SPEED
        if path.is_file():
            try:
                stored = json.loads(path.read_text())
            except (OSError, ValueError):
                stored = {}
            if list(stored) == names:
                return dict(stored)
        models = {name: self._load(name) for name in names}
        dense = {row.name: f"{row.model}-dense" for row in self.plan}
        ids = self.text.windows(self.settings.batch, self.settings.context)
        measured = measure_speeds(models, dense, ids)
        write_text(path, json.dumps(measured, indent=1) + "\n")
        return measured

    # --- one row ---

    def _make(self, row: Row, on_loss: OnLoss | None) -> dict[str, Any]:
        s = self.settings
        extra: dict[str, Any] = {}
        if row.kind == "dense":
            torch.manual_seed(s.seed)
            model: Any = build(row.model, s)
            model.set_attn_implementation(ATTENTION)
            train(model, self.text, s, steps=s.dense_steps, rate=s.rate(row.model), seed=s.seed, on_loss=on_loss)
        else:
            later: dict[str, Any] = {"rate": s.later * s.rate(row.model), "total": s.gate_steps + s.tuning_steps}
            later["on_loss"] = on_loss
            model = self._at_tuning(row, later)
            if row.kind != "trained on":
                extra["loss_before_tuning"] = float(window_losses(model, self.text, s).mean())
            train(model, self.text, s, steps=s.tuning_steps, seed=s.seed + 2, done=s.gate_steps, **later)
        losses = window_losses(model, self.text, s)
        if row.gates is not None or row.removal is not None:
            # Compared window by window with the dense model that was trained for the same steps, and with gates.
            others = {"trained_on": f"{row.model}-dense-trained-on"}
            others |= {} if row.compared_with is None else {"gates": row.compared_with}
            for key, other in others.items():
                differences = losses - window_losses(self._load(other), self.text, s)
                extra |= {f"behind_{key}": float(differences.mean()), f"behind_{key}_interval": interval(differences)}
        save(model, self.folder(row.name), overwrite=True)  # of a row that a kill left without its results
        kept = {site.path: list(site.kept) for site in sites_of(model)}
        return {
            "name": row.name,
            "model": row.model,
            "kind": row.kind,
            "what": row.what,
            "gates": None if row.gates is None else dict(row.gates),
            "removal": None if row.removal is None else dict(row.removal),
            "steps": s.dense_steps + (0 if row.kind == "dense" else s.gate_steps + s.tuning_steps),
            "heads": sum(len(ids) for ids in kept.values()),
            "parameters": outside_embeddings(model),
            "all_parameters": total_parameters(model),
            "loss": float(losses.mean()),
            "interval": interval(losses),
            **extra,
            "kept": kept,
        }

    def _at_tuning(self, row: Row, later: Mapping[str, Any]) -> Any:
        """The model of the row before the steps in which all of them are fine-tuned alike."""
        s, dense = self.settings, f"{row.model}-dense"
        if row.kind == "criterion":
            model = self._load_from(self.before_removal(f"{dense}-trained-on"))
            self._prune(model, row)
            return model
        model = self._load(dense)
        if row.kind == "criterion first":
            self._prune(model, row)
        gates = None if row.gates is None else LearnedGates(model, steps=s.gate_steps, **row.gates)
        train(model, self.text, s, steps=s.gate_steps, seed=s.seed + 1, gates=gates, **later)
        if gates is not None:
            gates.remove(verify={"input_ids": self.text.windows(4, s.context)})
        if row.kind == "trained on":
            save(model, self.before_removal(row.name), overwrite=True)
        return model

    def _prune(self, model: Any, row: Row) -> None:
        """Remove heads by a criterion, measured on the training text."""
        s = self.settings
        windows = self.text.batches(-(-s.calibration // s.batch), s.batch, s.context, s.seed + 3)
        prune(model, [{"input_ids": ids, "labels": ids} for ids in windows], progress=False, **dict(row.removal or {}))

    def _load(self, name: str) -> Any:
        return self._load_from(self.folder(name))

    def _load_from(self, folder: Path) -> Any:
        model = load(folder)
        model.set_attn_implementation(ATTENTION)
        return model

    # --- the file ---

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self.out / ROWS
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text())
            done = {row["name"]: row for row in content["rows"]}
            recorded, settings = _flat(content), _flat(self.header)
        except (OSError, ValueError, KeyError, TypeError):
            raise ReproductionError(f"{path} is damaged; delete it, or choose another directory.") from None
        different = differing(recorded, settings)
        if different:
            fix = "or another directory"
            raise ReproductionError(other_settings(self.out, "reproduction", different, recorded, settings, fix))
        return done

    def _write(self) -> None:
        content: dict[str, Any] = {**self.header, "made_by": made_by(), "rows": self.rows}
        write_text(self.out / ROWS, json.dumps(content, indent=1) + "\n")


def made_by() -> dict[str, str]:
    """The versions of what the results depend on."""
    return {module.__name__: str(module.__version__) for module in (headprune, torch, transformers)}


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a reproduction with its paper and the name and digest of its text."""
    text = {f"text_{name}": value for name, value in dict(header["text"]).items()}
    return {"paper": header["paper"], **dict(header["settings"]), **text}


def outside_embeddings(model: nn.Module) -> int:
    """The number of parameters without those of embeddings, to which the output map is tied."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)
