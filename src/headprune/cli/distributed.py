"""The command line in several processes: one of them prints, and none waits for one that has died."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import Any

from headprune import distributed
from headprune.errors import HeadpruneError, RankError

REPORTED = "headprune/said"  # key in the launcher's store: how many processes have reported an error
TIMEOUT = timedelta(seconds=20)  # for the store, and for the first process to report a usage error
ENDED = "Error: This run was ended by a signal, or because another of its processes died; the same command resumes it."


@contextmanager
def as_one() -> Iterator[None]:
    """Several processes print like one: only the first prints, an error is reported once, and tracebacks of bugs are
    always printed."""
    if not distributed.launched():
        yield
        return
    signal.signal(signal.SIGTERM, _end)  # launchers send it to the others when one process has failed
    try:
        if distributed.launched_first():
            yield
        else:
            with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
                yield
    except SystemExit as exit_request:  # raised at the end of every verb
        if exit_request.code not in (None, 0):
            _wait_for_first()
            _exit(exit_request.code if isinstance(exit_request.code, int) else 1)
        distributed.stop()
        raise
    except HeadpruneError as error:
        _leave(f"Error: {error}", 1 if isinstance(error, RankError) else 2)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
        _exit(1)


def _end(number: int, frame: Any) -> None:
    _leave(ENDED, 1)


def _leave(message: str, code: int) -> None:
    """Exit; the first process that comes here prints: a launcher ends the others as soon as one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_first = True
    with suppress(Exception):
        is_first = _store().add(_report_key(), 1) == 1
    if is_first:
        print(message, file=sys.__stderr__, flush=True)
    _exit(code)


def _wait_for_first() -> None:
    """Usage errors are printed by the first process, so the others must not end before it."""
    with suppress(Exception):
        if distributed.launched_first():
            _store().add(_report_key(), 1)
        else:
            _store().wait([_report_key()], TIMEOUT)


def _store() -> Any:
    """The TCPStore of the launcher."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)


def _report_key() -> str:
    return f"{REPORTED}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _exit(code: int) -> None:
    """Exit at once: a normal exit might wait for a process that has died."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    os._exit(code)
