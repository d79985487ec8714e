"""Data parallelism over several processes on one model, as torchrun and accelerate launch them.

Every process holds the whole model and all batches. It runs its share of the batches, sums are reduced over processes,
and decisions are made by the main process and broadcast. With one process all of this is a no-op, and torch.distributed
is not imported.
"""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from headprune import errors
from headprune.errors import HeadpruneError, RankError

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

# A process that dies is noticed at once, because its connections close; this is the limit for one that does not answer,
# such as the main process while only it measures and saves.
TIMEOUT = timedelta(minutes=30)
LOST_PROCESS = (
    "Another process of this run has died or does not answer, so this one stops; finished steps are kept, and the same "
    "command resumes from there."
)
_local = False  # whether this process is inside `local_only`
_groups: dict[Any, Any] = {}  # default group -> the group for CPU tensors


# --- processes ---


def launched() -> bool:
    """Whether a launcher started this process as one of several, by the environment variables that it sets."""
    return _number("WORLD_SIZE", 1) > 1


def launched_first() -> bool:
    return _number("RANK", 0) == 0


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def world_size() -> int:
    """The number of processes; 1 inside `local_only`."""
    dist = _distributed()
    return 1 if _local or dist is None else int(dist.get_world_size())


def is_distributed() -> bool:
    return world_size() > 1


def rank() -> int:
    """The rank of this process; 0 inside `local_only`."""
    dist = _distributed()
    return 0 if _local or dist is None else int(dist.get_rank())


def is_main() -> bool:
    """Whether this process makes decisions, writes and prints."""
    return rank() == 0


def _distributed() -> Any:
    """torch.distributed, if a process group is initialised; None otherwise."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def start() -> None:
    """Initialise the process group of a launcher, unless that was done already."""
    import torch
    import torch.distributed as dist

    if not launched() or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(_number("LOCAL_RANK", 0) % torch.cuda.device_count())
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RankError(
            f"The {os.environ['WORLD_SIZE']} processes of this run cannot connect: {reason}; start them with torchrun "
            "or accelerate launch, on a free port."
        ) from None


def stop() -> None:
    """Destroy the process group, so that this process does not wait for others when it ends."""
    dist = _distributed()
    if dist is not None:
        _groups.clear()
        dist.destroy_process_group()


@contextmanager
def local_only() -> Iterator[None]:
    """Inside the block this process works on all the data by itself, without communication."""
    global _local
    before, _local = _local, True
    try:
        yield
    finally:
        _local = before


# --- shares of the work ---


def shares(costs: Sequence[float]) -> list[int]:
    """The rank for each piece of work: the most expensive first, each to the process with the least work so far."""
    loads = [(0.0, process) for process in range(world_size())]
    ranks = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: (-costs[piece], piece)):
        load, process = loads[0]
        ranks[piece] = process
        heapq.heapreplace(loads, (load + costs[piece], process))
    return ranks


def my_share(costs: Sequence[float]) -> list[int]:
    """The indices of the pieces of work of this process, in order."""
    return [piece for piece, process in enumerate(shares(costs)) if process == rank()]


# --- communication ---


def all_gather(value: Value) -> list[Value]:
    """The values of all processes, in order of rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    with _communication() as (dist, group):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_to(value: Value, process: int) -> list[Value] | None:
    """The values of all processes on the process of this rank; None on the others."""
    if not is_distributed():
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == process else None
    with _communication() as (dist, group):
        dist.gather_object(value, values, dst=process, group=group)
    return values


def broadcast(value: Value) -> Value:
    """The value of the main process."""
    if not is_distributed():
        return value
    box = [value if is_main() else None]
    with _communication() as (dist, group):
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]


def all_reduce(*tensors: torch.Tensor) -> None:
    """Replace these CPU tensors by their sums over processes, in place."""
    if not is_distributed():
        return
    with _communication() as (dist, group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def on_main(function: Callable[[], Value]) -> Value:
    """The result of the function, called on the main process only; all processes return it, or raise its error."""
    if not is_distributed():
        return function()
    value: Any = None
    with fail_together():
        if is_main():
            with local_only():
                value = function()
    return broadcast(value)


@contextmanager
def fail_together() -> Iterator[None]:
    """Inside the block processes must not communicate; at its end, an error of one process is raised on all."""
    if not is_distributed():
        yield
        return
    failed: Exception | None = None
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        failed = error
    for number, description in enumerate(all_gather(None if failed is None else (type(failed).__name__, str(failed)))):
        if failed is not None and number == rank():
            raise failed
        if description is not None:
            raise _rebuild_error(number, *description)


def _rebuild_error(number: int, kind: str, text: str) -> HeadpruneError:
    """The error of another process; one that is no HeadpruneError becomes a RankError."""
    error_class = getattr(errors, kind, None)
    if not (isinstance(error_class, type) and issubclass(error_class, HeadpruneError)):
        return RankError(f"Process {number} failed: {kind}: {text}")
    error = error_class.__new__(error_class, text)
    error.args = (text,)
    return error


@contextmanager
def _communication() -> Iterator[tuple[Any, Any]]:
    """torch.distributed and the group for CPU tensors; a lost process raises a RankError with one sentence."""
    dist = _distributed()
    try:
        world = dist.group.WORLD
        if world not in _groups:
            cpu = "gloo" in str(dist.get_backend_config(world))
            _groups[world] = world if cpu else dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield dist, _groups[world]
    except RuntimeError as error:
        raise RankError(LOST_PROCESS) from error
