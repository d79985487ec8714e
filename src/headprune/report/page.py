"""The report: one self-contained page that works offline, on a phone and on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from headprune.costs import megabytes
from headprune.curves import DROPS, SHARES, at_share, removable, signed_area
from headprune.errors import RunError
from headprune.files import write_text
from headprune.report import figures
from headprune.report.export import save_figure
from headprune.report.loading import ReportRun, finite, load_runs

VEGA = "window.vegaEmbed = vegaEmbed;"  # what the bundled libraries hand to the page
NOTHING = "\u2013"  # stands where there is no value


def write_report(paths: Sequence[str | Path], out: Path, *, figure_folder: Path | None = None) -> Path:
    """Write the report of one run or many to `out`, and every figure as png, svg and pdf to `figure_folder`."""
    runs = load_runs(paths)
    if not out.parent.is_dir():
        raise RunError(f"There is no directory {out.parent} to write {out.name} to; make it first.")
    write_text(out, render(runs))
    if figure_folder is not None:
        for name, chart in charts(runs).items():
            save_figure(chart, figure_folder, name)
    return out


def charts(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """All figures by name: the curves of all runs, and the mask and first scores of each run with scores."""
    metric = runs[0].metric
    result: dict[str, Any] = {
        "metric": figures.curve(runs, "metric", title=f"{metric.name} while heads are removed", axis=metric.name),
        "agreement": figures.curve(
            runs,
            "agreement",
            title="stability: agreement with the dense model's predictions",
            axis="share of equal predictions",
        ),
    }
    for run in runs:
        name = run.name.replace("/", "-")
        result[f"mask-{name}"] = figures.mask(run)
        if len(run.steps) > 1:
            result[f"scores-{name}"] = figures.scores(run)
    return result


def render(runs: Sequence[ReportRun]) -> str:
    made = charts(runs)
    template = resources.files("headprune.report").joinpath("page.html.j2").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["percent"] = lambda value: NOTHING if value is None else f"{value:.2%}"
    environment.filters["number"] = lambda value: NOTHING if value is None else f"{value:,}"
    return environment.from_string(template).render(
        runs=runs,
        first=runs[0],
        specifications=_script_json({name: made[name].to_dict() for name in ("metric", "agreement")}),
        replay=_script_json([_replay(run) for run in runs]),
        javascript=vl_convert.javascript_bundle(VEGA).replace("</script", "<\\/script"),
        saved=[_saved(run) for run in runs if run.record.get("savings")],
        comparison=_comparison(runs) if len(runs) > 1 else [],
        shares=[f"{share:.0%}" for share in SHARES],
        value=_value,
    )


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element, whatever names the data contains."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _replay(run: ReportRun) -> dict[str, Any]:
    """What the slider needs: at which step each head goes, and the scores before every step as ranks 0..100."""
    return {
        "name": run.name,
        "metric": run.metric.name,
        "shape": figures.shape(run),
        "stop": run.stopped_at,
        "removed": [[list(head) for head in step.removed] for step in run.steps],
        "values": [finite(step.metric) for step in run.steps],
        "agreement": [finite(step.agreement) for step in run.steps],
        "heads": [step.heads for step in run.steps],
        "parameters": [step.parameters for step in run.steps],
        "ranks": [_ranks(step) for step in run.steps],
    }


def _ranks(step: Any) -> list[list[int | None]] | None:
    if step.scores is None:
        return None
    values = sorted(v for row in step.scores.tolist() for v in row if v == v)
    place = {value: round(100 * index / max(1, len(values) - 1)) for index, value in enumerate(values)}
    return [[place.get(value) for value in row] for row in step.scores.tolist()]


def _saved(run: ReportRun) -> dict[str, Any]:
    saved = run.record["savings"]
    dense, pruned, latency = saved["dense"], saved["pruned"], saved["latency"]
    rows = [
        ("heads", dense["heads"], pruned["heads"], "{:,}"),
        ("parameters", dense["parameters"], pruned["parameters"], "{:,}"),
        ("MB in float32", dense["megabytes"], pruned["megabytes"], "{:,.2f}"),
        (f"GFLOPs, {latency['tokens'] or '?'} tokens", dense["flops"] / 1e9, pruned["flops"] / 1e9, "{:,.3f}"),
        ("peak memory, MB", dense["peak_memory_megabytes"], pruned["peak_memory_megabytes"], "{:,.1f}"),
    ]
    if dense["megabytes_on_disk"] and pruned["megabytes_on_disk"]:
        rows.append(("MB on disk", dense["megabytes_on_disk"], pruned["megabytes_on_disk"], "{:,.2f}"))
    rows += [
        (f"milliseconds, batch of {key[6:]}", value["dense"], value["pruned"], "{:,.1f}")
        for key, value in latency.items()
        if key.startswith("batch_")
    ]
    modules = [
        (name, count, pruned["modules"].get(name, 0), megabytes(count), megabytes(pruned["modules"].get(name, 0)))
        for name, count in dense["modules"].items()
    ]
    return {
        "name": run.name,
        "rows": [
            (what, form.format(before), form.format(after), f"{after / before:.2f}" if before else NOTHING)
            for what, before, after, form in rows
        ],
        "modules": modules,
        "note": saved.get("note"),
        "how": f"median of {latency['repeats']} interleaved repetitions, {latency['threads']} threads",
    }


def _comparison(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        points = [at_share(run.steps, share) for share in SHARES]
        rows.append(
            {
                "name": run.name,
                "area": finite(signed_area(run.metric, run.steps)),
                "metric": [finite(step.metric) for step in points],
                "agreement": [finite(step.agreement) for step in points],
                "removable": [removable(run.metric, run.steps, drop) for drop in DROPS],
            }
        )
    return sorted(rows, key=lambda row: -(row["area"] if row["area"] is not None else float("-inf")))


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2%}" if metric in ("accuracy", "f1") else f"{value:.4g}"
