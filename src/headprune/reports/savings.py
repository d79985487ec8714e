"""The table of savings, for the terminal, the page and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headprune.display import counted
from headprune.units.resolve import KINDS


class SavingsRow(NamedTuple):
    what: str
    dense: str
    pruned: str
    ratio: str  # pruned / dense; empty where dense is 0


def savings_rows(savings: Mapping[str, Any]) -> list[SavingsRow]:
    """Units, parameters, size, FLOPs, memory, energy and latency, as far as they were measured."""
    dense, pruned, latency = savings["dense"], savings["pruned"], savings["latency"]
    tokens = f"one sequence of {latency['tokens']} tokens" if latency.get("tokens") else "one sample"
    scale, flops = (1e9, "GFLOPs") if dense["flops"] >= 1e8 else (1e6, "MFLOPs")
    rows = [
        *((kind, kind, "{:,}", 1) for kind in KINDS),
        ("parameters", "parameters", "{:,}", 1),
        ("megabytes", "MB in float32", "{:,.2f}", 1),
        ("megabytes_on_disk", "MB on disk", "{:,.2f}", 1),
        ("flops", f"{flops}, {tokens}", "{:,.3f}", scale),
        ("peak_memory_megabytes", "peak memory, MB", "{:,.1f}", 1),
        ("joules_per_1000", "joules for 1,000 samples", "{:,.1f}", 1),
    ]
    measured = [
        _row(what, form, dense[name], pruned[name], unit)
        for name, what, form, unit in rows
        if dense.get(name) is not None and pruned.get(name) is not None
    ]
    latency_rows = [
        _row(
            f"milliseconds, batch of {name.removeprefix('batch_')}",
            "{:,.1f}",
            milliseconds["dense"],
            milliseconds["pruned"],
        )
        for name, milliseconds in latency.items()
        if isinstance(milliseconds, Mapping)
    ]
    return measured + latency_rows


def how_timed(savings: Mapping[str, Any]) -> str:
    latency = savings["latency"]
    return (
        f"Milliseconds: median of {latency['repeats']} repetitions, dense and pruned in turns, "
        f"{counted(latency['threads'], 'CPU thread')}."
    )


def _row(what: str, form: str, dense: float, pruned: float, unit: float = 1) -> SavingsRow:
    before, after = (form.format(value / unit if unit > 1 else value) for value in (dense, pruned))
    return SavingsRow(what, before, after, f"{pruned / dense:.2f}" if dense else "")
