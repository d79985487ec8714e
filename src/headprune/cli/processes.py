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

from headprune import distributed
from headprune.errors import HeadpruneError, RankError

SAID = "headprune/said"  # in the launcher's store: how many processes had something to say
PATIENCE = timedelta(seconds=20)  # for the store, and for the first process to show how an option is written
ENDED = (
    "Error: This run was ended by a signal, or because another of its processes has died; what was done is kept, and "
    "the same command goes on from there."
)


@contextmanager
def as_one() -> Iterator[None]:
    """Several processes look like one: those that are not the first print nothing, unless it is a bug of theirs, and
    what is wrong is said once."""
    if not distributed.launched():
        yield
        return
    signal.signal(signal.SIGTERM, _end)  # launchers send it to the others when one process has failed
    try:
        if distributed.launched_first():
            yield
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    except SystemExit as ending:  # as every verb ends
        if ending.code not in (None, 0):
            _wait_for_first()
            _exit(ending.code if isinstance(ending.code, int) else 1)
        distributed.stop()
        raise
    except HeadpruneError as error:
        _leave(f"Error: {error}", 1 if isinstance(error, RankError) else 2)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
        _exit(1)


def _end(number: int, frame: Any) -> None:
    _leave(ENDED, 1)


def _leave(sentence: str, code: int) -> None:
    """The first process that comes here speaks for all: a launcher ends the others as soon as one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    alone = True
    with suppress(Exception):
        alone = _store().add(_said(), 1) == 1
    if alone:
        print(sentence, file=sys.__stderr__, flush=True)
    _exit(code)


def _wait_for_first() -> None:
    """What is wrong with an option is shown by the first process, and the others must not end before it."""
    with suppress(Exception):
        if distributed.launched_first():
            _store().add(_said(), 1)
        else:
            _store().wait([_said()], PATIENCE)


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
