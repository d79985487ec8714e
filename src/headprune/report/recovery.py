"""What a recovery did, for reports and model cards: dense, pruned, recovered, and the losses on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.report.loading import ReportRun
from headprune.report.words import measured_text

FOLDER, RECORD = "finetuned", "finetune.json"  # of a run, and in there
LOSSES = {"loss": "all", "task_loss": "task", "logits_loss": "predictions", "hidden_loss": "hidden states"}
WIDTH, HEIGHT = 620, 240
NOTHING = "\u2013"


def recovery_of(run: ReportRun) -> dict[str, Any] | None:
    """The record of a run's recovery; None where there is none, or where it began from another model than the run now
    has."""
    try:
        record = json.loads((run.path / FOLDER / RECORD).read_text(encoding="utf-8"))
        fits = "recovered" in record and record["of"] == origin(run.record)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if fits else None


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a recovery knows a run's result by."""
    return {name: record["result"].get(name) for name in ("step", "metric", "dense", "pruned", "heads_after")}


def section(run: ReportRun, record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a page: a table, how it was made, and rounds where there were any."""
    metric = record["metric"]
    rounds = [
        (str(number), one["left"], _measured(metric, one["pruned"]), _measured(metric, one["recovered"]))
        for number, one in enumerate(record.get("rounds") or [], start=1)
    ]
    return {
        "name": run.name,
        "metric": metric,
        "rows": list(measured_of(record).items()),
        "rounds": rounds,
        "how": how(record),
        "load": f"model = headprune.load({json.dumps(f'{run.place}/{FOLDER}/model')})",
        "chart": bool(record.get("history")),
    }


def how(record: Mapping[str, Any]) -> str:
    """One or two sentences on how a model was recovered."""
    settings = record["settings"]
    taught = settings["distill"] > 0 or settings["hidden"] > 0
    labels = any("task_loss" in entry for entry in record.get("history") or [])
    sources = [*(["labels"] if labels else []), *(["the dense model"] if taught else [])]
    what = f"LoRA of rank {settings['lora']}" if settings["lora"] else "all weights"
    turns = len(record.get("rounds") or [])
    between = f", in {turns} rounds of pruning and training" if turns else ""
    best = record["best_step"]
    kept = "the last" if best == record["steps"] else f"the best, {best}" if best else "none, as no step was better"
    return (
        f"Trained {what} on {record['samples']['training']:,} samples from {' and '.join(sources)}{between}: "
        f"{settings['epochs']:g} epochs, learning rate {settings['learning_rate']:g}, seed {settings['seed']}. "
        f"Kept of its {record['steps']} steps: {kept}."
    )


def losses(record: Mapping[str, Any]) -> Any:
    """The losses over the steps of a training, as they were weighted; rounds stand one after the other."""
    from headprune.extras import require

    with require("report", "Figures need"):
        import altair as alt
    from headprune.report.figures import PALETTE

    rows = [
        {"step": entry["step"], "loss": entry[name], "part": word}
        for entry in record["history"]
        for name, word in LOSSES.items()
        if entry.get(name) is not None
    ]
    parts = [word for word in LOSSES.values() if any(row["part"] == word for row in rows)]
    colours = alt.Scale(domain=parts, range=PALETTE[: len(parts)])
    legend = alt.Legend(orient="bottom", columns=2, symbolType="stroke", symbolSize=300, symbolStrokeWidth=3)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=1.6)
        .encode(
            x=alt.X("step:Q", title="step of training", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=True)),
            color=alt.Color("part:N", title=None, scale=colours, legend=legend),
            tooltip=[alt.Tooltip("part:N"), alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4g")],
        )
        .properties(width=WIDTH, height=HEIGHT, title=alt.TitleParams("Loss while the model recovers", anchor="start"))
    )


def measured_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The metric of the dense, the pruned and the recovered model, each with its interval."""
    names = [name for name in ("dense", "pruned", "recovered") if record.get(name)]
    return {name: _measured(record["metric"], record[name]) for name in names}


def _measured(metric: str, found: Mapping[str, Any]) -> str:
    between: Sequence[float | None] | None = found.get("interval")
    return measured_text(metric, found.get("value"), between, NOTHING)
