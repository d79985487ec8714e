"""The report: one self-contained page that works offline, on a phone and on paper."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headprune.errors import RunError
from headprune.extras import need_report
from headprune.measure.costs import megabytes
from headprune.measure.curves import DROPS, SHARES, at_share, removable, signed_area
from headprune.report.loading import ReportRun, finite, load_runs, scores_of, split_random
from headprune.store.files import write_text

VEGA = "window.vegaEmbed = vegaEmbed;"  # what the bundled libraries hand to the page
NOTHING = "\u2013"  # stands where there is no value
SHARES_OF_ONE = ("accuracy", "f1")  # metrics that read well as percent


def write_report(paths: Sequence[str | Path], out: Path, *, figure_folder: Path | None = None) -> Path:
    """Write the report of one run or many to `out`, and every figure as png, svg and pdf to `figure_folder`."""
    need_report()
    runs = load_runs(paths)
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
    """All figures by name: the curves of all runs, and the mask and first scores of each run that has a line."""
    from headprune.report import figures

    result = _curves(runs)
    lines, trials = split_random(runs)
    for run in lines or trials[:1]:
        name = re.sub(r"[^\w.=-]+", "-", run.name).strip("-")
        name = name if f"mask-{name}" not in result else f"{name}-{len(result)}"
        result[f"mask-{name}"] = figures.mask(run)
        if any(step.scores is not None for step in run.steps):
            result[f"scores-{name}"] = figures.scores(run)
    return result


def _curves(runs: Sequence[ReportRun]) -> dict[str, Any]:
    from headprune.report import figures

    metrics = list(dict.fromkeys(run.metric.name for run in runs))
    name = " or ".join(metrics)
    result = {"metric": figures.curve(runs, "metric", title=f"{name} while heads are removed", axis=name)}
    if any(finite(step.agreement) is not None for run in runs for step in run.steps):
        axis = "correlation of predictions" if metrics == ["pearson"] else "share of equal predictions"
        title = "stability: agreement with the dense model"
        result["agreement"] = figures.curve(runs, "agreement", title=title, axis=axis)
    return result


def render(runs: Sequence[ReportRun]) -> str:
    import jinja2

    from headprune.report import figures

    template = resources.files("headprune.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    lines, trials = split_random(runs)
    curves = _curves(runs)
    specifications = {**curves, "mask": figures.mask(runs[0]), "scores": figures.scores(runs[0])}
    comparison = _comparison(lines, trials) if len(runs) > 1 else []
    return environment.from_string(template).render(
        runs=runs,
        lines=lines,
        trials=trials,
        first=runs[0],
        models=list(dict.fromkeys(str(run.settings["model"]) for run in runs)),
        curves=list(curves),
        specifications=_script_json({name: chart.to_dict() for name, chart in specifications.items()}),
        replay=_script_json([_replay(run, figures.colour(runs, run)) for run in runs]),
        percents=_script_json(SHARES_OF_ONE),
        javascript=_libraries(),
        saved=[_saved(run) for run in runs if run.record.get("savings")],
        comparison=comparison,
        comparable=len({(run.metric.name, run.steps[-1].heads / max(1, run.steps[0].heads)) for run in runs}) == 1,
        shares=[f"{share:.0%}" for share in SHARES],
        drops=[f"{drop:.0%}" for drop in DROPS],
        value=_value,
    )


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
        "heads": [step.heads for step in run.steps],
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


def _saved(run: ReportRun) -> dict[str, Any]:
    saved = run.record["savings"]
    dense, pruned, latency = saved["dense"], saved["pruned"], saved["latency"]
    tokens = f", one sequence of {latency['tokens']} tokens" if latency["tokens"] else ", one sample"
    rows = [
        ("heads", dense["heads"], pruned["heads"], "{:,}"),
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


def _comparison(lines: Sequence[ReportRun], trials: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """A row per line and one for the random trials, best first."""
    rows = [_row(run.name, [run]) for run in lines]
    if trials:
        rows.append(_row(f"random, mean of {len(trials)} trials", trials))
    return sorted(rows, key=lambda row: -(row["area"] if row["area"] is not None else float("-inf")))


def _row(name: str, runs: Sequence[ReportRun]) -> dict[str, Any]:
    def mean(number: Callable[[ReportRun], float | None]) -> float | None:
        values = [finite(number(run)) for run in runs]
        return None if None in values else statistics.fmean(value for value in values if value is not None)

    def at(share: float, field: str) -> float | None:
        """None for a run that did not go that far."""
        return mean(lambda run: getattr(at_share(run.steps, share), field, None))

    return {
        "name": name,
        "metric_name": runs[0].metric.name,
        "area": mean(lambda run: signed_area(run.metric, run.steps)),
        "metric": [at(share, "metric") for share in SHARES],
        "agreement": [at(share, "agreement") for share in SHARES],
        "removable": [
            round(statistics.fmean(removable(run.metric, run.steps, drop) for run in runs)) for drop in DROPS
        ],
    }


def _value(metric: str, value: float | None) -> str:
    if finite(value) is None:
        return NOTHING
    return f"{value:.2%}" if metric in SHARES_OF_ONE else f"{value:.4g}"
