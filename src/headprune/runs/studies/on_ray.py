"""Runs as tasks of Ray: on this machine, where Ray is started and stopped again, or on a cluster that is there.

A task writes its run directory as any process does, and who asked for it reads the journal. So nothing but a job goes
to a task, and nothing but a sentence comes back; a task whose process died is given out again, and goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.errors import HeadpruneError, RunBusyError, RunError, SweepError
from headprune.extras import need
from headprune.runs.plugins import import_plugins

if TYPE_CHECKING:
    from headprune.runs.studies.plan import Job
    from headprune.runs.studies.running import Failures, Watch

LOOK = 0.5  # seconds between two looks at the journals
TRIES = 3  # deaths without a step between them after which a run is given up
STORE = 100 << 20  # bytes of shared memory: next to nothing is passed through it
PROCESS = 1 << 30  # bytes of a process that has imported what it needs
OUTPUTS = 1 << 30  # bytes of layers' outputs that evaluation keeps at most
PASSED_ON = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


@dataclass
class Attempt:
    """A run that was given out."""

    job: Job
    steps: int  # in its journal when it was given out
    fruitless: int = 0  # deaths in a row without a step
    deaths: int = 0
    told: int = 0  # lines of the journal that the watch knows
    alive: bool = False


@dataclass(frozen=True)
class Answer:
    """What comes back from a task: why it was refused, if it was. Some errors cannot be pickled; a sentence can."""

    refused: str | None = None
    busy: bool = False


def check_address(on: str) -> str | None:
    """Where Ray is: None to start it here, or the address of a cluster."""
    if on == "ray":
        return os.environ.get("RAY_ADDRESS") or None
    if on == "auto" or re.fullmatch(r"(ray://)?[\w.\-\[\]:]+:\d+", on):
        return on
    if re.fullmatch(r"ray://[\w.\-]+", on):
        return f"{on}:10001"  # where Ray's server for clients listens
    raise SweepError(f"--on takes ray, ray://HOST:PORT, HOST:PORT or auto, not {on!r}.")


class OnRay:
    """Several runs at once, each a task with the processors, the GPU and the memory that it needs."""

    def __init__(
        self, on: str = "ray", *, workers: int | None = None, cpus: int = 1, plugins: Sequence[str] = ()
    ) -> None:
        need(("ray",), "ray", "Sweeps on Ray need")
        self.address = check_address(on)
        if (self.address or "").startswith("ray://"):
            need(("grpc",), "ray", "Ray's clients need")
        self.workers, self.cpus, self.plugins = workers, cpus, tuple(plugins)
        self._stack = contextlib.ExitStack()

    # --- the cluster ---

    def __enter__(self) -> OnRay:
        import ray

        # Ray prints what happens to its processes on stdout, where results belong.
        self._stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            if not ray.is_initialized():
                self._connect()
                self._stack.callback(ray.shutdown)
            self._refuse_too_little()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _connect(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self.address is not None:
            passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            try:
                ray.init(self.address, runtime_env={"env_vars": passed}, **quiet)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise SweepError(
                    f"No Ray cluster answers at {self.address} ({reason}); check the address and its token, or start "
                    "Ray here: --on ray."
                ) from None
            return
        workers = self.workers or max(1, (os.cpu_count() or 1) // self.cpus)
        ray.init("local", num_cpus=workers * self.cpus, include_dashboard=False, object_store_memory=STORE, **quiet)

    def _refuse_too_little(self) -> None:
        """Ray would wait for ever for what no machine has."""
        most = self._most("CPU")
        if most < self.cpus:
            raise SweepError(
                f"Each run asks for {self.cpus} CPUs, and no machine has more than {most:g}; ask for fewer --cpus."
            )

    def _most(self, resource: str) -> float:
        """What the machine has that has most of it."""
        import ray

        return max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)

    def _resources(self, job: Job) -> dict[str, Any]:
        """What a run takes while it runs. Memory is at most what a machine has: then it runs there alone."""
        asked = job.experiment.device
        if ":" in asked and asked.startswith("cuda"):
            raise SweepError(f"Ray chooses which GPU a run has, so {asked} cannot be kept; use --device cuda.")
        gpus = self._most("GPU")
        if asked == "cuda" and not gpus:
            raise SweepError("No machine of the cluster has a GPU; use --device cpu or auto.")
        return {
            "num_cpus": self.cpus,
            "num_gpus": 1 if gpus and asked in ("cuda", "auto") else 0,
            "memory": int(min(memory_of(job), self._most("memory"))),
            "max_retries": 0,  # who has asked knows better than Ray whether a run gets on
        }

    # --- the work ---

    def check(self, jobs: Sequence[Job]) -> None:
        import ray

        from headprune.runs.studies.running import by_subject

        task, parts = ray.remote(check_task), by_subject(jobs)
        pending = [
            task.options(**{**self._resources(part[0]), "max_retries": TRIES}).remote(
                part, str(Path.cwd()), self.plugins, self.cpus
            )
            for part in parts
        ]
        for part, reference in zip(parts, pending, strict=True):
            answer, where = self._answer(reference), f"{part[0].experiment.model} with {part[0].experiment.data}"
            if answer is None:
                raise RunError(f"The process that loads {where} died, perhaps for want of memory; try fewer --workers.")
            if answer.refused is not None:
                raise HeadpruneError(f"{where}: {answer.refused}" if len(parts) > 1 else answer.refused)

    def run(self, jobs: Sequence[Job], watch: Watch) -> Failures:
        import ray

        task = ray.remote(run_task)
        failed: Failures = {}
        error: HeadpruneError | None

        def give_out(attempt: Attempt) -> Any:
            options = self._resources(attempt.job)
            return task.options(**options).remote(attempt.job, str(Path.cwd()), self.plugins, self.cpus)

        pending = {}
        for job in jobs:
            attempt = Attempt(job, steps := len(lines_of(job.folder)), told=steps)
            pending[give_out(attempt)] = attempt
        try:
            while pending:
                done, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK)
                for attempt in pending.values():
                    tell_news(attempt, watch)
                for reference in done:
                    attempt = pending.pop(reference)
                    answer = self._answer(reference)
                    if answer is None or (answer.busy and attempt.deaths):
                        error = refuse_or_go_on(attempt)
                        if error is None:
                            watch.started(attempt.job, again=True)
                            pending[give_out(attempt)] = attempt
                            continue
                    else:
                        kind = RunBusyError if answer.busy else HeadpruneError
                        error = None if answer.refused is None else kind(answer.refused)
                    if error is not None:
                        failed[attempt.job] = error
                    watch.ended(attempt.job, error)
        finally:
            for reference in pending:  # interrupted: what is written stays, and the same command goes on
                ray.cancel(reference, force=True)
        return failed

    def _answer(self, reference: Any) -> Answer | None:
        """What a task came to; None where its process or its machine died."""
        import ray
        from ray import exceptions

        try:
            return ray.get(reference)
        except exceptions.RayTaskError as error:
            if "No module named 'headprune" in str(error):
                raise SweepError(
                    "A machine of the cluster cannot import headprune as it is here; install the same version on all."
                ) from None
            # A bug, as it would be in this process.
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError):
            return None


def refuse_or_go_on(attempt: Attempt) -> RunError | None:
    """Whether a run whose process died is to be given up: not as long as it gets on."""
    folder = attempt.job.folder
    steps = len(lines_of(folder)) + len(lines_of(folder, "sweep/layers.jsonl"))
    attempt.fruitless = 0 if steps > attempt.steps else attempt.fruitless + 1
    attempt.steps, attempt.alive = steps, False
    attempt.deaths += 1
    if attempt.fruitless < TRIES:
        return None
    return RunError(
        f"The process of {attempt.job.folder} died {attempt.fruitless} times without a step between them, perhaps for "
        "want of memory; try fewer --workers, and run the same command again, which goes on from there."
    )


def lines_of(folder: Path, name: str = "steps.jsonl") -> list[bytes]:
    """The whole lines of a journal."""
    try:
        content = (folder / name).read_bytes()
    except OSError:
        return []
    return content[: content.rfind(b"\n") + 1].splitlines()


def tell_news(attempt: Attempt, watch: Watch) -> None:
    """Tell of the last step that is new in a journal."""
    from headprune.measure.trajectory import Step

    lines = lines_of(attempt.job.folder)
    if len(lines) > attempt.told:
        if not attempt.alive and not attempt.deaths:
            watch.started(attempt.job)
        attempt.alive = True
        watch.stepped(attempt.job, Step.from_json(json.loads(lines[-1])))
    attempt.told = len(lines)


def _memory_of_sweep(job: Job) -> int:
    """By the formula of `inspect --plan`."""
    from headprune.runs.subject import DTYPES
    from headprune.search.forecast import Calibration, plan
    from headprune.store.checkpoint import load_structure

    own = job.experiment
    samples = own.calibration_samples
    evaluation = own.evaluation_samples or samples
    data = Calibration(samples, own.max_length, own.batch_size, evaluation, DTYPES[own.dtype], own.memory)
    return next(need.memory for need in plan(load_structure(own.model), data) if need.schedule == "layerwise")


def memory_of(job: Job) -> int:
    """Bytes that a run may take: three times its weights in what they are computed in, for what is scored, what is
    removed and what is kept beside, outputs that evaluation keeps, and the process."""
    from headprune.runs.subject import DTYPES
    from headprune.store.configs import stored_dtype
    from headprune.store.places import model_folder

    folder = model_folder(job.experiment.model)  # of the hub's models nothing may be here yet
    if job.experiment.schedule == "layerwise":
        return _memory_of_sweep(job)
    weights = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    stored = stored_dtype(str(folder)) if weights else None
    larger = 1 if stored is None else DTYPES[job.experiment.dtype].itemsize / stored.itemsize
    return int(3 * weights * larger) + OUTPUTS + PROCESS


# --- in the processes of Ray ---

_imported: set[str] = set()  # plugins of this process, which does several tasks, and registers once


def check_task(jobs: Sequence[Job], folder: str, plugins: Sequence[str], threads: int) -> Answer:
    from headprune.runs.studies.running import check_subject

    try:
        prepare(folder, plugins, threads)
        check_subject(jobs)
    except HeadpruneError as error:
        return Answer(str(error))
    return Answer()


def run_task(job: Job, folder: str, plugins: Sequence[str], threads: int) -> Answer:
    from headprune.runs.experiment import run_experiment

    try:
        prepare(folder, plugins, threads)
        run_experiment(job.experiment, job.folder, measure=False)
    except HeadpruneError as error:
        return Answer(str(error), isinstance(error, RunBusyError))
    return Answer()


def prepare(folder: str, plugins: Sequence[str], threads: int) -> None:
    """The working directory, the threads and the plugins of who asked."""
    import socket

    import torch

    try:
        os.chdir(folder)
    except OSError:
        raise SweepError(
            f"{socket.gethostname()} has no folder {folder}; models, data and --out must be on storage that all "
            "machines share."
        ) from None
    torch.set_num_threads(threads)
    import_plugins([name for name in plugins if name not in _imported])
    _imported.update(plugins)
