"""Exports a model: writes it, opens it in its runtime, checks and times it, and only then moves it to its folder."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.checkpoint.atomic_files import replace_directory
from headprune.checkpoint.processors import copy_files, source_folder
from headprune.errors import ExportError, UnsupportedModelError
from headprune.exports import gguf, onnx, openvino, torch_program  # noqa: F401  # registers these runtimes
from headprune.exports.check_outputs import check
from headprune.exports.latency import time_runners
from headprune.exports.runtime import RUNTIMES, Runner, Runtime, Source
from headprune.extras import need
from headprune.hooks.outputs import evaluating
from headprune.measure.costs import MEBIBYTE
from headprune.measure.dummy_inputs import dummy_batch
from headprune.tasks import Task, batch_size, task_of

RECORD = "export.json"
SNIPPET = "run.py"  # the code that runs the folder, as a file
FORMAT = 1
DUMMY_SIZES = ((3, 12), (2, 7))  # rows and tokens


def export(
    model: PreTrainedModel,
    path: str | Path,
    batches: Iterable[Mapping[str, Any]],
    *,
    to: str,
    quantize: str | None = None,
    dense: PreTrainedModel | None = None,
    task: str | Task | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    threads: int = 1,
    tokenizer: str | Path | None = None,
) -> dict[str, Any]:
    """Write the model, pruned or not, as files of the runtime `to`, into the folder `path`; returns the record
    of its checks.

    It is checked on the batches in the runtime before the folder is created. With the `dense` model both are timed
    there as well. Tokenizer files are copied from the folder that the model was loaded from, or from `tokenizer`.
    """
    chosen = runtime_of(to, quantize)
    data = [dict(batch) for batch in batches]
    if not data:
        raise ExportError("An export is checked on data; give at least one batch.")
    with evaluating(model):
        source = source_of(model, data, task, tokenizer)
        chosen.refuse(source)
        with _new_folder(Path(path)) as new:
            chosen.write(source, new, quantize)
            runner = chosen.open(new, source, threads=threads)
            try:
                checked = check(
                    chosen, runner, source, data, quantized=quantize is not None, metric=metric, max_drop=max_drop
                )
                times, size = _time_with_dense(chosen, runner, source, dense, threads)
            finally:
                runner.close()
            written = _megabytes(new)
            if source.folder is not None:
                copy_files(source.folder, new)
            record: dict[str, Any] = {
                "format": FORMAT,
                "runtime": chosen.name,
                "title": chosen.title,
                "install": chosen.install,
                "quantize": quantize,
                "model": Path(str(getattr(model.config, "_name_or_path", ""))).name,
                "task": source.task.name,
                "form": getattr(runner, "form", None),
                "versions": _versions(chosen),
                "check": checked.to_json(),
                "latency": times,
                "megabytes": {**size, "pruned": written},
                "snippet": chosen.snippet(new),
            }
            (new / SNIPPET).write_text(program_of(record["snippet"]))
            record["files"] = sorted([*(file.name for file in new.iterdir()), RECORD])
            (new / RECORD).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    return record


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A new folder that replaces an earlier export, whose files are removed; other files are kept."""
    try:
        with replace_directory(target, files_of_export) as new:
            yield new
    except OSError as error:
        why = error.strerror or str(error)
        raise ExportError(f"Cannot export to {target}: {why}; make room, or choose another directory.") from error


def files_of_export(folder: Path) -> list[str]:
    """The names of the files of an earlier export in this folder; one that holds something else is refused, also where
    it has an export.json of another program."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files = [str(name) for name in record["files"]]
        is_ours = "headprune" in dict(record["versions"]) and RECORD in files
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ExportError(f"{folder} exists and holds something that is not an export; choose a new directory.")
    return files


def runtime_of(name: str, quantize: str | None) -> Runtime:
    """The runtime of this name; raises for quantisations that it does not have, and for missing packages."""
    if name not in RUNTIMES:
        raise ExportError(f"There is no runtime {name!r}; choose one of {', '.join(sorted(RUNTIMES))}.")
    chosen = RUNTIMES[name]
    if quantize is not None and quantize not in chosen.quantizations:
        choices = " or ".join(chosen.quantizations)
        raise ExportError(f"{chosen.title} has no quantisation {quantize!r} here; choose {choices}, or none.")
    need(chosen.modules, chosen.extra, f"Exports to {chosen.title} need")
    return chosen


def dummy_batches(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Two dummy batches of different sizes and lengths, to compare outputs without data."""
    try:
        batches = [dummy_batch(model, rows, length) for rows, length in DUMMY_SIZES]
    except UnsupportedModelError as error:
        raise ExportError(str(error).replace("; give a batch", "; give data to check the export on")) from None
    return [{name: value for name, value in batch.items() if torch.is_tensor(value)} for batch in batches]


def source_of(
    model: PreTrainedModel,
    batches: list[dict[str, Any]],
    task: str | Task | None = None,
    tokenizer: str | Path | None = None,
) -> Source:
    """The model and data for an export: on the CPU and in float32. Data is sorted by length, so the batch in the middle
    is the one to time."""
    resolved_task = task if isinstance(task, Task) else task_of(model, task)
    if any(p.device.type != "cpu" or p.dtype not in (torch.float32, torch.int64) for p in model.parameters()):
        raise ExportError("A model is exported from the CPU in float32; load it with dtype=torch.float32.")
    most = max(map(batch_size, batches))
    full = [batch for batch in batches if batch_size(batch) == most]
    folder = Path(tokenizer) if tokenizer is not None else source_folder(model)
    return Source(model, resolved_task, resolved_task.prepare(full[len(full) // 2], torch.device("cpu")), folder)


def _time_with_dense(
    runtime: Runtime, runner: Runner, source: Source, dense: PreTrainedModel | None, threads: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Times of the exported model, with those of the dense one in float where there is one, and the size of that."""
    if dense is None:
        return time_runners(runtime, {"pruned": runner}, source, threads=threads), {}
    with tempfile.TemporaryDirectory() as temporary, evaluating(dense):
        folder = Path(temporary)
        dense_source = replace(source, model=dense)
        runtime.write(dense_source, folder, None)
        dense_runner = runtime.open(folder, dense_source, threads=threads)
        try:
            times = time_runners(runtime, {"dense": dense_runner, "pruned": runner}, source, threads=threads)
        finally:
            dense_runner.close()
        return times, {"dense": _megabytes(folder)}


def program_of(snippet: str) -> str:
    """A snippet as a program that runs the folder that contains it."""
    here = "import os\n\nHERE = os.path.dirname(os.path.abspath(__file__))\n"
    return here + snippet.replace('f"DIR/', 'f"{HERE}/').replace('"DIR/', 'HERE + "/')


def _megabytes(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / MEBIBYTE, 2)


def _versions(runtime: Runtime) -> dict[str, str]:
    from headprune import __version__

    packages = [importlib.import_module(name) for name in (*runtime.modules, "torch", "transformers")]
    return {
        "headprune": __version__,
        **{package.__name__: str(getattr(package, "__version__", "")) for package in packages},
    }
