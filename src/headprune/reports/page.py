"""The report: one self-contained HTML page that works offline, on a phone and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.errors import RunError
from headprune.extras import need_report
from headprune.measure.compare_curves import Comparison, comparable, rank_curves
from headprune.measure.costs import megabytes
from headprune.measure.curves import DROPS, share_text, shares
from headprune.measure.metrics import SHARES_OF_ONE
from headprune.reports import exports, gate_training
from headprune.reports.budget_points import points_of
from headprune.reports.format import (
    interval_text,
    left_text,
    measured_text,
    removed_text,
    spread_text,
    stop_text,
    value_text,
    verdict,
)
from headprune.reports.recovery import losses, recovery_of, section
from headprune.reports.run_view import (
    Entry,
    RunView,
    comparison_command,
    curve_of,
    entries,
    finite,
    load_runs,
    scores_of,
    shares_compared,
)
from headprune.reports.savings import how_timed, savings_rows
from headprune.snippets.checkpoints import load_line

VEGA = "window.vegaEmbed = vegaEmbed;"  # export of the bundled libraries
NO_VALUE = "\u2013"  # in place of a missing value
MEASURED_SHARES = ("parameters", "flops", "latency")
TIMED = "as for the budget, on inputs of {latency_batch} sequences at once"


MARK = "<title>headprune: "  # of every page, near its beginning


def write_report(paths: Sequence[str | Path], out: Path, *, figure_folder: Path | None = None) -> Path:
    """Write the report of one run or many to `out`, and every figure as png, svg and pdf to `figure_folder`."""
    need_report()
    runs = load_runs(paths)
    path_exists(out, RunError)
    if not out.parent.is_dir():
        raise RunError(f"There is no directory {out.parent} to write {out.name} to; create it first.")
    if out.is_dir():
        raise RunError(f"{out} is a directory; name a file for the page, such as {out / 'report.html'}.")
    if out.is_file() and MARK not in out.read_text(encoding="utf-8", errors="ignore")[:1000]:
        raise RunError(f"{out} is there, and is no report of headprune; name another file.")
    if figure_folder is not None and figure_folder.exists() and not figure_folder.is_dir():
        raise RunError(f"{figure_folder} is a file; choose a directory for the figures.")
    from headprune.reports.save_figures import save_figure

    try:
        write_text(out, render(runs))
        if figure_folder is not None:
            for name, chart in charts(runs, saved=True).items():
                save_figure(chart, figure_folder, name)
    except OSError as error:
        raise RunError(f"Cannot write the report: {error.strerror}: {error.filename}.") from None
    return out


def report(
    runs: str | Path | Sequence[str | Path], out: str | Path = "report.html", *, figures: str | Path | None = None
) -> Path:
    """Write one self-contained page about runs, or about a folder of runs as `compare` writes it, to `out`; every
    figure as png, svg and pdf into the folder `figures`. Returns the path of the page."""
    paths = [runs] if isinstance(runs, (str, Path)) else list(runs)
    return write_report(paths, Path(out), figure_folder=None if figures is None else Path(figures))


def charts(runs: Sequence[RunView], *, saved: bool = False) -> dict[str, Any]:
    """All figures by name: the curves of all runs, metric against budget, and mask, widths and first scores of each run
    that has a line. `saved` are those outside of the page, which do not move through the steps."""
    from headprune.reports import figures, tradeoff
    from headprune.reports import widths as strips

    result = {**curve_charts(runs, saved=saved), **tradeoff.figures(runs), **_losses(runs), **_gates(runs)}
    shown = entries(runs)
    lines = [run for entry in shown if not entry.boxes for run in entry.runs]
    for run in lines or shown[0].runs[:1]:
        name = re.sub(r"[^\w.=-]+", "-", run.name).strip("-")
        name = name if f"mask-{name}" not in result else f"{name}-{len(result)}"
        result[f"mask-{name}"] = figures.mask(run)
        if run.has_neurons:
            result[f"widths-{name}"] = strips.widths(run)
        if any(step.scores is not None for step in run.steps):
            result[f"scores-{name}"] = figures.scores(run)
    return result


def curve_charts(runs: Sequence[RunView], *, saved: bool = False) -> dict[str, Any]:
    from headprune.reports import figures

    metrics = list(dict.fromkeys(run.metric.name for run in runs))
    name = " or ".join(metrics)
    title = f"{name} while {units(runs)} are removed"
    result = {"metric": figures.curve(runs, "metric", title=title, axis=name, saved=saved)}
    if any(finite(step.agreement) is not None for run in runs for step in run.steps):
        axis = "correlation of predictions" if metrics == ["pearson"] else "share of equal predictions"
        title = "stability: agreement with the dense model"
        result["agreement"] = figures.curve(runs, "agreement", title=title, axis=axis, saved=saved)
    return result


def _losses(runs: Sequence[RunView]) -> dict[str, Any]:
    """The losses of recoveries, one figure for each run that has one."""
    records = [(number, recovery_of(run)) for number, run in enumerate(runs)]
    return {f"losses-{number}": losses(record) for number, record in records if record and record.get("history")}


def _gates(runs: Sequence[RunView]) -> dict[str, Any]:
    """Gate probabilities, one figure for each run that trained gates."""
    figures = {f"gates-{number}": gate_training.figure(run) for number, run in enumerate(runs) if run.has_gates}
    return {name: chart for name, chart in figures.items() if chart is not None}


def units(runs: Sequence[RunView]) -> str:
    return "heads and neurons" if any(run.has_neurons for run in runs) else "heads"


def render(runs: Sequence[RunView]) -> str:
    import jinja2
    from altair.utils.schemapi import debug_mode

    from headprune.reports import figures, tradeoff
    from headprune.reports import widths as strips

    template = resources.files("headprune.reports").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    shown = entries(runs)
    # Validation against Vega-Lite's schema takes most of the time of a page, and is done in tests.
    with debug_mode(False):
        curves, budget_charts = curve_charts(runs), tradeoff.figures(runs)
        training_charts = {**_losses(runs), **_gates(runs)}
        charts = {
            **curves,
            **budget_charts,
            **training_charts,
            "mask": figures.mask(runs[0]),
            "scores": figures.scores(runs[0]),
        }
        wide = next((run for run in runs if run.has_neurons), None)
        if wide is not None:
            charts["widths"] = strips.widths(wide)
        specifications = {name: chart.to_dict(validate=False) for name, chart in charts.items()}
    curves_of_entries = [curve_of(entry.name, entry.runs) for entry in shown]
    at = shares_compared(runs)
    rows = rank_curves(curves_of_entries, at) if len(runs) > 1 else []
    ranked = comparable(curves_of_entries)
    return environment.from_string(template).render(
        runs=runs,
        entries=shown,
        first=runs[0],
        models=list(dict.fromkeys(str(run.settings["model"]) for run in runs)),
        curves=list(curves),
        units=units(runs),
        states=_script_json(figures.STATES),
        counted=figures.counted(runs),
        wide=wide is not None,
        specifications=_script_json(specifications),
        replay=_script_json([_replay(run, figures.colour(runs, run)) for run in runs]),
        percents=_script_json(SHARES_OF_ONE),
        javascript=_libraries(),
        bought=list(budget_charts),
        families=[_points_section(run, figures.colour(runs, run)) for run in tradeoff.with_budget(runs)],
        saved=[_savings_section(run) for run in runs if run.record.get("savings")],
        recovered=[
            (number, section(run, record))
            for number, run in enumerate(runs)
            if (record := recovery_of(run)) is not None
        ],
        exported=[tables for run in runs if (tables := exports.section(run)) is not None],
        used=[(run.name, ways) for run in _usable_runs(shown) if (ways := exports.uses(run))],
        gates=[
            (name, runs[int(name.rpartition("-")[2])].name) for name in training_charts if name.startswith("gates-")
        ],
        comparison=[_comparison_row(row) for row in rows],
        comparable=ranked,
        best=rows[0].name if ranked and len(rows) > 1 else None,
        until=f"{rows[0].usable_until:.0%}" if rows and rows[0].usable_until else None,
        verdict=verdict(rows, figures.counted(runs)),
        command=comparison_command(runs) if rows else None,
        shares=[share_text(share) for share in at],
        drops=[f"{drop:.0%}" for drop in DROPS],
        value=_value,
        measured=_measured,
        removed=removed_text,
        stopped=stop_text,
    )


def _usable_runs(shown: Sequence[Entry]) -> list[RunView]:
    """Runs whose models may be used: all but trials of random that are drawn as boxes, unless exported."""
    return [run for entry in shown for run in entry.runs if not entry.boxes or exports.exports_of(run)]


@cache
def _libraries() -> str:
    """Vega, Vega-Lite and Vega-Embed; bundling them takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle(VEGA).replace("</script", "<\\/script")


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element, whatever names the data contains."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _replay(run: RunView, colour: str) -> dict[str, Any]:
    """The data of the slider: the step at which each head is removed, and metrics and scores of every step."""
    return {
        "name": run.name,
        "metric": run.metric.name,
        "colour": colour,
        "stop": run.stop,
        "start": run.shown_first,
        "cells": [[*head, run.removed_at.get(head)] for head in run.heads],
        "values": {
            "metric": [finite(step.metric) for step in run.steps],
            "agreement": [finite(step.agreement) for step in run.steps],
        },
        "between": [interval_text(run.metric.name, step.interval) for step in run.steps],
        "heads": [step.heads for step in run.steps],
        "removed": [round(share, 6) for share in shares(run.steps)],
        "left": [left_text(run.steps[0].units, step.units) for step in run.steps],
        "layers": list(map(list, run.widths[0].items())),
        "widths": [list(widths.values()) for widths in run.widths] if run.has_neurons else [],
        "parameters": [step.parameters for step in run.steps],
        "scores": _scores(run),
    }


def _scores(run: RunView) -> list[list[float | None] | bool | None]:
    """Scores in the order of the cells, to three digits; True where they equal those of the step before."""
    result: list[list[float | None] | bool | None] = []
    before: list[float | None] = []
    for step in run.steps:
        if step.scores is None:
            result.append(None)
            before = []
            continue
        now = scores_of(run, step.step)
        same = bool(before) and all(value is None or value == old for value, old in zip(now, before, strict=True))
        result.append(True if same else [None if value is None else float(f"{value:.3g}") for value in now])
        before = now
    return result


def _points_section(run: RunView, colour: str) -> dict[str, Any]:
    """The rows of the table of points: the dense model, then each point with the line that loads it."""
    name, dense = run.metric.name, run.steps[0]
    kinds = [kind for kind, count in dense.units.items() if count]
    first = {
        "text": "dense",
        "measured": _measured(name, dense.metric, dense.interval),
        "units": [f"{dense.units[kind]:,}" for kind in kinds],
        "shares": ["100.0%"] * len(MEASURED_SHARES),
        "folder": NO_VALUE,
    }
    rows, loads = [first], []
    for point in points_of(run.record):
        left = [point.shares.get(measure) for measure in MEASURED_SHARES]
        rows.append(
            {
                "text": point.text,
                "measured": _measured(name, point.metric, point.interval),
                "units": [f"{point.units.get(kind, 0):,} of {dense.units[kind]:,}" for kind in kinds],
                "shares": [NO_VALUE if share is None else f"{share:.1%}" for share in left],
                "folder": point.folder,
            }
        )
        loads.append(load_line(f"{run.path_text}/{point.folder}"))
    target_texts = [point.target_and_result for point in points_of(run.record) if point.target_and_result]
    timed = any(step.latency is not None for step in run.steps)
    return {
        "name": run.name,
        "colour": colour,
        "kinds": kinds,
        "rows": rows,
        "loads": loads,
        "said": "; ".join(target_texts),
        "how": TIMED.format(**run.settings) if timed else "on a batch of the evaluation data, at the end of the run",
    }


def _savings_section(run: RunView) -> dict[str, Any]:
    saved = run.record["savings"]
    dense, pruned = saved["dense"], saved["pruned"]
    modules = [(name, count, pruned["modules"].get(name, 0)) for name, count in dense["modules"].items()]
    return {
        "name": run.name,
        "rows": [row._replace(ratio=row.ratio or NO_VALUE) for row in savings_rows(saved)],
        "modules": [
            (name, f"{a:,}", f"{b:,}", f"{megabytes(a):,.2f}", f"{megabytes(b):,.2f}") for name, a, b in modules
        ],
        "note": saved.get("note"),
        "how": how_timed(saved),
    }


def _comparison_row(row: Comparison) -> dict[str, Any]:
    """A row of the comparison for its tables."""
    name = row.measured.name
    return {
        "name": row.name,
        "schedule": row.schedule or NO_VALUE,
        "metric_name": name,
        "metric": [
            {
                "value": _value(name, row.metric[share]),
                "interval": interval_text(name, row.interval[share]),
                "spread": spread_text(name, row.spread[share]),
            }
            for share in row.metric
        ],
        "agreement": [_value("agreement", value) for value in row.agreement.values()],
        "area": NO_VALUE if finite(row.area) is None else f"{row.area:.4f}",
        "usable_area": NO_VALUE if finite(row.usable_area) is None else f"{row.usable_area:.4f}",
        "removable": list(row.removable.values()),
    }


def _value(metric: str, value: float | None) -> str:
    return value_text(metric, value, NO_VALUE)


def _measured(metric: str, value: float | None, between: Sequence[float | None] | None) -> str:
    return measured_text(metric, value, between, NO_VALUE)
