"""Exporting a model: write it, open it in its runtime, check it, time it, and only then let it have its name."""

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

from headprune.errors import ExportError
from headprune.extras import need
from headprune.hooks.outputs import evaluating
from headprune.measure.costs import MEBIBYTE
from headprune.runtimes.check import check
from headprune.runtimes.spec import RUNTIMES, Runner, Runtime, Source
from headprune.runtimes.times import timed
from headprune.store.files import replaced_directory
from headprune.store.processors import carry_files, source_folder
from headprune.tasks import Task, batch_size, task_of

RECORD = "export.json"
SNIPPET = "run.py"  # the code that runs the folder, as a file
FORMAT = 1


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
    """Write the model, pruned or not, as files of the runtime `to`, into the folder `path`; returns what was measured.

    It is checked on the batches in the real runtime before the folder appears. With the `dense` model, the time of both
    is taken there as well. Tokenizer files come from the folder that the model was loaded from, or from `tokenizer`.
    """
    chosen = runtime_of(to, quantize)
    held = [dict(batch) for batch in batches]
    if not held:
        raise ExportError("An export is checked on data, and there is none; give at least one batch.")
    with evaluating(model):
        source = source_of(model, held, task, tokenizer)
        chosen.refuse(source)
        with _written_to(Path(path)) as fresh:
            chosen.write(source, fresh, quantize)
            runner = chosen.open(fresh, source, threads=threads)
            try:
                checked = check(
                    chosen, runner, source, held, quantized=quantize is not None, metric=metric, max_drop=max_drop
                )
                times, size = _compared(chosen, runner, source, dense, threads)
            finally:
                runner.close()
            written = _megabytes(fresh)
            if source.folder is not None:
                carry_files(source.folder, fresh)
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
                "snippet": chosen.snippet(fresh),
            }
            (fresh / SNIPPET).write_text(program_of(record["snippet"]))
            record["files"] = sorted([*(file.name for file in fresh.iterdir()), RECORD])
            (fresh / RECORD).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    return record


@contextmanager
def _written_to(target: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of an earlier export, whose files go; what else lies there stays."""
    try:
        earlier = json.loads((target / RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier = []
    try:
        with replaced_directory(target, earlier, marker=RECORD, what="an export") as fresh:
            yield fresh
    except OSError as error:
        why = error.strerror or str(error)
        raise ExportError(f"Cannot export to {target}: {why}; make room, or choose another place.") from error


def runtime_of(name: str, quantize: str | None) -> Runtime:
    """The runtime of this name; refuses what it cannot do, and packages that are missing."""
    import headprune.runtimes.every  # noqa: F401  # registers them all

    if name not in RUNTIMES:
        raise ExportError(f"There is no runtime {name!r}; choose one of {', '.join(sorted(RUNTIMES))}.")
    chosen = RUNTIMES[name]
    if quantize is not None and quantize not in chosen.quantizations:
        able = " or ".join(chosen.quantizations)
        raise ExportError(f"{chosen.title} has no quantisation {quantize!r} here; choose {able}, or none.")
    need(chosen.modules, chosen.extra, f"Exports to {chosen.title} need")
    return chosen


def source_of(
    model: PreTrainedModel,
    batches: list[dict[str, Any]],
    task: str | Task | None = None,
    tokenizer: str | Path | None = None,
) -> Source:
    """The model as runtimes take it: on the CPU and in float32. Data comes sorted by length, so that the batch in the
    middle is the one to take times on."""
    own = task if isinstance(task, Task) else task_of(model, task)
    if any(p.device.type != "cpu" or p.dtype not in (torch.float32, torch.int64) for p in model.parameters()):
        raise ExportError("A model is exported from the CPU in float32; load it with dtype=torch.float32.")
    most = max(map(batch_size, batches))
    full = [batch for batch in batches if batch_size(batch) == most]
    folder = Path(tokenizer) if tokenizer is not None else source_folder(model)
    return Source(model, own, own.prepare(full[len(full) // 2], torch.device("cpu")), folder)


def _compared(
    runtime: Runtime, runner: Runner, source: Source, dense: PreTrainedModel | None, threads: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Times of the exported model, beside those of the dense one in float where it is given, and the size of that."""
    if dense is None:
        return timed(runtime, {"pruned": runner}, source, threads=threads), {}
    with tempfile.TemporaryDirectory() as place, evaluating(dense):
        folder = Path(place)
        whole = replace(source, model=dense)
        runtime.write(whole, folder, None)
        other = runtime.open(folder, whole, threads=threads)
        try:
            times = timed(runtime, {"dense": other, "pruned": runner}, source, threads=threads)
        finally:
            other.close()
        return times, {"dense": _megabytes(folder)}


def program_of(snippet: str) -> str:
    """A snippet as a file that runs its own folder, wherever that is."""
    here = "import os\n\nHERE = os.path.dirname(os.path.abspath(__file__))\n"
    return here + snippet.replace('f"DIR/', 'f"{HERE}/').replace('"DIR/', 'HERE + "/')


def _megabytes(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / MEBIBYTE, 2)


def _versions(runtime: Runtime) -> dict[str, str]:
    from headprune import __version__

    packages = [importlib.import_module(name) for name in (*runtime.modules, "torch", "transformers")]
    return {"headprune": __version__, **{one.__name__: str(getattr(one, "__version__", "")) for one in packages}}
