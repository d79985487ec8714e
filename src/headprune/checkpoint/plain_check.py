"""Checks that plain transformers loads a checkpoint as it is, in a new process where headprune cannot be imported.

Matching shapes are not enough: a class may use a setting in one of its parts and ignore it in another.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.checkpoint import plain_check_program
from headprune.hooks.outputs import evaluating
from headprune.units.dense_model import classes_of, dense_class

log = logging.getLogger(__name__)
LARGEST = 4 << 30  # bytes of weights up to which a checkpoint is loaded again to check it
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest output
HALF_TOLERANCE = 3e-2
TIMEOUT = 600.0  # seconds after which a process that does not answer is killed
NAMES_ONLY = ("id2label", "label2id", "_name_or_path")  # settings that do not change outputs


class CheckProcess:
    """A process that loads checkpoints by plain transformers; importing that takes longer than loading most of them."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.folder_of_stderr = tempfile.TemporaryDirectory(prefix="headprune-")

    @property
    def _stderr(self) -> Path:
        return Path(self.folder_of_stderr.name) / "stderr"

    def check(self, folder: Path, expected: Path, ours: bool) -> bool:
        """Whether the checkpoint loads with the expected outputs; False also for any failure of the process."""
        process = self.process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        before = self._stderr.stat().st_size
        timer = threading.Timer(TIMEOUT, _kill, [process])
        timer.start()
        try:
            process.stdin.write(json.dumps([str(folder.resolve()), str(expected), ours]) + "\n")
            process.stdin.flush()
            loaded = process.stdout.readline().strip() == "true"
        except OSError:
            loaded = False
        except BaseException:  # an interrupt, which does not reach another process group
            _kill(process)
            raise
        finally:
            timer.cancel()
        if not loaded:
            stderr = self._stderr.read_bytes()[before:].decode(errors="replace").strip()
            log.debug("Plain transformers does not load %s: %s", folder, stderr or "the process did not answer")
        return loaded

    def close(self) -> None:
        if self.process is not None:
            try:
                self.process.communicate(timeout=60)
            except OSError:
                pass
            except subprocess.TimeoutExpired:
                _kill(self.process)
            self.process = None
        self.folder_of_stderr.cleanup()

    def _running(self) -> subprocess.Popen[str]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        with self._stderr.open("ab") as reasons:
            return subprocess.Popen(
                [sys.executable, "-c", Path(plain_check_program.__file__).read_text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=reasons,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
                cwd=tempfile.gettempdir(),
                start_new_session=True,  # so that it can be killed with its forks
            )


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


_shared: list[CheckProcess] = []


@contextmanager
def shared_check_process() -> Iterator[None]:
    """All checkpoints that are saved within the block share one process."""
    process = CheckProcess()
    _shared.append(process)
    try:
        yield
    finally:
        _shared.remove(process)
        process.close()


def too_large(model: PreTrainedModel) -> bool:
    """Whether loading the model once more might not fit into the memory."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()) > LARGEST


def loads_plainly(model: PreTrainedModel, folder: Path, *, ours: bool = False) -> bool:
    """Whether plain transformers builds the class that the checkpoint names with the outputs of the model. The result
    is cached for the class, config and removals, as weights are read as they are. `ours`: the code that the checkpoint
    names is headprune's, and may run; no other code does."""
    kind = dense_class(model)
    return bool(
        remembered(
            kind,
            f"plain {_structure(folder)}",
            lambda: _try(model, folder, ours) or None,
            classes=classes_of(kind, model.config),
        )
    )


def _structure(folder: Path) -> str:
    settings = json.loads((folder / "config.json").read_text())
    return json.dumps({name: settings[name] for name in sorted(settings) if name not in NAMES_ONLY})


def _try(model: PreTrainedModel, folder: Path, ours: bool) -> bool:
    expectation = _expected_outputs(model)
    if expectation is None:
        return False
    with tempfile.TemporaryDirectory(prefix="headprune-") as scratch:
        expected = Path(scratch) / "expected.pt"
        torch.save(expectation, expected)
        process = _shared[-1] if _shared else CheckProcess()
        try:
            return process.check(folder, expected, ours)
        finally:
            if not _shared:
                process.close()


def _expected_outputs(model: PreTrainedModel) -> Mapping[str, Any] | None:
    """Small inputs, and the outputs of the model on them; None where there is nothing to compare."""
    from headprune.discovery import whole_inputs

    with torch.no_grad(), evaluating(model):
        inputs = whole_inputs(model)
        if inputs is None:
            return None
        result = model(**{name: _to(value, model.device) for name, value in inputs.items()})
    outputs = {
        name: value.detach().float().cpu()
        for name, value in result.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if not outputs or not all(value.isfinite().all() for value in outputs.values()):
        return None
    cpu_inputs = {name: _to(value, torch.device("cpu")) for name, value in inputs.items()}
    return {"inputs": cpu_inputs, "outputs": outputs, "within": TOLERANCE.get(model.dtype, HALF_TOLERANCE)}


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
