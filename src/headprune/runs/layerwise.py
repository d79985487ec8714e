"""Layer-wise pruning of a model on disk into a run folder; a kill costs at most one layer.

layers/widths.json                 how many units every site keeps, and the sites that no calibration sample reaches
layers/layers.jsonl                one line per layer that is done, on disk before the next begins
layers/layer-00003.safetensors     its weights; at the end they become the shards of model/
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.config_files import stored_dtype
from headprune.checkpoint.layer_files import LayerFiles, scratch_folder
from headprune.checkpoint.paths import model_folder
from headprune.checkpoint.save_load import load_structure, save_weights_of
from headprune.errors import DataError, RunError, ScheduleError
from headprune.json_forms import COUNT_BY_NAME, NUMBER, check_form
from headprune.layerwise.walker import layers_of
from headprune.measure.metrics import choose_metric
from headprune.measure.trajectory import Step
from headprune.repair.regression import Repair
from headprune.run_folder import Run
from headprune.run_folder.run import FORMER_LAYERS, LAYERS
from headprune.search.config import Experiment
from headprune.search.layerwise.prune_layer import PrunedLayer
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.observers import Observer
from headprune.search.prune_result import PruneResult
from headprune.search.schedules.schedule import Removal
from headprune.search.step import describe
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task
from headprune.units import Member, kept_mask, sites_of
from headprune.units.members import by_site
from headprune.units.slicing.record import from_ranges, to_ranges

Batches = Sequence[Mapping[str, Any]]
WIDTHS = {"widths": COUNT_BY_NAME, "unreached": [int]}  # of widths.json
REPAIR = {"site": int, "kind": str, "error_without": NUMBER, "error": NUMBER}
LINE = {"layer": str, "removed": {str: str}, "repairs": [REPAIR]}  # of layers.jsonl


def prune_on_disk(
    run: Run,
    experiment: Experiment,
    model: PreTrainedModel,
    task: Task,
    calibration: Batches,
    evaluation: Batches | None,
    *,
    device: torch.device,
    observer: Observer,
) -> PruneResult:
    """Prune a model on disk into the run folder, resuming after the last layer that is finished there; its checkpoint
    is written to model/."""
    structure = load_structure(experiment.model)
    precision = stored_dtype(str(model_folder(experiment.model)))
    layers = layers_of(model, sites_of(model, experiment.units))
    storage = LayerFolder(run, model, layers, stored=precision, device=device)
    started = time.perf_counter()
    with scratch_folder(storage.parts / "activations") as scratch:
        pruning = LayerwisePruning(
            model,
            calibration,
            experiment,
            task,
            evaluation=evaluation or (),
            storage=storage,
            structure=structure,
            device=device,
            scratch=scratch if experiment.activations_on_disk else None,
        )
        removal = pruning.prune(Removal(widths=storage.widths(pruning)), [observer])
        seconds = time.perf_counter() - started
        result = _record_steps(run, experiment, structure, pruning, removal, observer, seconds)
    model.config.dtype = precision or model.config.dtype  # instead of the precision of the computation
    save_weights_of(model, run.path / "model", storage.write_weights)
    return result


def _record_steps(
    run: Run,
    experiment: Experiment,
    structure: PreTrainedModel,
    pruning: LayerwisePruning,
    removal: Removal,
    observer: Observer,
    seconds: float,
) -> PruneResult:
    """Record both steps of the run, the dense model and the pruned one, measured on the hidden states after the last
    layer."""
    dense, pruned = pruning.predictions("dense"), pruning.predictions("pruned")
    metric = choose_metric(experiment.metric, dense)
    steps: list[Step] = []
    for applied, predictions in ((Removal(), dense), (removal, pruned)):
        if applied.members:
            remove_units(structure, applied.members)
        sites, metric_value = sites_of(structure, experiment.units), metric.of(predictions, dense)
        steps.append(
            describe(structure, sites, experiment.units, len(steps), applied, predictions, dense, metric_value)
        )
    for step in steps[len(run.steps) :]:
        run.step(step, {"seconds": seconds if step.step else 0.0})
    for step in steps:
        observer.step(step, {"seconds": seconds if step.step else 0.0})
    mask = kept_mask(sites_of(structure, experiment.units))
    rule = pruning.budget.rule() if experiment.budget is not None else f"keep {experiment.keep:g}"
    return PruneResult(structure, None, steps, 1, metric, mask, rule, unreached=pruning.candidates.unreached)


class LayerFolder(LayerFiles):
    """The layers of a model on disk, and in the run folder those that are pruned."""

    def __init__(
        self,
        run: Run,
        model: PreTrainedModel,
        layers: Sequence[str],
        *,
        stored: torch.dtype | None,
        device: torch.device,
    ) -> None:
        folder, former = run.path / LAYERS, run.path / FORMER_LAYERS
        if former.is_dir() and not folder.exists():
            former.rename(folder)
        folder.mkdir(exist_ok=True)
        super().__init__(model, layers, folder, stored=stored, device=device)
        self.run = run
        self.finished: dict[str, PrunedLayer] = {}
        file = folder / "layers.jsonl"
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            try:
                pruned = _from_json(json.loads(line))
            except (ValueError, RecursionError):
                break  # cut off by a kill; the rest is written again
            if pruned.layer not in layers or not self.part(pruned.layer).is_file():
                break  # its weights are missing, and later layers depend on them
            self.finished[pruned.layer] = pruned
        write_text(file, "".join(json.dumps(_to_json(pruned)) + "\n" for pruned in self.finished.values()))

    def widths(self, pruning: LayerwisePruning) -> dict[int, int]:
        """The widths of an earlier process, with the sites that it found to be unreached, or new ones."""
        file = self.parts / "widths.json"
        if file.is_file():
            try:
                stored = json.loads(file.read_bytes())
                if isinstance(stored, dict) and "widths" not in stored:  # of a version that did not note the sites
                    stored = {"widths": stored, "unreached": []}
                check_form(stored, WIDTHS)
                pruning.leave_whole(stored["unreached"])
                return {int(site): count for site, count in stored["widths"].items()}
            except (ValueError, RecursionError):
                raise RunError(f"{file} is damaged; start again with --overwrite.") from None
        widths = pruning.widths()
        write_text(file, json.dumps({"widths": widths, "unreached": sorted(pruning.candidates.unreached)}) + "\n")
        return widths

    def restore(self, pruned: PrunedLayer) -> None:
        if pruned.removed:
            remove_units(self.model, pruned.removed)
        self.read(pruned.layer)

    def keep(self, pruned: PrunedLayer) -> None:
        self.write(pruned.layer)
        self.run.write_line(f"{LAYERS}/layers.jsonl", json.dumps(_to_json(pruned)))
        self.finished[pruned.layer] = pruned


def _to_json(pruned: PrunedLayer) -> dict[str, Any]:
    removed = {site: to_ranges(ids) for site, ids in sorted(by_site(pruned.removed).items())}
    return {"layer": pruned.layer, "removed": removed, "repairs": [repair.to_json() for repair in pruned.repairs]}


def _from_json(line: Mapping[str, Any]) -> PrunedLayer:
    check_form(line, LINE)
    removed = [Member(int(site), member) for site, ids in line["removed"].items() for member in from_ranges(ids)]
    repairs = [Repair(*(repair[name] for name in REPAIR)) for repair in line["repairs"]]
    return PrunedLayer(line["layer"], tuple(removed), tuple(repairs))


def check_prunable(experiment: Experiment, model: PreTrainedModel, task: Task) -> None:
    """Raise the errors of the run before anything is written."""
    LayerwisePruning(model, (), experiment, task, structure=load_structure(experiment.model))


def clear_parts(out: Path) -> None:
    """Remove the weights of layers of a finished run, which are in its checkpoint."""
    for part in (out / LAYERS).glob("*.safetensors"):
        part.unlink(missing_ok=True)


def refuse_unsupported(experiment: Experiment) -> None:
    """Refuse options that layer-wise pruning of a model on disk does not support."""
    if distributed.launched():
        raise ScheduleError(
            "The layer-wise schedule runs in one process; start it without torchrun or accelerate launch."
        )
    if experiment.vocabulary is not None:
        raise DataError(
            "The layer-wise schedule loads one layer at a time, so it cannot shrink the vocabulary; leave out "
            "--vocabulary."
        )
