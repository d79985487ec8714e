"""Several processes that work on one model, each on its part of the data, as torchrun and accelerate start them.

Every process holds the whole model and knows all batches. It runs its own ones, sums are added up over processes, and
whatever is decided is decided by the first process and told to the others. With one process nothing of this happens,
and torch.distributed is not looked at.
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

# A process that dies is noticed at once, as its connections close; this long is waited for one that is silent, such as
# the first while it alone measures and saves.
TIMEOUT = timedelta(minutes=30)
LOST = (
    "Another process of this run has died or does not answer, so it ends here; what was done is kept, and the same "
    "command goes on from there."
)
_alone = False  # whether this process works by itself for now
_groups: dict[Any, Any] = {}  # by the default group: the one in which tensors of the CPU travel


# --- who is there ---


def launched() -> bool:
    """Whether this process was started as one of several, by what launchers leave in the environment."""
    return _number("WORLD_SIZE", 1) > 1


def launched_first() -> bool:
    return _number("RANK", 0) == 0


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def world_size() -> int:
    """Processes that work together now."""
    talking = _distributed()
    return 1 if _alone or talking is None else int(talking.get_world_size())


def is_distributed() -> bool:
    return world_size() > 1


def rank() -> int:
    """The number of this process among those that work together now."""
    talking = _distributed()
    return 0 if _alone or talking is None else int(talking.get_rank())


def is_main() -> bool:
    """Whether this process decides, writes and prints."""
    return rank() == 0


def _distributed() -> Any:
    """torch.distributed, if somebody has started a group of processes."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def start() -> None:
    """Join the other processes that a launcher has started, unless that was done already."""
    import torch
    import torch.distributed as talking

    if not launched() or talking.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(_number("LOCAL_RANK", 0) % torch.cuda.device_count())
        talking.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RankError(
            f"The {os.environ['WORLD_SIZE']} processes of this run cannot reach each other: {reason}; start them by "
            "torchrun or accelerate launch, with a port that is free."
        ) from None


def stop() -> None:
    """Leave the others, so that nothing of theirs is waited for when this process ends."""
    talking = _distributed()
    if talking is not None:
        _groups.clear()
        talking.destroy_process_group()


@contextmanager
def local_only() -> Iterator[None]:
    """In this block the process works by itself, over all the data, and nobody waits for it or is waited for."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


# --- who does what ---


def shares(costs: Sequence[float]) -> list[int]:
    """Whose each piece of work is: the dearest first, each to the process that has least to do so far."""
    loads = [(0.0, process) for process in range(world_size())]
    whose = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: (-costs[piece], piece)):
        load, process = loads[0]
        whose[piece] = process
        heapq.heapreplace(loads, (load + costs[piece], process))
    return whose


def my_share(costs: Sequence[float]) -> list[int]:
    """The pieces of work that are this process's, in their order."""
    return [piece for piece, process in enumerate(shares(costs)) if process == rank()]


# --- what they tell each other ---


def all_gather(value: Value) -> list[Value]:
    """What every process has, in the order of their numbers."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * world_size()
    with _talking() as (talking, group):
        talking.all_gather_object(found, value, group=group)
    return found


def gather_to(value: Value, process: int) -> list[Value] | None:
    """The same for one process alone; None for the others."""
    if not is_distributed():
        return [value]
    found: list[Any] | None = [None] * world_size() if rank() == process else None
    with _talking() as (talking, group):
        talking.gather_object(value, found, dst=process, group=group)
    return found


def broadcast(value: Value) -> Value:
    """What the first process has."""
    if not is_distributed():
        return value
    box = [value if is_main() else None]
    with _talking() as (talking, group):
        talking.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]


def all_reduce(*tensors: torch.Tensor) -> None:
    """Replace these tensors of the CPU by their sums over processes, in place."""
    if not is_distributed():
        return
    with _talking() as (talking, group):
        for tensor in tensors:
            talking.all_reduce(tensor, group=group)


def on_main(function: Callable[[], Value]) -> Value:
    """What the first process makes of this, by itself; all get it, or its error."""
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
    """In this block each process does its part and tells the others nothing; an error of one is an error of all."""
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
    for number, said in enumerate(all_gather(None if failed is None else (type(failed).__name__, str(failed)))):
        if failed is not None and number == rank():
            raise failed
        if said is not None:
            raise _remade(number, *said)


def _remade(number: int, kind: str, text: str) -> HeadpruneError:
    """The error of another process; one that no input has caused is told as that process's."""
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, HeadpruneError)):
        return RankError(f"Process {number} failed: {kind}: {text}")
    error = known.__new__(known, text)
    error.args = (text,)
    return error


@contextmanager
def _talking() -> Iterator[tuple[Any, Any]]:
    """torch.distributed and the group for tensors of the CPU; a process that is gone is one sentence."""
    talking = _distributed()
    try:
        whole = talking.group.WORLD
        if whole not in _groups:
            cpu = "gloo" in str(talking.get_backend_config(whole))
            _groups[whole] = whole if cpu else talking.new_group(backend="gloo", timeout=TIMEOUT)
        yield talking, _groups[whole]
    except RuntimeError as error:
        raise RankError(LOST) from error
