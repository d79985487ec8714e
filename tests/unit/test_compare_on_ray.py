"""Runs as tasks of Ray: the same files as one after the other, also where a worker is killed in the midst of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headprune.errors import StudyError
from headprune.measure.trajectory import Step
from headprune.run_folder import Run
from headprune.runs.studies import ray_executor
from headprune.runs.studies.study_runs import Job
from headprune.search.config import Experiment
from headprune.search.observers import Observer
from run_helpers import headprune as program
from run_helpers import material, same_but_timing

# Once, in the process that writes the third line of a journal: the hook is a plugin, which workers import as any other.
KILLS = """
import os, signal
from pathlib import Path
from headprune.run_folder import Run

write = Run.write_line

def append(self, name, line):
    write(self, name, line)
    if os.getpid() != {own} and name == "steps.jsonl" and len(self.steps) == 2 and "magnitude" in self.path.name:
        try:
            mark = os.open({mark!r}, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(mark, f"{{os.getpid()}} {{self.path}}".encode())
        os.kill(os.getpid(), signal.SIGKILL)

Run.write_line = append
"""


def settings(**more: Any) -> dict[str, Any]:
    m = material()
    return {"model": m.bert, "data": m.data_csv, "calibration_samples": 8, "batch_size": 8, "every": 4, **more}


def test_a_study_on_ray_writes_what_one_after_the_other_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = material()
    (tmp_path / "kills.py").write_text(KILLS.format(mark=str(tmp_path / "killed"), own=os.getpid()))
    monkeypatch.setattr(Run, "write_line", Run.write_line)  # which the plugin replaces here as well
    (tmp_path / "options.yaml").write_text(
        json.dumps({"criteria": ["magnitude", "random"], "seeds": [0, 1], "calibration_samples": 8, "every": 4})
    )
    monkeypatch.chdir(tmp_path)  # where relative paths are, in the workers as well
    monkeypatch.setenv("PYTHONPATH", str(Path(ray_executor.__file__).resolve().parents[3]))  # may be relative
    command = ["compare", m.bert, "--data", m.data_csv, "--study", "options.yaml", "--batch-size", "8", "--json"]
    elsewhere = ("--on", "ray", "--workers", "2", "--plugin", "kills.py")
    here = program(*command, "--out", "here")
    there = program(*command, "--out", "there", *elsewhere)
    assert (here.code, there.code) == (0, 0), there.err
    assert there.json == {**here.json, "runs": "there"}  # and nothing else is on stdout
    killed, path = (tmp_path / "killed").read_text().split()
    assert int(killed) != os.getpid()
    assert "its process died; it is resumed" in there.err
    runs = sorted(file.parent.relative_to("here") for file in Path("here").rglob("run.json"))
    assert len(runs) == 4
    assert Path(path).relative_to("there") in runs
    for run in runs:
        same_but_timing(Path("here", run), Path("there", run))
        assert (Path("there", run) / "report.html").is_file()
    files = [sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*")) for folder in ("here", "there")]
    assert files[0] == files[1]
    for name in ("study.json", "study.csv"):
        assert Path("here", name).read_bytes() == Path("there", name).read_bytes()

    import ray

    assert not ray.is_initialized()  # it was started, and stopped again
    monkeypatch.setattr(ray_executor.RayExecutor, "__enter__", lambda self: pytest.fail("There is nothing left to do."))
    again = program(*command, "--out", "there", *elsewhere)
    assert (again.code, again.json) == (0, there.json)


def test_without_ray_a_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = ray_executor.need.__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    m = material()
    asked = ("compare", m.bert, "--data", m.data_csv, "--criteria", "magnitude", "--out", tmp_path / "out")
    done = program(*asked, "--on", "ray")
    assert done.code == 2
    assert done.err.strip() == "Error: Studies on Ray need ray; install it with pip install 'headprune[ray]'."
    assert not (tmp_path / "out").exists()


def test_ray_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    starts: list[str] = []

    def init(address: str, **_: Any) -> None:
        starts.append(address)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(StudyError, match=r"Ray does not start on this machine .*timed out.*less busy"):
        ray_executor.RayExecutor("ray", workers=1).__enter__()
    assert starts == ["local"] * ray_executor.MAX_STARTS
    starts.clear()
    monkeypatch.setattr(ray, "init", lambda address, **_: starts.append(address) if starts else init(address))
    ray_executor.RayExecutor("ray", workers=1)._connect()
    assert starts == ["local"] * 2


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_executor.check_address("ray") is None
    for address in ("auto", "10.0.0.1:6379", "head-node:6379", "ray://head-node:10001"):
        assert ray_executor.check_address(address) == address
    assert ray_executor.check_address("ray://head-node") == "ray://head-node:10001"
    for word in ("ray:", "somewhere", "http://head-node", ""):
        with pytest.raises(StudyError, match="--on takes ray"):
            ray_executor.check_address(word)
    monkeypatch.setenv("RAY_ADDRESS", "head-node:6379")
    assert ray_executor.check_address("ray") == "head-node:6379"


def job(folder: Path, **more: Any) -> Job:
    return Job(Experiment(**settings(**more)), folder, "magnitude", ("bert", "data.csv", "seed0", "curve"))


def test_a_run_is_given_up_only_where_it_does_not_get_on(tmp_path: Path) -> None:
    attempt = ray_executor.Attempt(job(tmp_path), steps=0)
    journal = tmp_path / "steps.jsonl"
    for deaths in range(ray_executor.MAX_DEATHS - 1):
        assert ray_executor.fatal_error(attempt) is None
        assert attempt.fruitless == deaths + 1
    journal.write_text('{"step": 0}\n{"step"')  # one whole line
    for _ in range(ray_executor.MAX_DEATHS):
        assert ray_executor.fatal_error(attempt) is None
    error = ray_executor.fatal_error(attempt)
    assert error is not None
    assert f"The process of {tmp_path} died 3 times in a row without a new step" in str(error)
    assert attempt.deaths == 2 * ray_executor.MAX_DEATHS


def test_a_task_takes_the_memory_that_its_weights_ask_for() -> None:
    m = material()
    weights = (Path(m.bert) / "model.safetensors").stat().st_size
    assert ray_executor.memory_of(job(Path("run"))) == 3 * weights + (2 << 30)
    assert ray_executor.memory_of(job(Path("run"), dtype="bfloat16")) == int(1.5 * weights) + (2 << 30)
    assert ray_executor.memory_of(job(Path("run"), model="org/not-here")) == 2 << 30


def test_a_task_takes_what_its_device_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"CPU": 4, "GPU": 0, "memory": 3 << 30}
    monkeypatch.setattr(ray_executor.RayExecutor, "_largest", lambda self, resource: most[resource])
    ray = ray_executor.RayExecutor("ray", cpus=2)
    small = job(Path("run"))
    asked = ray._resources(small)
    assert (asked["num_cpus"], asked["num_gpus"], asked["memory"]) == (2, 0, ray_executor.memory_of(small))
    with pytest.raises(StudyError, match="No machine of the cluster has a GPU"):
        ray._resources(job(Path("run"), device="cuda"))
    most["GPU"], most["memory"] = 2, 1 << 30  # less than it may take: then it runs there alone
    actual = [ray._resources(job(Path("run"), device=device))["num_gpus"] for device in ("cuda", "auto", "cpu")]
    assert actual == [1, 1, 0]
    assert ray._resources(small)["memory"] == 1 << 30
    with pytest.raises(StudyError, match="Ray chooses which GPU a run has, so cuda:1 cannot be kept"):
        ray._resources(job(Path("run"), device="cuda:1"))
    with pytest.raises(StudyError, match="Each run needs 8 CPUs, and no machine has more than 4; use fewer"):
        ray_executor.RayExecutor("ray", cpus=8)._check_resources()


def test_news_of_a_journal_are_told_once(tmp_path: Path) -> None:
    steps = [
        Step(number, (), None, 0.9 - number / 10, None, None, {"heads": 9 - number}, {"heads": 9 - number}, 1, 1, None)
        for number in range(4)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(step.to_json()) + "\n" for step in steps) + '{"ste')
    told: list[Any] = []

    class Events(Observer):
        def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
            told.append("started")
            return self

        def step(self, step: Step, seconds: Any) -> None:
            told.append((step.step, step.metric))

    attempt = ray_executor.Attempt(job(tmp_path), steps=2, reported=2)
    ray_executor.report_new_step(attempt, Events())
    ray_executor.report_new_step(attempt, Events())
    assert told == ["started", (3, steps[3].metric)]


def test_events_of_runs_go_to_their_observers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the first run dies once, the second run is refused; without a cluster."""
    import ray
    from ray.exceptions import WorkerCrashedError

    jobs = [job(tmp_path / name) for name in ("dies", "bad")]
    line = json.dumps(Step(0, (), None, 0.9, None, None, {"heads": 9}, {"heads": 9}, 1, 1, None).to_json()) + "\n"
    outcomes: dict[str, list[Any]] = {
        "dies": [WorkerCrashedError(), ray_executor.TaskResult()],
        "bad": [ray_executor.TaskResult("It is bad.")],
    }
    events: list[tuple[str, ...]] = []

    class Task:
        def options(self, **_: Any) -> Task:
            return self

        def remote(self, one: Job, *_: Any) -> str:
            one.folder.mkdir(exist_ok=True)
            with (one.folder / "steps.jsonl").open("a") as journal:
                journal.write(line)
            return one.folder.name

    class OfRun(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self, step: Step, seconds: Any) -> None:
            events.append((self.name, "step"))

        def end(self, error: Exception | None = None) -> None:
            events.append((self.name, f"end {error}"))

    class OfStudy(Observer):
        def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
            events.append((job.folder.name, "again" if again else "begin"))
            return OfRun(job.folder.name)

    def answer(reference: str) -> Any:
        outcome = outcomes[reference].pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(ray, "remote", lambda function: Task())
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(ray_executor.RayExecutor, "_resources", lambda self, job: {})
    failed = ray_executor.RayExecutor("ray").run(jobs, OfStudy())
    assert {one.folder.name: str(error) for one, error in failed.items()} == {"bad": "It is bad."}
    of = {name: [event for run, event in events if run == name] for name in ("dies", "bad")}
    assert of["dies"] == ["begin", "step", "again", "step", "end None"]
    assert of["bad"] == ["begin", "step", "end It is bad."]
