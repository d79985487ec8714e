"""Trains the rows one after the other; finished rows are stored, so an interruption loses one training at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
from headprune.papers.all_attention.text import Text
from headprune.papers.all_attention.training import OnLoss, interval, train, window_losses
from headprune.papers.paper_models import ReproductionError
from headprune.training.learned_gates import LearnedGates
from headprune.units import sites_of

RESULTS = "results.json"
ATTENTION = "eager"  # faster for models of this size
Begin = Callable[[Row], OnLoss | None]  # called with the row that begins


class Study:
    """A reproduction in a directory: `results.json` with the rows so far, and a checkpoint of each in `models`."""

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
        # Other rows start from the dense models: without its checkpoint a dense row is not finished.
        return [
            row
            for row in self.plan
            if row.name not in self.done or (row.kind == "dense" and not self.folder(row.name).is_dir())
        ]

    def folder(self, name: str) -> Path:
        return self.out / "models" / name

    def steps(self, row: Row) -> int:
        later = self.settings.gate_steps + self.settings.tuning_steps
        return self.settings.dense_steps if row.kind == "dense" else later

    def run(self, begin: Begin, on_finished: Callable[[dict[str, Any]], None]) -> None:
        for row in self.missing():
            with torch.random.fork_rng(devices=[]):
                result = self._make(row, begin(row))
            self.done[row.name] = result
            self._write()
            on_finished(result)

    # --- one row ---

    def _make(self, row: Row, on_loss: OnLoss | None) -> dict[str, Any]:
        s, rate = self.settings, self.settings.rate(row.model)
        extra: dict[str, Any] = {}
        if row.kind == "dense":
            torch.manual_seed(s.seed)
            model: Any = build(row.model, s)
            model.set_attn_implementation(ATTENTION)
            train(model, self.text, s, steps=s.dense_steps, rate=rate, seed=s.seed, on_loss=on_loss)
        else:
            model = self._load(f"{row.model}-dense")
            later: dict[str, Any] = {"rate": s.later * rate, "total": s.gate_steps + s.tuning_steps, "on_loss": on_loss}
            gates = None if row.gates is None else LearnedGates(model, steps=s.gate_steps, **row.gates)
            train(model, self.text, s, steps=s.gate_steps, seed=s.seed + 1, gates=gates, **later)
            if gates is not None:
                gates.remove(verify={"input_ids": self.text.windows(4, s.context)})
                extra["loss_before_tuning"] = float(window_losses(model, self.text, s).mean())
            train(model, self.text, s, steps=s.tuning_steps, seed=s.seed + 2, done=s.gate_steps, **later)
        losses = window_losses(model, self.text, s)
        if row.gates is not None:
            # Compared with the model trained for the same steps without gates, window by window.
            differences = losses - window_losses(self._load(f"{row.model}-dense-trained-on"), self.text, s)
            extra |= {"behind_trained_on": float(differences.mean()), "behind_interval": interval(differences)}
        save(model, self.folder(row.name))
        kept = {site.path: list(site.kept) for site in sites_of(model)}
        return {
            "name": row.name,
            "model": row.model,
            "kind": row.kind,
            "what": row.what,
            "gates": None if row.gates is None else dict(row.gates),
            "steps": self.steps(row) + (0 if row.kind == "dense" else s.dense_steps),
            "heads": sum(len(ids) for ids in kept.values()),
            "parameters": outside_embeddings(model),
            "all_parameters": total_parameters(model),
            "loss": float(losses.mean()),
            "interval": interval(losses),
            **extra,
            "kept": kept,
        }

    def _load(self, name: str) -> Any:
        model = load(self.folder(name))
        model.set_attn_implementation(ATTENTION)
        return model

    # --- the file ---

    def _read(self) -> dict[str, dict[str, Any]]:
        path = self.out / RESULTS
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
        versions = {module.__name__: str(module.__version__) for module in (headprune, torch, transformers)}
        content: dict[str, Any] = {**self.header, "made_by": versions, "rows": self.rows}
        write_text(self.out / RESULTS, json.dumps(content, indent=1) + "\n")


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
