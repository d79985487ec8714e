"""Which transformers can be pruned: every model type that the installed transformers knows, one row each.

    python -m benchmarks.model_coverage [--types A,B] [--out docs/coverage.md] [--rows FILE.jsonl] [--workers 2]
                                  [--seconds 120]

A small model of each type is built from its config class, sizes reduced by rule, with random weights. Half of its units
are removed, then a whole site, and each time all outputs are compared with those of the dense model whose output
projections have zeros in the columns of these units. Then a checkpoint is saved and loaded. The same is done with the
neurons of its feed-forward layers: half of them, then a whole layer of every kind. A row says:

    exact            all of it agreed; "neurons" is the number of feed-forward layers that did
    refused          headprune says that nothing can be pruned, with the reason
    no attention     there is none
    not built        the small model could not be built or run here, with the reason
    WRONG            outputs differ, or the model fails after a removal

Model types are tried in processes of their own, so that one that crashes or hangs costs no more than its row. With
`--rows` every row is written as it comes, and those that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import multiprocessing
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headprune
from headprune.discovery.twin import Run, randomise, sample_runs, small_config
from headprune.errors import HeadpruneError
from headprune.surgery.remove_units import remove_units
from headprune.units import all_sites
from headprune.units.linear import is_transposed

DEPTH = 2
# Where a type has no base class, the first of these that has one for it.
MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
ORDER = ("WRONG", "exact", "refused", "no attention", "not built")


def model_class(config: Any) -> type | None:
    for name in MAPPINGS:
        classes = getattr(modeling_auto, name, {}).get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, tuple) else classes
    return _class_beside(type(config))


def _class_beside(config: type) -> type | None:
    """The first model class beside the config that is built from it: parts of models are in no mapping."""
    module = config.__module__.replace("configuration_", "modeling_")
    try:
        home = importlib.import_module(module)
    except ImportError:
        return None
    classes = [
        kind
        for name, kind in vars(home).items()
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.__module__ == module
        if kind.__dict__.get("config_class", kind.config_class) is config and not name.endswith("PreTrainedModel")
    ]
    return classes[0] if classes else None


def build(model_type: str) -> tuple[Any, list[Run]]:
    config = small_config(CONFIG_MAPPING[model_type](), keep_heads=False, depth=DEPTH)
    kind: Any = model_class(config)
    if kind is None:
        raise LookupError("there is no model class for this config alone")
    torch.manual_seed(0)
    model = kind(config).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    randomise(model, 0)
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        runs = sample_runs(model)
        if runs:
            return model, runs
    raise RuntimeError("no inputs were found that it runs on")


def outputs(model: Any, runs: Sequence[Run]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            tensors.append(value)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                if "attentions" not in str(name) and name != "past_key_values":
                    take(item)
        elif type(value) in (tuple, list):
            for item in value:
                take(item)

    for run in runs:
        torch.manual_seed(0)
        with torch.no_grad():
            take(model.get_submodule(run.path)(**copy.deepcopy(run.inputs)))
    return tensors


def silenced(
    model: Any, sites: Sequence[Any], members: Sequence[tuple[int, int]], runs: Sequence[Run]
) -> list[torch.Tensor]:
    """Outputs with zeros in the columns of the output projections: the reference, which uses no code of headprune."""
    with torch.no_grad(), ExitStack() as stack:
        for site in sites:
            selected = [member for index, member in members if index == site.index]
            if not selected:
                continue
            weight = model.get_submodule(site.o).weight
            stack.callback(weight.copy_, weight.clone())
            columns = site.columns([site.position(member) for member in selected])
            if is_transposed(model.get_submodule(site.o)):
                weight[columns] = 0
            else:
                weight[:, columns] = 0
        return outputs(model, runs)


def agree(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Equal but for rounding, relative to the largest number; some code takes steps in float32 whatever else."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return False
    for one, other in zip(expected, actual, strict=True):
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return False
        if finite.any():
            scale = max(1.0, float(one[finite].abs().max()))
            allowed = scale * (1e-5 if one.dtype == torch.float64 else 1e-4)
            if not float((one[finite] - other[finite]).abs().max()) <= allowed:
                return False
    return True


def check(model_type: str) -> dict[str, Any]:
    """One row of the table: its attention, then its feed-forward layers."""
    row: dict[str, Any] = {"type": model_type, "status": "not built", "reason": ""}
    started = time.perf_counter()
    try:
        model, runs = build(model_type)
    except Exception as error:
        return {**row, "reason": _short(error)}
    dense = copy.deepcopy(model)
    row |= {"class": type(model).__name__, **_heads(model, runs)}
    if row["status"] != "WRONG":
        row |= _neurons(dense, runs)
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def _heads(model: Any, runs: Sequence[Run]) -> dict[str, Any]:
    try:
        survey = headprune.survey(model)
    except HeadpruneError as error:
        return {"status": "refused", "reason": _short(error)}
    sites = survey.sites
    if not sites:
        reason = survey.left[0] if survey.left else ("", "")
        status = "refused" if survey.left else "no attention"
        return {"status": status, "reason": ": ".join(reason) if survey.left else ""}
    row = {"sites": len(sites), "left": [list(pair) for pair in survey.left], "by": survey.known_by}
    units = [[tuple(head) for head in unit] for site in sites for unit in site.units()]
    half = [head for unit in units[::2] for head in unit]
    full = {site.index for site in sites if all(tuple(h) in half for unit in site.units() for h in unit)}
    half = [head for head in half if head[0] not in full]
    steps = [("half of its units", half)]
    last = next((site for site in sites if not site.obstacle_to_emptying), None)
    if last is not None:
        steps.append(("a whole site", _rest(last, half)))
    return {**row, "heads": sum(site.original for site in sites), **_try_removals(model, sites, steps, runs)}


def _neurons(model: Any, runs: Sequence[Run]) -> dict[str, Any]:
    """How many feed-forward layers are exact; the status only where one is not."""
    try:
        sites = all_sites(model)
    except HeadpruneError:
        return {"neurons": 0}
    layers = [site for site in sites if site.kind == "neurons"]
    if not layers:
        return {"neurons": 0}
    half = [(site.index, neuron) for site in layers for neuron in site.kept[site.index % 2 :: 2]]
    whole: dict[str, Any] = {}
    for site in layers:
        if not site.obstacle_to_emptying:
            whole.setdefault(re.sub(r"\d+", "*", site.path), site)
    rest = [member for site in whole.values() for member in _rest(site, half)]
    result = _try_removals(model, sites, [("half of its neurons", half), ("whole feed-forward layers", rest)], runs)
    if result["status"] == "exact":
        return {"neurons": len(layers), "emptied": len(whole)}
    if result["status"] == "refused":
        return {"neurons": 0, "note": f"neurons: {result['reason']}"}
    return {**result, "neurons": 0}


def _rest(site: Any, gone: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What a site has left."""
    known = set(gone)
    return [(site.index, member) for member in site.kept if (site.index, member) not in known]


def _try_removals(
    model: Any, sites: Sequence[Any], steps: Sequence[tuple[str, Any]], runs: Sequence[Run]
) -> dict[str, Any]:
    """Remove step by step, compare each time with the dense model, silenced; then save and load."""
    dense = copy.deepcopy(model)
    all_gone: list[tuple[int, int]] = []
    actual = outputs(model, runs)
    try:
        for what, members in steps:
            if not members:
                continue
            all_gone += members
            expected = silenced(dense, sites, all_gone, runs)  # and dense again afterwards
            try:
                remove_units(model, members)
                actual = outputs(model, runs)
            except HeadpruneError as error:
                return {"status": "refused", "reason": _short(error)}
            except Exception as error:
                return {"status": "WRONG", "reason": f"fails with {what} removed: {_short(error)}"}
            if not agree(expected, actual):
                return {"status": "WRONG", "reason": f"outputs differ with {what} removed"}
        return _try_reloading(model, dense, runs, actual)
    except Exception as error:
        return {"status": "WRONG", "reason": _short(error)}


def _try_reloading(model: Any, dense: Any, runs: Sequence[Run], actual: list[torch.Tensor]) -> dict[str, Any]:
    # A class that transformers does not export cannot be found by its name.
    named = {} if hasattr(transformers, type(model).__name__) else {"model_class": type(model)}
    problem = _reload_problem(model, runs, actual, headprune.save, functools.partial(headprune.load, **named))
    if not problem:
        return {"status": "exact"}
    plain = type(dense)
    dense_problem = _reload_problem(
        dense, runs, outputs(dense, runs), lambda m, folder: m.save_pretrained(folder), plain.from_pretrained
    )
    if dense_problem:  # a small config that does not survive its json file says nothing about pruning
        return {"status": "exact", "note": "not reloaded: transformers does not load the small dense model either"}
    return {"status": "WRONG", "reason": problem}


def _reload_problem(model: Any, runs: Sequence[Run], expected: list[torch.Tensor], save: Any, load: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(model, folder)
            again = load(folder, dtype=next(model.parameters()).dtype).eval()
            if hasattr(again, "set_experts_implementation"):
                again.set_experts_implementation("eager")
            return "" if agree(expected, outputs(again, runs)) else "outputs differ after saving and loading"
        except Exception as error:
            return f"its checkpoint does not load: {_short(error)}"


def _short(error: Exception) -> str:
    text = re.sub(r" from '[^']*'", "", " ".join(str(error).split()))  # where a module lies says nothing elsewhere
    return (text if isinstance(error, HeadpruneError) else f"{type(error).__name__}: {text}")[:300]


def _work(pipe: Any) -> None:
    """A process that makes one row after the other."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with suppress(EOFError):  # nothing more to do
        while True:
            pipe.send(check(pipe.recv()))


class Worker:
    """A process of its own, so that a model type that crashes or hangs costs no more than its row."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.name, self.started = "", 0.0

    def give(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()
        self.pipe.send(name)

    def row(self, seconds: float) -> dict[str, Any] | None:
        """The row, if it is there; one that says so where the process is lost, or takes longer than this."""
        lost = ""
        try:
            if self.pipe.poll(0.02):
                return self.pipe.recv()
        except (EOFError, OSError):
            lost = "the process died"
        if time.monotonic() - self.started > seconds:
            lost = f"took longer than {seconds:g} s"
        if not lost:
            return None
        self.process.kill()
        return {"type": self.name, "status": "not built", "reason": lost, "lost": True}


def measure(types: Sequence[str], workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows as they come, a few processes at a time."""
    waiting = list(types)
    pool = [Worker() for _ in range(min(workers, len(waiting)))]
    busy: list[Worker] = []
    while waiting or busy:
        while waiting and len(busy) < len(pool):
            worker = next(worker for worker in pool if worker not in busy)
            worker.give(waiting.pop(0))
            busy.append(worker)
        for worker in list(busy):
            row = worker.row(seconds)
            if row is None:
                continue
            busy.remove(worker)
            if row.pop("lost", False):
                pool[pool.index(worker)] = Worker()
            reason = row.get("reason") or row.get("note", "")
            print(f"{row['status']:13}{row['type']:32}{row.get('neurons', ''):>4}  {reason[:140]}", flush=True)
            yield row


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["status"] for row in rows)
    lines = [
        "# Coverage",
        "",
        "Which model types can be pruned exactly, as measured by",
        "`python -m benchmarks.model_coverage --out docs/coverage.md`",
        f"with transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}: a small random",
        "model of each type, half of its units removed, then a whole site, compared with zeros in the columns of its",
        "output projections, then saved and loaded. The column of neurons counts the feed-forward layers for which the",
        "same holds: half of their neurons removed, then a whole layer of every kind.",
        "",
        "| result | model types |",
        "|---|---|",
        *(f"| {status} | {counts[status]} |" for status in ORDER if counts[status]),
        "",
        f"Feed-forward layers can be pruned in {sum(bool(row.get('neurons')) for row in rows)} model types.",
        "",
        "| model type | class | result | sites | neurons | left whole, or why not |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        left = Counter(reason for _, reason in row.get("left", []))
        why = row.get("reason") or "; ".join(f"{count} x {reason}" for reason, count in left.items())
        why = "; ".join(part for part in (why, row.get("note", "")) if part)
        counts_of = (row.get("sites", ""), row.get("neurons", ""))
        cells = (row["type"], row.get("class", ""), row["status"], *counts_of, why.replace("|", "/"))
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all without it")
    parser.add_argument("--out", type=Path, help="write the table in markdown")
    parser.add_argument("--rows", type=Path, help="write every row as it comes; those that are there are not measured")
    parser.add_argument("--seconds", type=float, default=120, help="how long a model type may take")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    types = options.types.split(",") if options.types else sorted(CONFIG_MAPPING)
    lines = options.rows.read_text().splitlines() if options.rows and options.rows.is_file() else []
    rows = {row["type"]: row for row in map(json.loads, lines)}
    for row in measure([name for name in types if name not in rows], options.workers, options.seconds):
        rows[row["type"]] = row
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(dict(Counter(row["status"] for row in rows.values())))
    if options.out:
        options.out.write_text(page([rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    main()
