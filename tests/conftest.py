"""Settings of all tests: no network, one thread each (workers share the cores), and no trace left anywhere."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "HF_MODULES_CACHE" not in os.environ:  # remote code of portable checkpoints is copied there when it is loaded
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="headprune-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
if "HEADPRUNE_CACHE" not in os.environ:  # proofs of this run, for all its processes, and for no other run
    os.environ["HEADPRUNE_CACHE"] = tempfile.mkdtemp(prefix="headprune-proofs-")
    atexit.register(shutil.rmtree, os.environ["HEADPRUNE_CACHE"], ignore_errors=True)

import pytest

from tiers import is_slow

gc.disable()  # until all is imported: nothing of it goes away again, and looking takes a fifth of the time


def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "numprocesses", None):  # it only hands out tests, and its workers wait for it
        return
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests are marked slow by their file (tests/tiers.py), or where they need a browser."""
    if is_slow(item.nodeid.removeprefix("tests/")) or {"browser", "page"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is there now stays: the collector need not look at it time and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that follow one another go to the same worker: what they share is then made once, and code of families,
    compilers and charts imported once."""
    if config.getvalue("dist") != "load":  # another way was asked for
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def shared_check_process() -> Iterator[None]:
    """One process that checks all plain checkpoints of the tests of a worker; it starts with the first."""
    from headprune.checkpoint import plain_check

    with plain_check.shared_check_process():
        yield


@pytest.fixture
def clean_table() -> Iterator[None]:
    """The family table as it was, whatever a test registers."""
    from headprune.units import families

    before = list(families.FAMILIES)
    yield
    families.FAMILIES[:] = before


@pytest.fixture
def nothing_proven(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that an earlier test has discovered or verified, for tests that change the code of a model."""
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path_factory.mktemp("proofs")))
