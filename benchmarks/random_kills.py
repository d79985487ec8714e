"""Random kills: whatever `headprune` is doing, SIGKILL at a random moment loses nothing, and the same command goes on.

    python -m benchmarks.random_kills [--kills 200] [--only prune,layerwise,train,distributed,ray] [--seed 0] [--out F]

Every kind of work is a real command on tiny random models. It runs once without a kill; then it is started again and
again, each time killed at a moment drawn from the length of the run that was left alone, until it comes to its end.
What it has written then is compared with what the other wrote, byte for byte, and a new round begins with an empty
folder. After every kill the steps that were in a journal before must still be there. Commands of one process are forks
of this one, which has the imports done; those of torchrun and Ray have several processes, one of which is
killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

from rich.console import Console
from rich.table import Table

from benchmarks.random_kills_fixtures import Material, differences, lost, make_material, whole_lines

OUT = Path("benchmarks/results/random_kills.json")
PATIENCE = 600  # seconds after which a process that does not end is a problem
Command = Callable[[Material, Path], list[str]]


@dataclass(frozen=True)
class Kind:
    """One kind of work: its command, how it is started, and who is killed of the processes that it consists of."""

    name: str
    command: Command
    share: float  # of the kills
    start: Callable[[Sequence[str], Path], int]
    victims: Callable[[int], list[int]] = lambda process: [process]
    prepare: Callable[[Material, Path], None] = lambda material, out: None
    tolerance: float = 0.0  # of scores, relative: of several processes the sums may round otherwise


@dataclass
class Count:
    """What came of it."""

    kills: int = 0
    rounds: int = 0  # from an empty folder to the end
    starts: int = 0
    late: int = 0  # kills after which the start ended its round all the same: all was written, or others went on
    seconds: float = 0.0  # of the run that was left alone
    refused: str = ""  # why this kind is not there
    moments: list[float] = field(default_factory=list)  # of the kills, as shares of that
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        values = {**vars(self), "seconds": round(self.seconds, 2)}
        return {**values, "moments": [round(moment, 3) for moment in self.moments]}


# --- starting, waiting, killing ---


def run_program(command: Sequence[str]) -> int:
    """The program's own `main`, in this process; its exit code."""
    from headprune.__main__ import main

    sys.argv = ["headprune", *command]
    try:
        main()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def forked(command: Sequence[str], log: Path) -> int:
    """A fork of this process that runs the program."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            with log.open("wb") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
            code = run_program(command)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def by_torchrun(command: Sequence[str], log: Path) -> int:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "headprune"]
    return _process([sys.executable, "-m", *launcher, *command], log)


def by_itself(command: Sequence[str], log: Path) -> int:
    return _process([sys.executable, "-m", "headprune", *command], log)


def _process(words: Sequence[str], log: Path) -> int:
    with log.open("wb") as stream:
        return subprocess.Popen(words, stdout=stream, stderr=stream, start_new_session=True).pid


def processes() -> dict[int, tuple[int, str]]:
    """Of every process here: its parent and its command line."""
    result = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:  # it has ended meanwhile
                continue
            result[int(folder.name)] = (parent, words)
    return result


def descendants(process: int) -> dict[int, str]:
    """The command lines of all processes that this one has started, and that those have."""
    known, result, parents = processes(), {}, {process}
    while parents:
        children = {child: words for child, (parent, words) in known.items() if parent in parents}
        result.update(children)
        parents = set(children)
    return result


def torchrun_workers(process: int) -> list[int]:
    return [
        child
        for child, words in descendants(process).items()
        if "headprune" in words and "torch.distributed" not in words
    ]


def ray_workers(process: int) -> list[int]:
    return [child for child, words in descendants(process).items() if words.startswith("ray::")]


def ended(process: int, seconds: float) -> int | None:
    """How it ended, minus the signal or its exit code; None if it still runs after so long."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(min(0.005, max(until - time.monotonic(), 0)))


def tidy(process: int) -> None:
    """End what a killed process has left running: all of it is in the session that was made for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


# --- the kinds of work ---


def pruning(*options: str) -> Command:
    def command(material: Material, out: Path) -> list[str]:
        few = ("--calibration-samples", "8", "--batch-size", "6")
        return ["prune", str(material.bert), "--data", str(material.rows), "--out", str(out), *few, *options]

    return command


def layerwise(material: Material, out: Path) -> list[str]:
    few = ("--calibration-samples", "8", "--batch-size", "4", "--max-length", "16")
    asked = ("--schedule", "layerwise", "--keep-parameters", "0.7")
    return ["prune", str(material.llama), "--data", str(material.text), "--out", str(out), *few, *asked]


def training(material: Material, out: Path) -> list[str]:
    few = ("--batch-size", "8", "--epochs", "2", "--evaluation-samples", "12", "--save-steps", "2")
    return ["train", str(material.bert), "--data", str(material.rows), "--out", str(out), "--keep", "0.5", *few]


def tuning(material: Material, out: Path) -> list[str]:
    few = ("--batch-size", "8", "--epochs", "1", "--save-steps", "1", "--cycles", "2")
    return ["finetune", str(out), "--data", str(material.more), *few]


def comparing(material: Material, out: Path) -> list[str]:
    few = ("--calibration-samples", "8", "--batch-size", "6", "--on", "ray")
    names = ("--criteria", "gnorm,magnitude,random")
    return ["compare", str(material.bert), "--data", str(material.rows), "--out", str(out), *names, *few]


def pruned_before(material: Material, out: Path) -> None:
    if not material.run.is_dir():
        ended(forked(pruning("--keep", "24")(material, material.run), material.root / "run.log"), PATIENCE)
    shutil.copytree(material.run, out)


KINDS = (
    Kind("prune", pruning("--keep", "18"), 0.25, forked),
    Kind("rounds", pruning("--keep-parameters", "0.9,0.8", "--rounds", "4"), 0.15, forked),
    Kind("layerwise", layerwise, 0.2, forked),
    Kind("train", training, 0.15, forked),
    Kind("finetune", tuning, 0.15, forked, prepare=pruned_before),
    Kind("distributed", pruning("--keep", "18"), 0.05, by_torchrun, torchrun_workers, tolerance=1e-6),
    Kind("ray", comparing, 0.05, by_itself, ray_workers),
)


# --- kills ---


def kill_repeatedly(kind: Kind, material: Material, kills: int, rng: random.Random, folder: Path) -> Count:
    """Kill until there were so many kills, and the last round has come to its end."""
    count = Count()
    folder.mkdir(parents=True)
    alone = _fresh(kind, material, folder / "alone")
    started = time.monotonic()
    process = kind.start(kind.command(material, alone), folder / "alone.log")
    code = ended(process, PATIENCE)
    count.seconds = time.monotonic() - started
    tidy(process)
    if code != 0:
        lines = (folder / "alone.log").read_text(errors="replace").strip().splitlines() or ["nothing"]
        count.refused = f"ended with {code}: {lines[-1][:300]}"
        return count
    while count.kills < kills:
        _round(kind, material, kills, rng, folder, alone, count)
    return count


def _fresh(kind: Kind, material: Material, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    kind.prepare(material, out)
    return out


def _round(
    kind: Kind, material: Material, kills: int, rng: random.Random, folder: Path, alone: Path, count: Count
) -> None:
    """From an empty folder to the end, with as many kills as it takes."""
    out, log = _fresh(kind, material, folder / "killed"), folder / "killed.log"
    expected, before = whole_lines(alone), whole_lines(out)
    count.rounds += 1
    code: int | None = None
    while code != 0:
        count.starts += 1
        process = kind.start(kind.command(material, out), log)
        wait = rng.uniform(0.0, count.seconds) if count.kills < kills else PATIENCE
        code = ended(process, wait)
        if code is None:
            hit = kind.victims(process)
            struck = bool(hit) and wait < PATIENCE
            if struck:
                os.kill(rng.choice(hit), signal.SIGKILL)
                count.kills += 1
                count.moments.append(wait / count.seconds)
            code = ended(process, PATIENCE)  # of several processes the others may go on, or end by themselves
            count.late += struck and code == 0
            if code is None:
                count.problems.append(f"kill {count.kills}: it has not ended {PATIENCE} seconds later")
                code = 1
        elif code != 0:
            count.problems.append(f"start {count.starts}: ended with {code}: {_last_words(log)}")
            tidy(process)
            return
        tidy(process)
        now = whole_lines(out)
        count.problems += [f"after kill {count.kills}: {what}" for what in lost(before, now, expected, kind.tolerance)]
        before = now
    problems = differences(alone, out, kind.tolerance)
    count.problems += [f"round {count.rounds}: {what}" for what in problems]


def _last_words(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]


def warm_up(kind: Kind, material: Material, folder: Path) -> None:
    """Run the command here once: what it imports and finds out about models, forks of this process know then."""
    command = kind.command(material, _fresh(kind, material, folder / f"warm-{kind.name}"))
    with (folder / "warm.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        run_program(command)


def print_counts(counts: dict[str, Count]) -> None:
    table = Table(title="Random kills")
    for heading in ("kind", "kills", "starts", "rounds", "seconds alone", "problems"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for name, count in counts.items():
        end = f"not there: {count.refused}" if count.refused else str(len(count.problems))
        table.add_row(name, str(count.kills), str(count.starts), str(count.rounds), f"{count.seconds:.1f}", end)
    console = Console()
    console.print(table)
    for name, count in counts.items():
        for problem in count.problems:
            console.print(f"{name}: {problem}", markup=False, highlight=False)


def run(
    names: Sequence[str], kills: int, seed: int, folder: Path, report: Callable[[dict[str, Count]], None]
) -> dict[str, Count]:
    """The kills are shared out among these kinds; `tell` hears of each that is done."""
    material = make_material(folder / "material")
    kinds = [kind for kind in KINDS if kind.name in names]
    total = sum(kind.share for kind in kinds)
    counts = {}
    for kind in kinds:
        if kind.start is forked:
            warm_up(kind, material, folder)
        rng = random.Random(f"{seed} {kind.name}")
        counts[kind.name] = kill_repeatedly(
            kind, material, max(1, round(kills * kind.share / total)), rng, folder / kind.name
        )
        report(counts)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [kind.name for kind in KINDS]
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", help=f"of {', '.join(every)}; by default all that this version has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else every
    if not set(names) <= set(every):
        parser.error(f"--only takes {', '.join(every)}")

    def report(counts: dict[str, Count]) -> None:
        print_counts(counts)
        summary = {"seed": options.seed, "kills": sum(count.kills for count in counts.values())}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        kinds = {name: count.to_json() for name, count in counts.items()}
        options.out.write_text(json.dumps({**summary, "kinds": kinds}, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="headprune-kills-") as folder:
        counts = run(names, options.kills, options.seed, Path(folder), report)
    missing = bool(options.only) and any(count.refused for count in counts.values())
    return int(missing or any(count.problems for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
