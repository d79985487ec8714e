"""Reports about a recovery: the metric of the dense, pruned and recovered model, and the losses of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headprune.display import counted
from headprune.reports.format import measured_text
from headprune.reports.run_view import RunView
from headprune.run_folder.recovery import FOLDER, read_recovery
from headprune.snippets.checkpoints import load_line

LOSSES = {
    "loss": "total",
    "task_loss": "task",
    "logits_loss": "distillation of logits",
    "hidden_loss": "of hidden states",
}
WIDTH, HEIGHT = 620, 240
NO_VALUE = "\u2013"


def recovery_of(run: RunView) -> dict[str, Any] | None:
    """The record of a run's recovery; None where there is none, or where it started from another model than the run has
    now."""
    record = None if run.result is None else read_recovery(run.path)
    return record if record is not None and record["of"] == origin(run.record) else None


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values that identify the result of a run for its recovery."""
    return {name: record["result"].get(name) for name in ("step", "metric", "dense", "pruned", "heads_after")}


def section(run: RunView, record: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a page: a table, a description, and cycles where there were any."""
    metric = record["metric"]
    rounds = [
        (str(number), entry["left"], _measured(metric, entry["pruned"]), _measured(metric, entry["recovered"]))
        for number, entry in enumerate(record.get("rounds") or [], start=1)
    ]
    return {
        "name": run.name,
        "metric": metric,
        "rows": list(measured_of(record).items()),
        "rounds": rounds,
        "how": how(record),
        "load": load_line(f"{run.path_text}/{FOLDER}/model"),
        "chart": bool(record.get("history")),
    }


def how(record: Mapping[str, Any]) -> str:
    """One or two sentences on how a model was recovered."""
    settings = record["settings"]
    has_teacher = settings["distill"] > 0 or settings["hidden"] > 0
    labels = any("task_loss" in entry for entry in record.get("history") or [])
    sources = [*(["labels"] if labels else []), *(["the dense model"] if has_teacher else [])]
    weights = f"LoRA of rank {settings['lora']}" if settings["lora"] else "all weights"
    cycles = len(record.get("rounds") or [])
    in_cycles = f", in {counted(cycles, 'cycle')} of pruning and training" if cycles else ""
    samples, steps = counted(record["samples"]["training"], "sample"), counted(record["steps"], "step")
    best = record["best_step"]
    if best == record["steps"]:
        kept = f"Kept the model after the last of its {steps}."
    elif best:
        kept = f"Kept the model after step {best} of {record['steps']}, which was the best on held-out training rows."
    else:
        kept = (
            f"Kept the model as it was before training: on held-out training rows, no evaluation during its {steps} "
            "was better."
        )
    return (
        f"Trained {weights} on {samples} from {' and '.join(sources)}{in_cycles}: "
        f"{counted(settings['epochs'], 'epoch')}, learning rate {settings['learning_rate']:g}, seed "
        f"{settings['seed']}. {kept}"
    )


def losses(record: Mapping[str, Any]) -> Any:
    """The weighted losses over the steps of a training; cycles follow one after the other."""
    from headprune.extras import require

    with require("report", "Figures need"):
        import altair as alt
    from headprune.reports.figures import PALETTE

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
            x=alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=True)),
            color=alt.Color("part:N", title=None, scale=colours, legend=legend),
            tooltip=[alt.Tooltip("part:N"), alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4g")],
        )
        .properties(width=WIDTH, height=HEIGHT, title=alt.TitleParams("Training loss during recovery", anchor="start"))
    )


def measured_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The metric of the dense, the pruned and the recovered model, each with its interval."""
    names = [name for name in ("dense", "pruned", "recovered") if record.get(name)]
    return {name: _measured(record["metric"], record[name]) for name in names}


def _measured(metric: str, value: Mapping[str, Any]) -> str:
    interval: Sequence[float | None] | None = value.get("interval")
    return measured_text(metric, value.get("value"), interval, NO_VALUE)
