"""The report: one self-contained page that works offline, on a phone and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headprune.errors import RunError
from headprune.extras import need_report
from headprune.measure.comparing import Comparison, comparable, compared
from headprune.measure.costs import megabytes
from headprune.measure.curves import DROPS, SHARES, shares
from headprune.measure.metrics import SHARES_OF_ONE
from headprune.report import exports, gates
from headprune.report.loading import (
    Entry,
    ReportRun,
    comparison_command,
    curve_of,
    entries,
    finite,
    load_runs,
    scores_of,
)
from headprune.report.points import points_of
from headprune.report.recovery import losses, recovery_of, section
from headprune.report.words import (
    interval_text,
    left_text,
    measured_text,
    removed_text,
    spread_text,
    stop_text,
    value_text,
    verdict,
)
from headprune.store.files import is_there, write_text

VEGA = "window.vegaEmbed = vegaEmbed;"  # what the bundled libraries hand to the page
NOTHING = "\u2013"  # stands where there is no value
MEASURED_SHARES = ("parameters", "flops", "latency")
TIMED = "as the budget counts it, on inputs of {latency_batch} sequences at once"


def write_report(paths: Sequence[str | Path], out: Path, *, figure_folder: Path | None = None) -> Path:
    """Write the report of one run or many to `out`, and every figure as png, svg and pdf to `figure_folder`."""
    need_report()
    runs = load_runs(paths)
    is_there(out, RunError)
    if not out.parent.is_dir():
        raise RunError(f"There is no directory {out.parent} to write {out.name} to; make it first.")
    if out.is_dir():
        raise RunError(f"{out} is a directory; name a file for the page, such as {out / 'report.html'}.")
    if figure_folder is not None and figure_folder.exists() and not figure_folder.is_dir():
        raise RunError(f"{figure_folder} is a file; choose a directory for the figures.")
    from headprune.report.export import save_figure

    try:
        write_text(out, render(runs))
        if figure_folder is not None:
            for name, chart in charts(runs).items():
                save_figure(chart, figure_folder, name)
    except OSError as error:
        raise RunError(f"Cannot write the report: {error.strerror}: {error.filename}.") from None
    return out


def charts(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """All figures by name: the curves of all runs, what budgets buy, and mask, widths and first scores of each run that
    has a line."""
    from headprune.report import family, figures
    from headprune.report import widths as strips

    result = {**_curves(runs), **family.figures(runs), **_losses(runs), **_gates(runs)}
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


def _curves(runs: Sequence[ReportRun]) -> dict[str, Any]:
    from headprune.report import figures

    metrics = list(dict.fromkeys(run.metric.name for run in runs))
    name = " or ".join(metrics)
    result = {"metric": figures.curve(runs, "metric", title=f"{name} while {units(runs)} are removed", axis=name)}
    if any(finite(step.agreement) is not None for run in runs for step in run.steps):
        axis = "correlation of predictions" if metrics == ["pearson"] else "share of equal predictions"
        title = "stability: agreement with the dense model"
        result["agreement"] = figures.curve(runs, "agreement", title=title, axis=axis)
    return result


def _losses(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """The losses of recoveries, one figure for each run that has one."""
    found = [(number, recovery_of(run)) for number, run in enumerate(runs)]
    return {f"losses-{number}": losses(record) for number, record in found if record and record.get("history")}


def _gates(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """How gates closed, one figure for each run that trained them."""
    found = {f"gates-{number}": gates.figure(run) for number, run in enumerate(runs) if run.has_gates}
    return {name: chart for name, chart in found.items() if chart is not None}


def units(runs: Sequence[ReportRun]) -> str:
    return "heads and neurons" if any(run.has_neurons for run in runs) else "heads"


def render(runs: Sequence[ReportRun]) -> str:
    import jinja2
    from altair.utils.schemapi import debug_mode

    from headprune.report import family, figures
    from headprune.report import widths as strips

    template = resources.files("headprune.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    shown = entries(runs)
    # Checking every mark and channel against Vega-Lite's schema takes most of the time of a page, and the tests do it.
    with debug_mode(False):
        curves, bought = _curves(runs), family.figures(runs)
        trained = {**_losses(runs), **_gates(runs)}
        charts = {**curves, **bought, **trained, "mask": figures.mask(runs[0]), "scores": figures.scores(runs[0])}
        wide = next((run for run in runs if run.has_neurons), None)
        if wide is not None:
            charts["widths"] = strips.widths(wide)
        specifications = {name: chart.to_dict(validate=False) for name, chart in charts.items()}
    against = [curve_of(entry.name, entry.runs) for entry in shown]
    rows = compared(against) if len(runs) > 1 else []
    ranked = comparable(against)
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
        bought=list(bought),
        families=[_family(run, figures.colour(runs, run)) for run in family.with_budget(runs)],
        saved=[_saved(run) for run in runs if run.record.get("savings")],
        recovered=[
            (number, section(run, record))
            for number, run in enumerate(runs)
            if (record := recovery_of(run)) is not None
        ],
        exported=[found for run in runs if (found := exports.section(run)) is not None],
        used=[(run.name, ways) for run in _shipped(shown) if (ways := exports.uses(run))],
        gates=[(name, runs[int(name.rpartition("-")[2])].name) for name in trained if name.startswith("gates-")],
        comparison=[_shown_row(row) for row in rows],
        comparable=ranked,
        best=rows[0].name if ranked and len(rows) > 1 else None,
        until=f"{rows[0].usable_until:.0%}" if rows and rows[0].usable_until else None,
        verdict=verdict(rows, figures.counted(runs)),
        command=comparison_command(runs) if rows else None,
        shares=[f"{share:.0%}" for share in SHARES],
        drops=[f"{drop:.0%}" for drop in DROPS],
        value=_value,
        measured=_measured,
        removed=removed_text,
        stopped=stop_text,
    )


def _shipped(shown: Sequence[Entry]) -> list[ReportRun]:
    """Runs whose models somebody may use: all but trials of random that are drawn together, unless exported."""
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


def _replay(run: ReportRun, colour: str) -> dict[str, Any]:
    """What the slider needs: at which step each head goes, and what was measured and scored at every step."""
    return {
        "name": run.name,
        "metric": run.metric.name,
        "colour": colour,
        "stop": run.stop,
        "start": run.shown_first,
        "cells": [[*head, run.gone_at.get(head)] for head in run.heads],
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


def _scores(run: ReportRun) -> list[list[float | None] | bool | None]:
    """Scores in the order of the cells, to three digits; True where they are those of the step before."""
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


def _family(run: ReportRun, colour: str) -> dict[str, Any]:
    """The rows of the table of points: the dense model, then each point with the line that loads it."""
    name, dense = run.metric.name, run.steps[0]
    kinds = [kind for kind, count in dense.units.items() if count]
    first = {
        "text": "dense",
        "measured": _measured(name, dense.metric, dense.interval),
        "units": [f"{dense.units[kind]:,}" for kind in kinds],
        "shares": ["100.0%"] * len(MEASURED_SHARES),
        "folder": NOTHING,
    }
    rows, loads = [first], []
    for point in points_of(run.record):
        left = [point.shares.get(measure) for measure in MEASURED_SHARES]
        rows.append(
            {
                "text": point.text,
                "measured": _measured(name, point.metric, point.interval),
                "units": [f"{point.units.get(kind, 0):,} of {dense.units[kind]:,}" for kind in kinds],
                "shares": [NOTHING if share is None else f"{share:.1%}" for share in left],
                "folder": point.folder,
            }
        )
        loads.append(f"model = headprune.load({json.dumps(f'{run.place}/{point.folder}')})")
    said = [point.came_out for point in points_of(run.record) if point.came_out]
    timed = any(step.latency is not None for step in run.steps)
    return {
        "name": run.name,
        "colour": colour,
        "kinds": kinds,
        "rows": rows,
        "loads": loads,
        "said": "; ".join(said),
        "how": TIMED.format(**run.settings) if timed else "on a batch of the evaluation data, at the end of the run",
    }


def _saved(run: ReportRun) -> dict[str, Any]:
    saved = run.record["savings"]
    dense, pruned, latency = saved["dense"], saved["pruned"], saved["latency"]
    tokens = f", one sequence of {latency['tokens']} tokens" if latency["tokens"] else ", one sample"
    rows = [
        ("heads", dense["heads"], pruned["heads"], "{:,}"),
        *([("neurons", dense["neurons"], pruned["neurons"], "{:,}")] if dense.get("neurons") else []),
        ("parameters", dense["parameters"], pruned["parameters"], "{:,}"),
        ("MB in float32", dense["megabytes"], pruned["megabytes"], "{:,.2f}"),
        (f"GFLOPs{tokens}", dense["flops"] / 1e9, pruned["flops"] / 1e9, "{:,.3f}"),
        ("peak memory, MB", dense["peak_memory_megabytes"], pruned["peak_memory_megabytes"], "{:,.1f}"),
    ]
    if dense.get("megabytes_on_disk") and pruned.get("megabytes_on_disk"):
        rows.append(("MB on disk", dense["megabytes_on_disk"], pruned["megabytes_on_disk"], "{:,.2f}"))
    rows += [
        (f"milliseconds, batch of {key[6:]}", value["dense"], value["pruned"], "{:,.1f}")
        for key, value in latency.items()
        if key.startswith("batch_")
    ]
    modules = [(name, count, pruned["modules"].get(name, 0)) for name, count in dense["modules"].items()]
    return {
        "name": run.name,
        "rows": [
            (what, form.format(before), form.format(after), f"{after / before:.2f}" if before else NOTHING)
            for what, before, after, form in rows
        ],
        "modules": [
            (name, f"{a:,}", f"{b:,}", f"{megabytes(a):,.2f}", f"{megabytes(b):,.2f}") for name, a, b in modules
        ],
        "note": saved.get("note"),
        "how": f"median of {latency['repeats']} interleaved repetitions, CPU threads: {latency['threads']}",
    }


def _shown_row(row: Comparison) -> dict[str, Any]:
    """A row of the comparison as its tables show it."""
    name = row.measured.name
    return {
        "name": row.name,
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
        "area": NOTHING if finite(row.area) is None else f"{row.area:.4f}",
        "usable_area": NOTHING if finite(row.usable_area) is None else f"{row.usable_area:.4f}",
        "removable": list(row.removable.values()),
    }


def _value(metric: str, value: float | None) -> str:
    return value_text(metric, value, NOTHING)


def _measured(metric: str, value: float | None, between: Sequence[float | None] | None) -> str:
    return measured_text(metric, value, between, NOTHING)
