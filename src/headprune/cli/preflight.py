"""Checks of a verb before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headprune.checkpoint.paths import refuse_missing_model
from headprune.config.groups import BUDGETS
from headprune.config.option import parse_keep, parse_points
from headprune.criteria import make
from headprune.criteria.registry import split_suffix
from headprune.data.locations import refuse_missing_data
from headprune.extras import need_report


def check_early(model: str, options: Mapping[str, Any], *, criteria: Iterable[str] = (), reports: bool = False) -> None:
    """Check names of criteria, files and packages. All of it is checked again where it is used."""
    if reports:
        need_report()
    for name in (*criteria, *([options["criterion"]] if options.get("criterion") else [])):
        make(name)
    if options.get("keep") is not None:
        parse_keep(options["keep"])
    for name in BUDGETS:
        if options.get(name) is not None:
            parse_points(options[name])
    refuse_missing_model(model)
    for source in (options["data"], options.get("calibration"), *(options.get("vocabulary") or ())):
        if source is not None:
            refuse_missing_data(source)


def without_suffixes(names: Iterable[str]) -> list[str]:
    return [split_suffix(name)[0] for name in names]


def quiet_transformers() -> None:
    """Disable the progress bars of transformers; its warnings and errors stay."""
    from transformers.utils import logging

    logging.disable_progress_bar()
