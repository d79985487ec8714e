"""The model card of a pruned checkpoint, rendered from the records of its run: what was removed and how, metrics and
savings, recovery, exports, and code to use it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from headprune.data.locations import TABLES, looks_like_a_path
from headprune.display import counted
from headprune.extras import require
from headprune.measure.trajectory import Step, finite_or_none
from headprune.reports import gate_training
from headprune.reports.exports import columns, exports_of, rows
from headprune.reports.exports import how as how_exported
from headprune.reports.format import markdown, measured_text, removed_text, stop_text, value_text, vocabulary_text
from headprune.reports.recovery import FOLDER, how, measured_of, recovery_of
from headprune.reports.run_view import load_runs
from headprune.reports.savings import how_timed, savings_rows
from headprune.run_folder import read_run
from headprune.snippets.checkpoints import pipeline_tag, read_config, usage
from headprune.units.resolve import KINDS

CARD = "README.md"
RECOVERED = f"{FOLDER}/model"  # of a run
TAGS = ["headprune", "pruned"]
METRIC_TYPES = {"matthews": "matthews_correlation", "pearson": "pearsonr", "span_f1": "f1"}  # names of the hub
FILE_TYPES = {".jsonl": "json", ".tsv": "csv"}  # names of datasets.load_dataset


def run_card(run: Path, of: str = "model", *, recovery: Mapping[str, Any] | None = None) -> str:
    """The card of one of a run's models, from all records of the run. `recovery` is the record of RUN/finetuned/model
    where it is not written yet."""
    (view,) = load_runs([run])
    record = view.record
    if of == RECOVERED and recovery is None:
        recovery = recovery_of(view)
    point = of.removeprefix("models/") if of.startswith("models/") else None
    if of == RECOVERED and recovery is not None:
        point = recovery["settings"].get("point")
        if recovery.get("rounds"):
            record = _after_cycles(run, record, recovery)
    if point is not None:
        record = record_at(record, view.steps, point)
    return model_card(record, run / of, recovery=recovery if of == RECOVERED else None, exports=exports_of(run, of))


def model_card(
    record: Mapping[str, Any],
    folder: Path | None = None,
    *,
    recovery: Mapping[str, Any] | None = None,
    exports: Sequence[Mapping[str, Any]] = (),
) -> str:
    """README.md of the model in `folder`, from the records of its run, its recovery and its exports."""
    result = record["result"]
    name, task = str(record["settings"]["model"]), str(record.get("task") or "")
    tag = pipeline_tag(task, folder)
    title = Path(name).name or name
    evaluation = _eval_result(record, tag or task, recovery)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=tag or None,
        base_model=name if _on_hub(name) else None,
        datasets=[evaluation.dataset_type] if evaluation and not _is_file(evaluation.dataset_name) else None,
        metrics=[evaluation.metric_type] if evaluation else None,
        model_name=f"{title}-pruned" if evaluation else None,
        eval_results=[evaluation] if evaluation else None,
        tags=[*TAGS, "attention-head-pruning"],
    )
    table = _rows(record)
    stopped = markdown(stop_text(result))
    return _render(
        data=data,
        title=f"{title}, {removed_text(result).replace('heads', 'attention heads')} removed",
        summary=f"Pruned by headprune {record['versions']['headprune']}: {_method(record)}. {stopped}".rstrip(),
        rows=table,
        details=[*_notes(record, table), *_heads(result), *_widths(result), *filter(None, [vocabulary_text(record)])],
        recovery=None if recovery is None else _recovery(recovery),
        exports=_exports(exports),
        usage=usage(folder, task, tag),
    )


def plain_card(folder: Path) -> str:
    """The card of a model without a run, from its config."""
    sites = (read_config(folder) or {}).get("pruned_heads") or {}
    heads = sum(map(len, sites.values()))
    return _render(
        data=ModelCardData(library_name="transformers", tags=TAGS),
        title=folder.resolve().name,
        summary=f"Pruned by headprune: {heads} attention heads removed from {sum(map(bool, sites.values()))} sites; "
        "config.json lists them.",
        rows=[],
        details=[],
        recovery=None,
        exports=None,
        usage=usage(folder, "", ""),
    )


def record_at(record: Mapping[str, Any], steps: Sequence[Step], label: str) -> dict[str, Any]:
    """The record of a run as if it had stopped at one point of its budget, from the journal of its steps."""
    number = next(point["step"] for point in record["points"] if point["label"] == label)
    dense, step, end = steps[0], steps[number], record["result"]
    mask = [list(row) for row in end["mask"]]
    for later in steps[number + 1 : end["step"] + 1]:
        for head in later.removed_heads:
            mask[head.site][head.index] = 1
    result = {
        **end,
        "step": number,
        "rule": f"the point {label} of its budget",
        "pruned": finite_or_none(step.metric),
        "pruned_interval": None if step.interval is None else list(map(finite_or_none, step.interval)),
        "agreement": step.agreement,
        "units": {kind: [count, step.units.get(kind, 0)] for kind, count in dense.units.items()},
        "heads_after": step.heads,
        "mask": mask,
    }
    if dense.widths:
        result["widths"] = {str(site): [width, step.widths.get(site, 0)] for site, width in dense.widths.items()}
    return {**record, "result": result, "savings": None}


def _after_cycles(run: Path, record: Mapping[str, Any], recovery: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run whose target was reached again in cycles of pruning and training: with the units that the
    last cycle left."""
    rounds, whole = recovery["rounds"], record["result"]
    end = read_run(run / FOLDER / f"round-{len(rounds)}")[0]["result"]
    widths = end.get("widths") or {}
    result = {
        **whole,
        "rule": "",
        "agreement": None,
        "mask": end["mask"],
        "heads_after": end["heads_after"],
        "units": {kind: [whole["units"][kind][0], count] for kind, (_, count) in end["units"].items()},
        "widths": {
            site: [count, widths[site][1]] for site, (count, _) in (whole.get("widths") or {}).items() if site in widths
        },
        "pruned": rounds[-1]["pruned"]["value"],
        "pruned_interval": rounds[-1]["pruned"]["interval"],
    }
    return {**record, "result": result, "savings": None}


def _render(**values: Any) -> str:
    with require("report", "Model cards need"):
        import jinja2
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["md"] = markdown
    template = resources.files("headprune.reports").joinpath("card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(**values)


def _eval_result(record: Mapping[str, Any], task: str, recovery: Mapping[str, Any] | None) -> EvalResult | None:
    """The metric of this model for the model-index, which leaderboards read; None where it was not measured."""
    result, settings = record["result"], record["settings"]
    metric, value = result["metric"], result["pruned"]
    if recovery is not None:
        metric, value = recovery["metric"], recovery["recovered"]["value"]
    data = str(settings.get("data") or "")
    if not task or not data or value is None or not math.isfinite(value):
        return None
    suffix = Path(data).suffix.lower()
    return EvalResult(
        task_type=task,
        dataset_type=(FILE_TYPES.get(suffix, suffix[1:]) or "folder") if _is_file(data) else data,
        dataset_name=Path(data).name if _is_file(data) else data,  # without local folders
        dataset_split=settings.get("split"),
        metric_type=METRIC_TYPES.get(metric, metric),
        metric_name=metric,
        metric_value=value,
    )


def _method(record: Mapping[str, Any]) -> str:
    settings, samples = record["settings"], record["samples"]
    if settings.get("gates"):
        return gate_training.how(record)
    return (
        f"criterion `{settings['criterion']}`, repair `{settings.get('repair', 'none')}`, schedule "
        f"`{settings['schedule']}`, seed {settings['seed']}, {counted(samples['calibration'], 'calibration sample')}, "
        f"{counted(samples['evaluation'], 'evaluation sample')}" + (" (the same ones)" if settings["same_data"] else "")
    )


def _rows(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Units, the metric, the agreement, then what was saved."""
    result, savings = record["result"], record.get("savings")
    metric = result["metric"]
    neurons = (result.get("units") or {}).get("neurons", (0, 0))
    measured = (measured_text(metric, result[side], result.get(f"{side}_interval")) for side in ("dense", "pruned"))
    return [
        ("heads", str(result["heads_before"]), str(result["heads_after"])),
        *([("neurons", f"{neurons[0]:,}", f"{neurons[1]:,}")] if neurons[0] else []),
        (metric, *measured),
        ("agreement with the dense model", "100.00%", value_text("agreement", result["agreement"])),
        *(row[:3] for row in (savings_rows(savings) if savings else ()) if row.what not in KINDS),
    ]


def _notes(record: Mapping[str, Any], table: Sequence[Sequence[str]]) -> list[str]:
    """Explanations of the numbers in the table."""
    notes = ["[low, high]: 95% interval."] if any("[" in cell for row in table for cell in row) else []
    savings = record.get("savings")
    return [" ".join([*notes, *([how_timed(savings)] if savings else [])])] if notes or savings else []


def _recovery(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"how": how(record), "metric": record["metric"], "measured": measured_of(record)}


def _exports(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not records:
        return None
    return {"how": how_exported(records), "columns": columns(records), "cells": rows(records)}


def _heads(result: Mapping[str, Any]) -> list[str]:
    """The removed heads. Zeros of the mask are also heads that were removed before the run and, where sites have
    different numbers of heads, padding: then the kept heads are listed."""
    mask = result["mask"]
    zeros = sum(not kept for row in mask for kept in row)
    word, listed_value = ("Removed", 0) if zeros == result["heads_before"] - result["heads_after"] else ("Kept", 1)
    by_site = {site: [head for head, kept in enumerate(row) if kept == listed_value] for site, row in enumerate(mask)}
    listed = "; ".join(f"{site}: {heads}" for site, heads in by_site.items() if heads)
    return [f"{word} heads, by site, in the original numbering: {listed or 'none'}."]


def _widths(result: Mapping[str, Any]) -> list[str]:
    """The widths of feed-forward layers; which neurons are left is in the config of the model."""
    changed = {site: width for site, width in (result.get("widths") or {}).items() if width[0] != width[1]}
    listed = "; ".join(f"{site}: {after:,} of {before:,}" for site, (before, after) in changed.items())
    return [f"Neurons left, by feed-forward site that lost some: {listed}."] if changed else []


def _is_file(data: str) -> bool:
    """Whether data is a local file or folder and not a data set of the hub."""
    return (
        Path(data).suffix.lower() in (*TABLES, ".txt", ".npz", ".gz") or looks_like_a_path(data) or Path(data).exists()
    )


def _on_hub(name: str) -> bool:
    """Whether this is the name of a model on the hub and not a local folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()
