"""The command line in several processes: the first one speaks for all, and none waits for one that is gone."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import Any

from headprune import ranks
from headprune.errors import HeadpruneError, RankError

SAID = "headprune/said"  # in the launcher's store: the first process has said what was wrong
PATIENCE = timedelta(seconds=60)  # for it to do so
ENDED = (
    "Error: This run was ended by a signal, or because another of its processes has died; what was done is kept, and "
    "the same command goes on from there."
)


@contextmanager
def as_one() -> Iterator[None]:
    """Several processes look like one: those that are not the first print nothing, unless it is a bug of theirs alone,
    and leave the sentence about a wrong input to the first."""
    if not ranks.launched():
        yield
        return
    signal.signal(signal.SIGTERM, _end)  # launchers send it to the others when one process has died
    try:
        if ranks.launched_first():
            yield
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    except SystemExit as ending:  # as every verb ends
        if ending.code not in (None, 0):
            _leave(None, ending.code if isinstance(ending.code, int) else 1)
        ranks.stop()
        raise
    except HeadpruneError as error:
        _leave(error, 1 if isinstance(error, RankError) else 2)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
        _exit(1)


def _end(number: int, frame: Any) -> None:
    if ranks.launched_first():
        print(ENDED, file=sys.__stderr__, flush=True)
    _exit(1)


def _leave(error: HeadpruneError | None, code: int) -> None:
    """A launcher ends all processes as soon as one of them fails, so the others wait until the first has spoken."""
    if ranks.launched_first():
        if error is not None:
            print(f"Error: {error}", file=sys.__stderr__, flush=True)
        with suppress(Exception):
            _store().set(_said(), "1")
    else:
        with suppress(Exception):
            _store().wait([_said()], PATIENCE)
    _exit(code)


def _store() -> Any:
    """What launchers let their processes meet by."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)


def _said() -> str:
    return f"{SAID}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _exit(code: int) -> None:
    """At once: what would be waited for at the end of a process may be a process that is gone."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    os._exit(code)
