"""Reports about a training of gates: a description, the command that repeats it, and its figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.config.groups import ComputeOptions, DataOptions, EvaluationOptions, ModelOptions
from headprune.config.option import only, options_of
from headprune.config.training import TrainingOptions
from headprune.display import counted
from headprune.training.gate_config import TARGETS, GateConfig
from headprune.training.gate_journal import FILE, read_lines

if TYPE_CHECKING:
    from headprune.reports.run_view import RunView

ROWS = 160  # gates up to which each has a row; more are shown by site
COLUMNS = 120  # steps in the figure
ROW, WIDTH = 9, 620


def how(record: Mapping[str, Any]) -> str:
    """How gates were trained, as a clause."""
    gates, training = record["settings"]["gates"], record["settings"]["training"]
    target = f"l0 {gates['l0']:g}" if gates["l0"] is not None else _target(gates)
    rate = gates["rate"] * training["learning_rate"]
    return (
        f"learned gates ({target}, setting {gates['setting']}), {counted(training['epochs'], 'epoch')}, learning rate "
        f"{training['learning_rate']:g} (gates {rate:.3g}), seed {training['seed']}, "
        f"{counted(record['samples']['training'], 'training sample')}, "
        f"{counted(record['samples']['evaluation'], 'evaluation sample')}"
    )


def _target(gates: Mapping[str, Any]) -> str:
    name = next(name for name in TARGETS if gates[name] is not None)
    return f"{name} {gates[name]:g}"


def command_words(settings: Mapping[str, Any]) -> list[str]:
    """The command of a run of `train`, without its --out; options at their defaults are left out."""
    gates, training = settings["gates"], settings["training"]
    words = ["headprune", "train", str(settings["model"]), "--data", str(training["data"])]
    for group in (ModelOptions, DataOptions, EvaluationOptions, only(ComputeOptions, "device")):
        for option in options_of(group):
            if option.field not in ("model", "data"):
                words += _option(option.flag, settings.get(option.field), option.default)
    words += _option("--eval-data", training["evaluation"], None)
    defaults_of_gates = {
        **dataclasses.asdict(GateConfig(l0=0.0, setting=gates["setting"])),
        "l0": None,
        "setting": "shim",
    }
    for option in options_of(GateConfig):
        if option.field == "rate":
            words += _option(option.flag, training["gate_rate"], None)
        else:
            words += _option(option.flag, gates.get(option.field), defaults_of_gates[option.field])
    for option in options_of(TrainingOptions):
        words += _option(option.flag, training.get(option.field, option.default), option.default)
    return [*words, *_option("--finetune-epochs", training["finetune_epochs"], 1.0)]


def _option(flag: str, value: Any, default: Any) -> list[str]:
    if value == default or value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)]


def values(run: RunView) -> tuple[list[dict[str, Any]], list[str]]:
    """The cells of the figure, and its rows in order; empty for a run without gates."""
    lines = read_lines(run.path / FILE)
    if len(lines) < 2 or "gates" not in lines[0]:
        return [], []
    gates, steps = lines[0]["gates"], _sample_lines(lines[1:])
    heads = [number for number, (_, kind, _, _) in enumerate(gates) if kind == "heads"]
    single = heads if 0 < len(heads) <= ROWS else []
    rows = {f"{gates[number][0]}.{gates[number][2]}": [number] for number in single}
    for number, (site, kind, _, _) in enumerate(gates):
        if number not in set(single):
            rows.setdefault(f"site {site}, {kind}", []).append(number)
    cells = [
        {
            "step": line["step"],
            "until": steps[index + 1]["step"] if index + 1 < len(steps) else line["step"] + 1,
            "gate": name,
            "open": round(sum(line["open"][number] for number in gates_of_row) / len(gates_of_row), 3),
        }
        for index, line in enumerate(steps)
        for name, gates_of_row in rows.items()
    ]
    return cells, list(rows)


def _sample_lines(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `COLUMNS` lines, with the first and the last."""
    if len(lines) <= COLUMNS:
        return list(lines)
    indices = sorted({round(number * (len(lines) - 1) / (COLUMNS - 1)) for number in range(COLUMNS)})
    return [lines[index] for index in indices]


def figure(run: RunView) -> Any:
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
        title="probability of being open",
        scale=alt.Scale(domain=[0, 1], scheme="viridis"),
        legend=alt.Legend(orient="bottom", gradientLength=200, format="%"),
    )
    return (
        alt.Chart(alt.Data(values=cells))
        .mark_rect()
        .encode(
            x=alt.X(
                "step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False), scale=_step_scale(cells)
            ),
            x2="until:Q",
            y=y,
            color=shade,
            tooltip=["gate:O", alt.Tooltip("step:Q"), alt.Tooltip("open:Q", format=".1%")],
        )
        .properties(
            width=WIDTH,
            height=alt.Step(ROW),
            title=alt.TitleParams("Gate probabilities during training", anchor="start"),
        )
    )


def _step_scale(cells: Sequence[Mapping[str, Any]]) -> Any:
    import altair as alt

    return alt.Scale(domain=[0, max(cell["until"] for cell in cells)], nice=False)
