"""Runs a study: checks all input, lets an executor run what is not finished, and compares the runs of each group."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from headprune import distributed
from headprune.errors import HeadpruneError, RunError
from headprune.reports.run_view import COMPARISON
from headprune.run_folder import Run
from headprune.run_folder.run import REPORT
from headprune.runs.experiment import check, load, run_experiment, settings_of
from headprune.runs.studies.comparison import compare_group, refuse_other_files, write_comparison
from headprune.runs.studies.study_runs import Group, Job
from headprune.runs.studies.summary import GroupResult
from headprune.search.config import stop_settings
from headprune.search.observers import Observer

Failures = dict[Job, HeadpruneError]


class Executor(Protocol):
    """Runs jobs, within a context."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise the errors of all runs that are known before their first step; nothing is written."""

    def run(self, jobs: Sequence[Job], observer: Observer) -> Failures:
        """Run all jobs. A run that fails does not stop the others."""


def run_study(
    groups: Sequence[Group], executor: Executor, *, observer: Observer | None = None, overwrite: bool = False
) -> list[GroupResult]:
    """Run or resume all runs, compare those of each group, and write the comparisons."""
    jobs = [job for group in groups for job in group.jobs]
    distributed.on_main(lambda: refuse_other_files([group.folder for group in groups], COMPARISON, REPORT))
    run_jobs(jobs, executor, observer=observer or Observer(), overwrite=overwrite)

    def compare_all() -> list[GroupResult]:
        results = [GroupResult(group, compare_group(group)) for group in groups]
        for result in results:
            write_comparison(result.group, result.rows)
        return results

    return distributed.on_main(compare_all)


def run_jobs(jobs: Sequence[Job], executor: Executor, *, observer: Observer, overwrite: bool = False) -> None:
    """Run the jobs that are not finished; nothing is written before all input is checked."""
    finished = distributed.on_main(lambda: [not overwrite and is_finished(job) for job in jobs])
    unfinished = [job for job, done in zip(jobs, finished, strict=True) if not done]
    observer.study(jobs, [job for job in jobs if job not in unfinished])
    if not unfinished:
        return
    with executor:
        with distributed.fail_together():
            executor.check(unfinished)
        if overwrite:
            distributed.on_main(lambda: _clear_runs(unfinished))
        failed = executor.run(unfinished, observer)
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        job, error = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} of {len(jobs)} runs failed, the others are finished; the first is {job.folder}: {error}"
        )


def _clear_runs(jobs: Sequence[Job]) -> None:
    """Clear existing runs once, before any starts, so that a killed run resumes its new journal."""
    for job in jobs:
        if (job.folder / "run.json").is_file():
            with Run(job.folder, settings_of(job.experiment), overwrite=True):
                pass


def is_finished(job: Job) -> bool:
    """Whether the run is finished; raises for the folder of another run."""
    return Run.is_finished(job.folder, settings_of(job.experiment), free=stop_settings())


def by_model_and_data(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs grouped by model and data."""
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.subject_number, []).append(job)
    return list(groups.values())


def check_model_and_data(jobs: Sequence[Job]) -> None:
    """Raise the errors of runs of one model and data that are known before their first step; the model is loaded
    once."""
    layerwise = jobs[0].experiment.schedule == "layerwise"
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        inputs, calibration, evaluation = load(jobs[0].experiment, on_disk=Path(folder) if layerwise else None)
        for job in jobs:
            inputs.check_labels(job.experiment.criterion, job.experiment.labels, calibration)
            check(job.experiment, inputs, evaluation or calibration)


class SerialExecutor:
    """Runs one job after the other in this process, with this number of threads, or torch's default."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def __enter__(self) -> SerialExecutor:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads or self._before)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)

    def check(self, jobs: Sequence[Job]) -> None:
        for part in by_model_and_data(jobs):
            check_model_and_data(part)

    def run(self, jobs: Sequence[Job], observer: Observer) -> Failures:
        failed: Failures = {}
        for job in jobs:
            observer_of_run = observer.run(job.name, job)
            try:
                run_experiment(job.experiment, job.folder, measure=False, observer=observer_of_run)
            except HeadpruneError as error:
                failed[job] = error
            observer_of_run.end(failed.get(job))
        return failed
