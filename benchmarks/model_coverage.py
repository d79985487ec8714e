"""Which transformers can be pruned: every model type that the installed transformers knows, one row each.

    python -m benchmarks.model_coverage [--types A,B] [--out docs/coverage.md] [--rows FILE.jsonl] [--workers 2]
                                  [--seconds 120] [--only entropy [--result FILE.json]]

A small model of each type is built from its config class, sizes reduced by rule, with random weights. Half of its units
are removed, then a whole site, and each time all outputs are compared with those of the dense model whose output
projections have zeros in the columns of these units. Then a checkpoint is saved and loaded. The same is done with the
neurons of its feed-forward layers: half of them, then a whole layer of every kind. A row says:

    exact            all of it agreed; "neurons" is the number of feed-forward layers that did
    refused          headprune says that nothing can be pruned, with the reason
    no attention     there is none
    not built        the small model could not be built or run here, with the reason
    WRONG            outputs differ, or the model fails after a removal

The column "entropy" compares attention entropies with `output_attentions` (benchmarks/entropy_coverage.py);
`--only entropy` fills no other. The columns "scores" and "rounds" say what comes of the defaults
(benchmarks/score_coverage.py).

Model types are tried in processes of their own, so that one that crashes or hangs costs no more than its row. With
`--rows` every row is written as it comes, and those that the file has already are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import functools
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headprune
from benchmarks.entropy_coverage import entropy_result, entropy_row
from benchmarks.score_coverage import error_text, score_row
from benchmarks.small_models import agree, build, outputs
from headprune.discovery.twin import Run
from headprune.errors import HeadpruneError
from headprune.surgery.remove_units import remove_units
from headprune.units import all_sites
from headprune.units.linear import is_transposed

REASONS = ("note", "score_reason", "entropy_reason")
ORDER = ("WRONG", "exact", "refused", "no attention", "not built")


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


def check(model_type: str, only: str | None = None) -> dict[str, Any]:
    """One row of the table: its entropies, its attention, then its feed-forward layers."""
    row: dict[str, Any] = {"type": model_type, "status": "not built", "reason": ""}
    started = time.perf_counter()
    try:
        model, runs = build(model_type)
    except Exception as error:
        return {**row, "reason": _short(error)}
    dense = copy.deepcopy(model)
    row |= {"class": type(model).__name__, **entropy_row(model, runs)}
    if only == "entropy":
        return {**row, "status": "built", "seconds": round(time.perf_counter() - started, 1)}
    row |= {**score_row(model, runs), **_heads(model, runs)}
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
    return re.sub(r" from '[^']*'", "", error_text(error))  # where a module lies says nothing elsewhere


def _work(pipe: Any) -> None:
    """A process that makes one row after the other."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with suppress(EOFError):  # nothing more to do
        while True:
            pipe.send(check(*pipe.recv()))


class Worker:
    """A process of its own, so that a model type that crashes or hangs costs no more than its row."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.name, self.started = "", 0.0

    def give(self, name: str, only: str | None) -> None:
        self.name, self.started = name, time.monotonic()
        self.pipe.send((name, only))

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


def measure(types: Sequence[str], workers: int, seconds: float, only: str | None) -> Iterator[dict[str, Any]]:
    """Rows as they come, a few processes at a time."""
    waiting = list(types)
    pool = [Worker() for _ in range(min(workers, len(waiting)))]
    busy: list[Worker] = []
    while waiting or busy:
        while waiting and len(busy) < len(pool):
            worker = next(worker for worker in pool if worker not in busy)
            worker.give(waiting.pop(0), only)
            busy.append(worker)
        for worker in list(busy):
            row = worker.row(seconds)
            if row is None:
                continue
            busy.remove(worker)
            if row.pop("lost", False):
                pool[pool.index(worker)] = Worker()
            reason = row.get("reason") or row.get("note") or row.get("entropy_reason") or row.get("score_reason", "")
            columns = "".join(f"{row.get(name, ''):15}" for name in ("scores", "rounds", "entropy"))
            print(f"{row['status']:13}{row['type']:32}{row.get('neurons', ''):>4}  {columns}{reason[:140]}", flush=True)
            yield row


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["status"] for row in rows)
    entropies = Counter(row["entropy"] for row in rows if "entropy" in row)
    lines = [
        "# Coverage",
        "",
        "Which model types can be pruned exactly, as measured by",
        "`python -m benchmarks.model_coverage --out docs/coverage.md`",
        f"with transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}: a small random",
        "model of each type, half of its units removed, then a whole site, compared with zeros in the columns of its",
        "output projections, then saved and loaded. The column of neurons counts the feed-forward layers for which the",
        "same holds: half of their neurons removed, then a whole layer of every kind. The column of entropy compares",
        "the attention entropies that headprune reads with those of `output_attentions`: `exact`, `refused` with a",
        "reason, or not compared, where the model does not return its attention. The column of scores says whether the",
        "default criterion gives the same for two samples together and one by one (`no samples`: the code of the model",
        "itself mixes samples, or draws at random; `not run`: it does not run on one sample), that of rounds whether a",
        "run to 0.8 of the FLOPs ends (`too wide`: not tried, as it takes minutes). Exports are not in the table: each",
        "is compared with PyTorch before its folder appears, and refused where it differs.",
        "",
        "| result | model types |",
        "|---|---|",
        *(f"| {status} | {counts[status]} |" for status in ORDER if counts[status]),
        "",
        f"Feed-forward layers can be pruned in {sum(bool(row.get('neurons')) for row in rows)} model types.",
        "",
        "| entropy | model types |",
        "|---|---|",
        *(f"| {result} | {count} |" for result, count in entropies.most_common()),
        "",
        "| model type | class | result | sites | neurons | scores | rounds | entropy | left whole, or why not |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        left = Counter(reason for _, reason in row.get("left", []))
        why = row.get("reason") or "; ".join(f"{count} x {reason}" for reason, count in left.items())
        why = "; ".join(part for part in [why, *(row.get(name, "") for name in REASONS)] if part)
        counts_of = [row.get(name, "") for name in ("sites", "neurons", "scores", "rounds", "entropy")]
        cells = (row["type"], row.get("class", ""), row["status"], *counts_of, why.replace("|", "/"))
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all without it")
    parser.add_argument("--out", type=Path, help="write the table in markdown")
    parser.add_argument("--rows", type=Path, help="write every row as it comes; those that are there are not measured")
    parser.add_argument("--seconds", type=float, default=120, help="how long a model type may take")
    parser.add_argument("--only", choices=["entropy"], help="fill this column alone")
    parser.add_argument("--result", type=Path, help="write counts and rows of the column as JSON; with --only")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    types = options.types.split(",") if options.types else sorted(CONFIG_MAPPING)
    lines = options.rows.read_text().splitlines() if options.rows and options.rows.is_file() else []
    rows = {row["type"]: row for row in map(json.loads, lines)}
    for row in measure([name for name in types if name not in rows], options.workers, options.seconds, options.only):
        rows[row["type"]] = row
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(dict(Counter(row["status"] for row in rows.values())))
    if options.result:
        options.result.write_text(json.dumps(entropy_result([rows[name] for name in sorted(rows)]), indent=1) + "\n")
    if options.out:
        options.out.write_text(page([rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    main()
