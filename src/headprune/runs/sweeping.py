"""A sweep as the command line runs it: the model stays on disk, and a kill costs at most the layer in progress.

sweep/widths.json                 how many units every site keeps
sweep/layers.jsonl                one line per layer that is done, on disk before the next begins
sweep/layer-00003.safetensors     its weights; at the end they become the shards of model/
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import DataError, RunError, ScheduleError
from headprune.layerwise.walker import Layer, stacks_of
from headprune.measure.metrics import choose_metric
from headprune.measure.trajectory import Step
from headprune.repair.solve import Repair
from headprune.runs.journal import Run
from headprune.search.config import Experiment
from headprune.search.pruner import PruneResult
from headprune.search.schedules.schedule import Removal
from headprune.search.step import describe
from headprune.search.sweep.layers import Swept
from headprune.search.sweep.sweep import Sweep
from headprune.store.checkpoint import load_structure, save_weights_of
from headprune.store.configs import stored_dtype
from headprune.store.files import write_text
from headprune.store.places import model_folder
from headprune.store.shelf import DiskShelf, scratch_folder
from headprune.surgery.cut import cut
from headprune.tasks import Task
from headprune.units import Member, kept_mask, sites_of
from headprune.units.cutting.record import from_ranges, to_ranges
from headprune.units.members import by_site

Batches = Sequence[Mapping[str, Any]]
OnLayer = Callable[[int, int, Swept], None]  # (layers done, layers in all, what happened at the last)


def sweep_into(
    run: Run,
    experiment: Experiment,
    model: PreTrainedModel,
    task: Task,
    calibration: Batches,
    evaluation: Batches | None,
    *,
    device: torch.device,
    on_step: Callable[[Step], None] | None = None,
    on_layer: OnLayer | None = None,
) -> PruneResult:
    """Sweep over a model that is on disk into the run's directory, going on after the last layer that is done there;
    its checkpoint is written to model/."""
    source = model_folder(experiment.model)
    structure = load_structure(experiment.model)
    journal = SweepJournal(run)
    sites = sites_of(model, experiment.kinds)
    layers = [path for stack in stacks_of(model, sites).values() for path in stack]
    shelf = DiskShelf(model, layers, journal.folder, stored=stored_dtype(str(source)), device=device)
    journal.without_weights(shelf)
    started = time.perf_counter()
    with scratch_folder(journal.folder / "activations") as scratch:
        sweep = Sweep(
            model,
            calibration,
            experiment,
            task,
            evaluation=evaluation or (),
            weights=shelf,
            structure=structure,
            device=device,
            scratch=scratch if experiment.activations_on_disk else None,
        )
        keep = journal.widths(sweep.widths)

        def done(layer: Layer, swept: Swept) -> None:
            shelf.keep(layer.path)
            journal.add(swept)

        def again(layer: Layer, swept: Swept) -> None:
            if swept.removed:
                cut(model, swept.removed)
            shelf.take_again(layer.path)

        swept: list[Swept] = []
        for one in sweep.layers(keep, journal.known, done=done, again=again):
            swept.append(one)
            if on_layer is not None:
                on_layer(len(swept), len(layers), one)
        result = _measured(run, experiment, structure, sweep, swept, on_step, time.perf_counter() - started)
    model.config.dtype = stored_dtype(str(source)) or model.config.dtype  # whatever was computed in
    save_weights_of(model, run.path / "model", shelf.write_weights)
    return result


def _measured(
    run: Run,
    experiment: Experiment,
    structure: PreTrainedModel,
    sweep: Sweep,
    swept: Sequence[Swept],
    on_step: Callable[[Step], None] | None,
    seconds: float,
) -> PruneResult:
    """Both steps of the run, the dense model and the pruned one, measured on what came out behind the last layer."""
    dense, pruned = sweep.quality("dense"), sweep.quality("pruned")
    metric = choose_metric(experiment.metric, dense)
    removed = tuple(sorted(member for layer in swept for member in layer.removed))
    repairs = [repair for layer in swept for repair in layer.repairs]
    steps = [_describe(structure, experiment, 0, Removal(), dense, dense, metric)]
    if removed:
        cut(structure, removed)
    steps.append(_describe(structure, experiment, 1, Removal(removed, repairs=repairs), pruned, dense, metric))
    for step in steps[len(run.steps) :]:
        run.append(step, {"seconds": seconds if step.step else 0.0})
    for step in steps:
        if on_step is not None:
            on_step(step)
    mask = kept_mask(sites_of(structure, experiment.kinds))
    rule = sweep.budget.rule() if experiment.budget is not None else f"keep {experiment.keep:g}"
    return PruneResult(structure, None, steps, 1, metric, mask, rule)


def _describe(
    structure: PreTrainedModel,
    experiment: Experiment,
    number: int,
    removal: Removal,
    quality: Any,
    dense: Any,
    metric: Any,
) -> Step:
    sites = sites_of(structure, experiment.kinds)
    return describe(structure, sites, experiment.kinds, number, removal, quality, dense, metric.of(quality, dense))


class SweepJournal:
    """What a sweep has done so far, in the directory of its run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = run.path / "sweep"
        self.folder.mkdir(exist_ok=True)
        self.known: dict[str, Swept] = {}
        file = self.folder / "layers.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                swept = _from_json(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break  # torn by a kill; what follows is written again
            self.known[swept.layer] = swept
        self._rewrite()

    def without_weights(self, shelf: DiskShelf) -> None:
        """Forget layers whose weights are not there any more, and all that came after them."""
        there = list(itertools.takewhile(lambda layer: shelf.part(layer).is_file(), self.known))
        if len(there) < len(self.known):
            self.known = {layer: self.known[layer] for layer in there}
            self._rewrite()

    def _rewrite(self) -> None:
        write_text(
            self.folder / "layers.jsonl", "".join(json.dumps(_to_json(own)) + "\n" for own in self.known.values())
        )

    def widths(self, make: Callable[[], dict[int, int]]) -> dict[int, int]:
        """Those of an earlier process, or new ones."""
        file = self.folder / "widths.json"
        if file.is_file():
            try:
                return {int(site): int(count) for site, count in json.loads(file.read_text()).items()}
            except (ValueError, AttributeError):
                raise RunError(f"{file} is damaged; start again with --overwrite.") from None
        found = make()
        write_text(file, json.dumps(found) + "\n")
        return found

    def add(self, swept: Swept) -> None:
        self.run.write_line("sweep/layers.jsonl", json.dumps(_to_json(swept)))
        self.known[swept.layer] = swept


def _to_json(swept: Swept) -> dict[str, Any]:
    removed = {site: to_ranges(ids) for site, ids in sorted(by_site(swept.removed).items())}
    return {"layer": swept.layer, "removed": removed, "repairs": [repair.to_json() for repair in swept.repairs]}


def _from_json(line: Mapping[str, Any]) -> Swept:
    removed = [Member(int(site), member) for site, ids in line["removed"].items() for member in from_ranges(ids)]
    return Swept(line["layer"], tuple(removed), tuple(Repair(**repair) for repair in line["repairs"]))


def check_sweepable(experiment: Experiment, model: PreTrainedModel, task: Task) -> None:
    """Refuse what a sweep would refuse, before anything is written."""
    Sweep(model, (), experiment, task, structure=load_structure(experiment.model))


def clear_parts(out: Path) -> None:
    """When the run is finished its checkpoint has the weights; what is left says how it came about."""
    for part in (out / "sweep").glob("*.safetensors"):
        part.unlink(missing_ok=True)


def refuse_unsweepable(experiment: Experiment) -> None:
    """What a sweep over a model on disk cannot be asked for."""
    if distributed.launched():
        raise ScheduleError("A sweep runs in one process; start it without torchrun or accelerate launch.")
    if experiment.vocabulary is not None:
        raise DataError(
            "A sweep has one layer of the model at a time, so its vocabulary cannot be made smaller; leave out "
            "--vocabulary."
        )
