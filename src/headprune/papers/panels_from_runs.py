"""Reads runs of headprune as panels of figures 3 to 5: one folder per model, with run directories anywhere below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headprune.measure.metrics import METRICS
from headprune.measure.trajectory import Step, removed_until
from headprune.papers.figure_data import CRITERIA, Curve, Panel
from headprune.papers.paper_models import MODELS, ReproductionError
from headprune.run_folder import read_run
from headprune.search.stop import knee


def run_panels(folder: Path) -> list[Panel]:
    """One panel per model folder; criteria that are not in the paper are skipped."""
    if not folder.is_dir():
        raise ReproductionError(f"There is no directory {folder} with runs; check the path.")
    order = [model.key for model in MODELS]
    models = sorted(
        (child for child in folder.iterdir() if child.is_dir()),
        key=lambda child: (order.index(child.name) if child.name in order else len(order), child.name),
    )
    panels = [panel for panel in map(_panel, models) if panel is not None]
    if not panels:
        raise ReproductionError(
            f"{folder} has no runs of gnorm, entropy, their inverses or random; give a folder with run directories "
            "such as bert/gnorm, which headprune compare --out writes."
        )
    return panels


def _panel(folder: Path) -> Panel | None:
    curves: dict[str, Curve] = {}
    trials: dict[int, list[float]] = defaultdict(list)
    best: tuple[dict[str, Any], list[Step]] | None = None
    heads, metric = 0, "accuracy"
    for file in sorted(folder.rglob("run.json")):
        record, steps = read_run(file.parent)
        name = str(record["settings"].get("criterion", "")).split("(")[0]
        if not steps or name not in (*CRITERIA, "random") or name in curves:
            continue
        heads = max(heads, steps[0].applied_heads)
        metric = record.get("result", {}).get("metric", metric)
        if name == "random":
            for removed, value in _curve(steps):
                trials[removed].append(value)
        else:
            curves[name] = _curve(steps)
            best = (record, steps) if name == "gnorm" else best
    if not curves and not trials:
        return None
    mask, stop = _stop(*best) if best is not None else (None, None)
    title = next((model.title for model in MODELS if model.key == folder.name), folder.name)
    # A single site with more applied heads than heads is used in several layers (ALBERT).
    uses = heads // len(mask[0]) if mask is not None and len(mask) == 1 and heads % len(mask[0]) == 0 else 1
    return Panel(title, heads, metric, curves, dict(trials), mask, uses, stop)


def _curve(steps: Sequence[Step]) -> Curve:
    return [(steps[0].applied_heads - step.applied_heads, step.metric) for step in steps]


def _stop(record: dict[str, Any], steps: Sequence[Step]) -> tuple[list[list[bool]] | None, int | None]:
    """The mask at the knee of the curve of the run. The paper's own rule is not known (docs/reproduction.md)."""
    first = steps[1].scores if len(steps) > 1 else None
    if first is None:
        return None, None
    metric = METRICS.get(record.get("result", {}).get("metric", "accuracy"), METRICS["accuracy"])
    last = knee(metric, [step.metric for step in steps], [step.heads for step in steps])
    removed = set(removed_until(steps, last))
    mask = [[(site, head) not in removed for head in range(first.shape[1])] for site in range(first.shape[0])]
    return mask, steps[0].applied_heads - steps[last].applied_heads
