"""Runs studies on Ray: on this machine, where Ray is started and stopped again, or on an existing cluster.

A task writes its run folder as any process does, and the driver reads the journal. So a task gets only a job, and
returns only an error message; a task whose process died is submitted again, and resumes its run.
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

from headprune import defaults
from headprune.errors import HeadpruneError, RunBusyError, RunError, StudyError
from headprune.extras import need
from headprune.runs.plugins import import_plugins

if TYPE_CHECKING:
    from headprune.runs.studies.run_study import Failures
    from headprune.runs.studies.study_runs import Job
    from headprune.search.observers import Observer

POLL_SECONDS = 0.5  # seconds between two reads of the journals
MAX_DEATHS = 3  # deaths in a row without a new step after which a run fails
OBJECT_STORE = 100 << 20  # bytes of shared memory, of which almost nothing is used
MAX_STARTS = 3  # attempts to start Ray on this machine
PROCESS_BYTES = 1 << 30  # of a process after its imports
ENVIRONMENT = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


@dataclass
class Attempt:
    """A submitted run."""

    job: Job
    steps: int  # in its journal when it was submitted
    fruitless: int = 0  # deaths in a row without a new step
    deaths: int = 0
    reported: int = 0  # lines of the journal that were reported to the observer
    observer: Observer | None = None  # of this run, once it has started


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: its error message, if it failed. Some errors cannot be pickled; a message can."""

    error_message: str | None = None
    busy: bool = False


def check_address(on: str) -> str | None:
    """The address of a cluster, or None to start Ray here."""
    if on == "ray":
        return os.environ.get("RAY_ADDRESS") or None
    if on == "auto" or re.fullmatch(r"(ray://)?[\w.\-\[\]:]+:\d+", on):
        return on
    if re.fullmatch(r"ray://[\w.\-]+", on):
        return f"{on}:10001"  # the default port of Ray's client server
    raise StudyError(f"--on takes ray, ray://HOST:PORT, HOST:PORT or auto, not {on!r}.")


class RayExecutor:
    """Runs several runs at once, each a task with its CPUs, GPU and memory."""

    def __init__(
        self, on: str = "ray", *, workers: int | None = None, cpus: int = 1, plugins: Sequence[str] = ()
    ) -> None:
        need(("ray",), "ray", "Studies on Ray need")
        self.address = check_address(on)
        if (self.address or "").startswith("ray://"):
            need(("grpc",), "ray", "Ray's clients need")
        self.workers, self.cpus, self.plugins = workers, cpus, tuple(plugins)
        self._stack = contextlib.ExitStack()

    # --- the cluster ---

    def __enter__(self) -> RayExecutor:
        import ray

        # Ray logs to stdout, which is for results.
        self._stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            if not ray.is_initialized():
                self._connect()
                self._stack.callback(ray.shutdown)
            self._check_resources()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _connect(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self.address is not None:
            passed = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            try:
                ray.init(self.address, runtime_env={"env_vars": passed}, **quiet)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise StudyError(
                    f"No Ray cluster answers at {self.address} ({reason}); check the address and its token, or start "
                    "Ray here: --on ray."
                ) from None
            return
        workers = self.workers or max(1, (os.cpu_count() or 1) // self.cpus)
        local = {
            "num_cpus": workers * self.cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE,
            **quiet,
        }
        for attempt in range(1, MAX_STARTS + 1):
            try:
                ray.init("local", **local)
                return
            except Exception as error:  # Ray gives its processes 30 s to start, which a busy machine may not keep
                ray.shutdown()
                if attempt == MAX_STARTS:
                    reason = " ".join(str(error).split())[:200]
                    raise StudyError(
                        f"Ray does not start on this machine ({reason}); try again when the machine is less busy, or "
                        "run the study without --on ray."
                    ) from None

    def _check_resources(self) -> None:
        """Refuse more CPUs than any machine has, for which Ray would wait for ever."""
        most = self._largest("CPU")
        if most < self.cpus:
            raise StudyError(
                f"Each run needs {self.cpus} CPUs, and no machine has more than {most:g}; use fewer --cpus."
            )

    def _largest(self, resource: str) -> float:
        """The largest amount of a resource on any machine."""
        import ray

        return max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)

    def _resources(self, job: Job) -> dict[str, Any]:
        """The resources of a run. Memory is at most that of the largest machine, where the run is then alone."""
        device = job.experiment.device
        if ":" in device and device.startswith("cuda"):
            raise StudyError(f"Ray chooses which GPU a run has, so {device} cannot be kept; use --device cuda.")
        gpus = self._largest("GPU")
        if device == "cuda" and not gpus:
            raise StudyError("No machine of the cluster has a GPU; use --device cpu or auto.")
        return {
            "num_cpus": self.cpus,
            "num_gpus": 1 if gpus and device in ("cuda", "auto") else 0,
            "memory": int(min(memory_of(job), self._largest("memory"))),
            "max_retries": 0,  # retries are decided in `should_retry`
        }

    # --- runs ---

    def check(self, jobs: Sequence[Job]) -> None:
        import ray

        from headprune.runs.studies.run_study import by_model_and_data

        task, parts = ray.remote(check_task), by_model_and_data(jobs)
        pending = [
            task.options(**{**self._resources(part[0]), "max_retries": MAX_DEATHS}).remote(
                part, str(Path.cwd()), self.plugins, self.cpus
            )
            for part in parts
        ]
        for part, reference in zip(parts, pending, strict=True):
            result, label = self._result(reference), f"{part[0].experiment.model} with {part[0].experiment.data}"
            if result is None:
                raise RunError(f"The process that loads {label} died, perhaps out of memory; try fewer --workers.")
            if result.error_message is not None:
                raise HeadpruneError(f"{label}: {result.error_message}" if len(parts) > 1 else result.error_message)

    def run(self, jobs: Sequence[Job], observer: Observer) -> Failures:
        import ray

        task = ray.remote(run_task)
        failed: Failures = {}
        error: HeadpruneError | None

        def submit(attempt: Attempt) -> Any:
            options = self._resources(attempt.job)
            return task.options(**options).remote(attempt.job, str(Path.cwd()), self.plugins, self.cpus)

        pending = {}
        for job in jobs:
            attempt = Attempt(job, steps := len(lines_of(job.folder)), reported=steps)
            pending[submit(attempt)] = attempt
        try:
            while pending:
                done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
                for attempt in pending.values():
                    report_new_step(attempt, observer)
                for reference in done:
                    attempt = pending.pop(reference)
                    result = self._result(reference)
                    if result is None or (result.busy and attempt.deaths):
                        error = fatal_error(attempt)
                        if error is None:
                            attempt.observer = observer.run(attempt.job.name, attempt.job, again=True)
                            pending[submit(attempt)] = attempt
                            continue
                    else:
                        kind = RunBusyError if result.busy else HeadpruneError
                        error = None if result.error_message is None else kind(result.error_message)
                    if error is not None:
                        failed[attempt.job] = error
                    (attempt.observer or observer.run(attempt.job.name, attempt.job)).end(error)
        finally:
            for reference in pending:  # interrupted: the same command resumes the runs
                ray.cancel(reference, force=True)
        return failed

    def _result(self, reference: Any) -> TaskResult | None:
        """The result of a task; None where its process or its machine died."""
        import ray
        from ray import exceptions

        try:
            return ray.get(reference)
        except exceptions.RayTaskError as error:
            if "No module named 'headprune" in str(error):
                raise StudyError(
                    "A machine of the cluster cannot import this version of headprune; install the same version on all."
                ) from None
            # A bug, raised as in this process.
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError):
            return None


def fatal_error(attempt: Attempt) -> RunError | None:
    """The error of a run whose process died too often without a new step; None where it is to be submitted again."""
    from headprune.run_folder.run import LAYERS

    folder = attempt.job.folder
    steps = len(lines_of(folder)) + len(lines_of(folder, f"{LAYERS}/layers.jsonl"))
    attempt.fruitless = 0 if steps > attempt.steps else attempt.fruitless + 1
    attempt.steps = steps
    attempt.deaths += 1
    if attempt.fruitless < MAX_DEATHS:
        return None
    return RunError(
        f"The process of {attempt.job.folder} died {attempt.fruitless} times in a row without a new step, perhaps out "
        "of memory; try fewer --workers, and run the same command again, which resumes the run."
    )


def lines_of(folder: Path, name: str = "steps.jsonl") -> list[bytes]:
    """The complete lines of a journal."""
    try:
        content = (folder / name).read_bytes()
    except OSError:
        return []
    return content[: content.rfind(b"\n") + 1].splitlines()


def report_new_step(attempt: Attempt, observer: Observer) -> None:
    """Report the last step of a journal, if it is new."""
    from headprune.measure.trajectory import Step

    lines = lines_of(attempt.job.folder)
    if len(lines) > attempt.reported:
        attempt.observer = attempt.observer or observer.run(attempt.job.name, attempt.job)
        attempt.observer.step(Step.from_json(json.loads(lines[-1])), {})
    attempt.reported = len(lines)


def _memory_of_layerwise(job: Job) -> int:
    """The forecast of `inspect --plan`."""
    from headprune.checkpoint.save_load import load_structure
    from headprune.runs.loading import DTYPES
    from headprune.search.forecast import Calibration, forecast

    experiment = job.experiment
    samples = experiment.calibration_samples or defaults.CALIBRATION_SAMPLES
    evaluation = experiment.evaluation_samples or samples
    data = Calibration(
        samples, experiment.max_length, experiment.batch_size, evaluation, DTYPES[experiment.dtype], experiment.memory
    )
    return next(
        need.memory for need in forecast(load_structure(experiment.model), data) if need.schedule == "layerwise"
    )


def memory_of(job: Job) -> int:
    """Bytes of a run: three times its weights in the precision of the computation, for the model, its copies and
    activations, the layer cache of evaluation, and the process."""
    from headprune.checkpoint.config_files import stored_dtype
    from headprune.checkpoint.paths import model_folder
    from headprune.runs.loading import DTYPES
    from headprune.search.memory import cache_bytes

    folder = model_folder(job.experiment.model)  # empty for a model of the hub that is not downloaded yet
    if job.experiment.schedule == "layerwise":
        return _memory_of_layerwise(job)
    weights = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    stored = stored_dtype(str(folder)) if weights else None
    scale = 1 if stored is None else DTYPES[job.experiment.dtype].itemsize / stored.itemsize
    return int(3 * weights * scale) + cache_bytes(job.experiment.memory) + PROCESS_BYTES


# --- in the workers of Ray ---

_imported: set[str] = set()  # plugins of this worker, which are registered once for all its tasks


def check_task(jobs: Sequence[Job], folder: str, plugins: Sequence[str], threads: int) -> TaskResult:
    from headprune.runs.studies.run_study import check_model_and_data

    try:
        prepare_worker(folder, plugins, threads)
        check_model_and_data(jobs)
    except HeadpruneError as error:
        return TaskResult(str(error))
    return TaskResult()


def run_task(job: Job, folder: str, plugins: Sequence[str], threads: int) -> TaskResult:
    from headprune.runs.experiment import run_experiment

    try:
        prepare_worker(folder, plugins, threads)
        run_experiment(job.experiment, job.folder, measure=False)
    except HeadpruneError as error:
        return TaskResult(str(error), isinstance(error, RunBusyError))
    return TaskResult()


def prepare_worker(folder: str, plugins: Sequence[str], threads: int) -> None:
    """Set the working directory, the threads and the plugins of the driver."""
    import socket

    import torch

    try:
        os.chdir(folder)
    except OSError:
        raise StudyError(
            f"{socket.gethostname()} has no folder {folder}; put models, data and --out on storage that all "
            "machines share."
        ) from None
    torch.set_num_threads(threads)
    import_plugins([name for name in plugins if name not in _imported])
    _imported.update(plugins)
