"""Doing the runs of a study: what is finished stays, all input is checked first, and an executor does the rest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from headprune import distributed
from headprune.errors import HeadpruneError, RunError
from headprune.measure.trajectory import Step
from headprune.runs.experiment import check, load, run_experiment, settings_of
from headprune.runs.journal import Run, is_finished
from headprune.runs.studies.plan import Job
from headprune.search.config import stop_settings

Failures = dict[Job, HeadpruneError]


class Watch:
    """Told how runs go on; by itself it looks away."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """These are all the runs."""

    def started(self, job: Job, *, again: bool = False) -> None:
        """A run begins, or goes on `again` after its process died."""

    def stepped(self, job: Job, step: Step) -> None:
        """A step of a run is done."""

    def ended(self, job: Job, error: HeadpruneError | None = None) -> None:
        """A run came to its end, or was refused in the midst of it."""


class Executor(Protocol):
    """Where runs are done, for as long as it is open."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what one of the runs would refuse; nothing is written."""

    def run(self, jobs: Sequence[Job], watch: Watch) -> Failures:
        """Do all of them. One that is refused in the midst of it does not stop the others."""


def run_jobs(jobs: Sequence[Job], executor: Executor, *, watch: Watch, overwrite: bool = False) -> None:
    """Do the runs that are not finished; nothing is written before all input is known to be good."""
    there = distributed.on_main(
        lambda: [not overwrite and finished(job, settings) for job, settings in with_settings(jobs)]
    )
    left = [job for job, done in zip(jobs, there, strict=True) if not done]
    watch.begin(jobs)
    for job in jobs:
        if job not in left:
            watch.ended(job)
    if not left:
        return
    with executor:
        with distributed.fail_together():
            executor.check(left)
        if overwrite:
            distributed.on_main(lambda: _start_again(left))
        failed = executor.run(left, watch)
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        job, error = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} of {len(jobs)} runs failed, the others are done; the first is {job.folder}: {error}"
        )


def _start_again(jobs: Sequence[Job]) -> None:
    """Here and once, so that a run that is killed later goes on with its new journal."""
    for job, settings in with_settings(jobs):
        if (job.folder / "run.json").is_file():
            with Run(job.folder, settings, overwrite=True):
                pass


def with_settings(jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Runs with the settings that their journals have; each model and each file is read once for its fingerprint."""
    marks: dict[int, dict[str, Any]] = {}
    for job in jobs:
        own = job.experiment.settings()
        if job.subject not in marks:
            marks[job.subject] = {k: v for k, v in settings_of(job.experiment).items() if k not in own}
        yield job, {**own, **marks[job.subject]}


def finished(job: Job, settings: dict[str, Any]) -> bool:
    """Whether there is nothing left to do; the folder of another run is refused."""
    return is_finished(job.folder, settings, stop_settings())


def by_subject(jobs: Sequence[Job]) -> list[list[Job]]:
    """Runs of the same model and data together."""
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.subject, []).append(job)
    return list(found.values())


def check_subject(jobs: Sequence[Job]) -> None:
    """Refuse what runs of one subject would refuse before their first step; the model is loaded once."""
    sweeping = jobs[0].experiment.schedule == "layerwise"
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        subject, calibration, evaluation = load(jobs[0].experiment, on_disk=Path(folder) if sweeping else None)
        for job in jobs:
            subject.check_labels(job.experiment.criterion, job.experiment.labels)
            check(job.experiment, subject, evaluation or calibration)


class OneAfterTheOther:
    """In this process, with so many threads, or as many as torch takes."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def __enter__(self) -> OneAfterTheOther:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads or self._before)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)

    def check(self, jobs: Sequence[Job]) -> None:
        for part in by_subject(jobs):
            check_subject(part)

    def run(self, jobs: Sequence[Job], watch: Watch) -> Failures:
        failed: Failures = {}
        for job in jobs:
            watch.started(job)
            try:
                run_experiment(job.experiment, job.folder, measure=False, on_step=partial(watch.stepped, job))
            except HeadpruneError as error:
                failed[job] = error
                watch.ended(job, error)
            else:
                watch.ended(job)
        return failed
