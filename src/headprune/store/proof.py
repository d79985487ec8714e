"""Whether plain transformers loads a checkpoint as it is: tried in a fresh process where headprune cannot be imported.

That the shapes fit proves little: a class may read a setting for one of its parts and pass it by in another.
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
from headprune.hooks.outputs import evaluating
from headprune.store import reload_program
from headprune.units.dense import dense_class

log = logging.getLogger(__name__)
LARGEST = 4 << 30  # bytes of weights that are loaded once more for it
WITHIN = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the largest output; half precisions differ by more
COARSE = 3e-2
PATIENCE = 600.0  # seconds until a process that does not answer has proven nothing
NAMES_ONLY = ("id2label", "label2id", "_name_or_path")  # settings that change no number


class Prover:
    """A process that loads checkpoints by plain transformers; importing it takes longer than loading most of them."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.complaints = tempfile.TemporaryDirectory(prefix="headprune-")

    @property
    def _reasons(self) -> Path:
        return Path(self.complaints.name) / "stderr"

    def ask(self, folder: Path, expected: Path, ours: bool) -> bool:
        """False for whatever goes wrong: then nothing was proven."""
        process = self.process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        before = self._reasons.stat().st_size
        late = threading.Timer(PATIENCE, _kill, [process])
        late.start()
        try:
            process.stdin.write(json.dumps([str(folder.resolve()), str(expected), ours]) + "\n")
            process.stdin.flush()
            proven = process.stdout.readline().strip() == "true"
        except OSError:
            proven = False
        except BaseException:  # an interrupt, which a group of its own does not get
            _kill(process)
            raise
        finally:
            late.cancel()
        if not proven:
            said = self._reasons.read_bytes()[before:].decode(errors="replace").strip()
            log.debug("Plain transformers does not load %s: %s", folder, said or "the process did not answer")
        return proven

    def close(self) -> None:
        if self.process is not None:
            try:
                self.process.communicate(timeout=60)
            except OSError:
                pass
            except subprocess.TimeoutExpired:
                _kill(self.process)
            self.process = None
        self.complaints.cleanup()

    def _running(self) -> subprocess.Popen[str]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        with self._reasons.open("ab") as reasons:
            return subprocess.Popen(
                [sys.executable, "-c", Path(reload_program.__file__).read_text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=reasons,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
                cwd=tempfile.gettempdir(),
                start_new_session=True,  # to be ended with its forks
            )


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


_kept: list[Prover] = []


@contextmanager
def one_prover() -> Iterator[None]:
    """All checkpoints that are saved inside share one process."""
    prover = Prover()
    _kept.append(prover)
    try:
        yield
    finally:
        _kept.remove(prover)
        prover.close()


def too_large(model: PreTrainedModel) -> bool:
    """Whether loading the model once more might not fit into the memory."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()) > LARGEST


def loads_plainly(model: PreTrainedModel, folder: Path, *, ours: bool = False) -> bool:
    """Whether the class that the checkpoint names, built by plain transformers, says what the model says. It is not
    tried again for the same class, config and removals: weights are read as they are. `ours`: the code that the
    checkpoint names is headprune's, and may run; no other is."""
    return bool(
        remembered(dense_class(model), f"plain {_structure(folder)}", lambda: _try(model, folder, ours) or None)
    )


def _structure(folder: Path) -> str:
    settings = json.loads((folder / "config.json").read_text())
    return json.dumps({name: settings[name] for name in sorted(settings) if name not in NAMES_ONLY})


def _try(model: PreTrainedModel, folder: Path, ours: bool) -> bool:
    told = _said(model)
    if told is None:
        return False
    with tempfile.TemporaryDirectory(prefix="headprune-") as place:
        expected = Path(place) / "expected.pt"
        torch.save(told, expected)
        prover = _kept[-1] if _kept else Prover()
        try:
            return prover.ask(folder, expected, ours)
        finally:
            if not _kept:
                prover.close()


def _said(model: PreTrainedModel) -> Mapping[str, Any] | None:
    """Small inputs, and what the model gives for them; None where it gives nothing to compare."""
    from headprune.discovery import whole_inputs

    with torch.no_grad(), evaluating(model):
        inputs = whole_inputs(model)
        if inputs is None:
            return None
        result = model(**{name: _moved(value, model.device) for name, value in inputs.items()})
    found = {
        name: value.detach().float().cpu()
        for name, value in result.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if not found or not all(value.isfinite().all() for value in found.values()):
        return None
    plain = {name: _moved(value, torch.device("cpu")) for name, value in inputs.items()}
    return {"inputs": plain, "outputs": found, "within": WITHIN.get(model.dtype, COARSE)}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
