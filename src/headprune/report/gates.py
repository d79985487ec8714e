"""What a training of gates was asked for and did: its words, the command that repeats it, and its picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.gates.config import TARGETS, GateConfig
from headprune.gates.journal import FILE, read_lines
from headprune.recovery.config import TrainConfig
from headprune.search.config import Experiment

if TYPE_CHECKING:
    from headprune.report.loading import ReportRun

ROWS = 160  # gates that have a row of their own; more are shown by site
COLUMNS = 120  # steps that are shown
ROW, WIDTH = 9, 620


def how(record: Mapping[str, Any]) -> str:
    """How gates were trained, as a part of a sentence."""
    gates, training = record["settings"]["gates"], record["settings"]["training"]
    asked = f"l0 {gates['l0']:g}" if gates["l0"] is not None else _target(gates)
    rate = gates["rate"] * training["learning_rate"]
    return (
        f"learned gates ({asked}, setting {gates['setting']}), epochs: {training['epochs']:g}, learning rate "
        f"{training['learning_rate']:g} (gates {rate:.3g}), seed {training['seed']}, "
        f"{record['samples']['training']:,} training samples, {record['samples']['evaluation']:,} evaluation samples"
    )


def _target(gates: Mapping[str, Any]) -> str:
    name = next(name for name in TARGETS if gates[name] is not None)
    return f"{name} {gates[name]:g}"


def command_words(settings: Mapping[str, Any]) -> list[str]:
    """The command of a run of `train`, without its --out; options at their defaults are left out."""
    gates, training = settings["gates"], settings["training"]
    words = ["headprune", "train", str(settings["model"]), "--data", str(training["data"])]
    reading = {f.name: f.default for f in dataclasses.fields(Experiment)}
    names = ("text_column", "pair_column", "label_column", "context_column", "choices_column", "split")
    for name in (*names, "metric", "task", "max_length", "processor", "device"):
        words += _option(name, settings.get(name), reading[name])
    if training["evaluation"] is not None:
        words += ["--evaluation", str(training["evaluation"])]
        words += _option("evaluation_samples", settings.get("evaluation_samples"), None)
    else:
        words += ["--evaluation-samples", str(settings["evaluation_samples"])]
    usual = dataclasses.asdict(GateConfig(l0=0.0, setting=gates["setting"]))
    for name, value in gates.items():
        if name == "rate":
            words += _option("gate_rate", training["gate_rate"], None)
        elif name == "setting":
            words += _option(name, value, "shim")
        else:
            words += _option({"warmup": "gate_warmup"}.get(name, name), value, None if name == "l0" else usual[name])
    for field in dataclasses.fields(TrainConfig):
        words += _option(field.name, training.get(field.name, field.default), field.default)
    return [*words, *_option("finetune_epochs", training["finetune_epochs"], 1.0)]


def _option(name: str, value: Any, usual: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value == usual or value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]


def values(run: ReportRun) -> tuple[list[dict[str, Any]], list[str]]:
    """Cells of the picture, and its rows in their order; nothing for a run without gates."""
    lines = read_lines(run.path / FILE)
    if len(lines) < 2 or "gates" not in lines[0]:
        return [], []
    whose, steps = lines[0]["gates"], _some(lines[1:])
    heads = [number for number, (_, kind, _, _) in enumerate(whose) if kind == "heads"]
    single = heads if 0 < len(heads) <= ROWS else []
    rows = {f"{whose[number][0]}.{whose[number][2]}": [number] for number in single}
    for number, (site, kind, _, _) in enumerate(whose):
        if number not in set(single):
            rows.setdefault(f"site {site}, {kind}", []).append(number)
    cells = [
        {
            "step": line["step"],
            "until": steps[place + 1]["step"] if place + 1 < len(steps) else line["step"] + 1,
            "gate": name,
            "open": round(sum(line["open"][number] for number in own) / len(own), 3),
        }
        for place, line in enumerate(steps)
        for name, own in rows.items()
    ]
    return cells, list(rows)


def _some(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many of them, the first and the last among them."""
    if len(lines) <= COLUMNS:
        return list(lines)
    places = sorted({round(number * (len(lines) - 1) / (COLUMNS - 1)) for number in range(COLUMNS)})
    return [lines[place] for place in places]


def figure(run: ReportRun) -> Any:
    """How open each gate was over the steps of the training; None for a run without gates."""
    from headprune.extras import require

    cells, order = values(run)
    if not cells:
        return None
    with require("report", "Figures need"):
        import altair as alt

    y = alt.Y("gate:O", sort=order, title="gate", axis=alt.Axis(labelOverlap=True, labelFontSize=8))
    shade = alt.Color(
        "open:Q",
        title="open with probability",
        scale=alt.Scale(domain=[0, 1], scheme="viridis"),
        legend=alt.Legend(orient="bottom", gradientLength=200, format="%"),
    )
    return (
        alt.Chart(alt.Data(values=cells))
        .mark_rect()
        .encode(
            x=alt.X("step:Q", title="step of training", axis=alt.Axis(tickMinStep=1, grid=False), scale=_tight(cells)),
            x2="until:Q",
            y=y,
            color=shade,
            tooltip=["gate:O", alt.Tooltip("step:Q"), alt.Tooltip("open:Q", format=".1%")],
        )
        .properties(
            width=WIDTH, height=alt.Step(ROW), title=alt.TitleParams("How gates learn to close", anchor="start")
        )
    )


def _tight(cells: Sequence[Mapping[str, Any]]) -> Any:
    import altair as alt

    return alt.Scale(domain=[0, max(cell["until"] for cell in cells)], nice=False)
