"""The results of a reproduction: two tables, the figure of the paper, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headprune.extras import require
from headprune.papers.all_attention.plan import PAPER, TECHNIQUES, TITLES, Settings
from headprune.papers.figures import BLUE, VERMILION, apply_style
from headprune.papers.tables import Cell, Table

with require("report", "Figures need"):
    import altair as alt

ResultRow = Mapping[str, Any]  # a row of results.json
KINDS = {
    "dense": "dense",
    "trained on": "dense, trained on",
    "target": "pruned to a share of heads",
    "l0": "pruned by a weight of L0",
    "ablation": "pruned without a technique",
}
SHAPES = {"dense": "circle", "trained on": "diamond", "target": "square", "l0": "triangle-up", "ablation": "cross"}
HEADINGS = (
    "Model",
    "Heads",
    "Parameters outside embeddings",
    "of dense (%)",
    "Loss after removal",
    "Loss",
    "± 95 %",
    "Against dense (%)",
    "Against dense trained on (%)",
    "± 95 % (%)",
)


def tables_of(rows: Sequence[ResultRow], settings: Settings, source: str) -> list[Table]:
    """A table of all rows but the ablation, and one of the ablation with the rows to compare it with."""
    note = f"Loss: nats per byte of held-out text ({source}), after fine-tuning; ± is over windows of that text, "
    note += "and of the difference window by window in the last column."
    main = [row for row in rows if row["kind"] != "ablation"]
    ablation = [
        row
        for row in rows
        if row["model"] == "all-attention"
        and (row["kind"] in ("dense", "trained on", "ablation") or row["what"] == f"keep={settings.ablation}")
    ]
    techniques = ", ".join(TECHNIQUES)
    return [
        Table(
            1,
            f"Loss against size, after {PAPER}: All-attention, and a Transformer whose heads alone are pruned.",
            f"{note} Pruned models and dense ones trained on have had the same steps. Seed {settings.seed}.",
            HEADINGS,
            [cells_of(row, rows) for row in main],
        ),
        Table(
            2,
            f"All-attention pruned to {settings.ablation:.0%} of its heads, without one of the paper's techniques.",
            f"{note} keep={settings.ablation} has all of them: {techniques}. Everything else is equal.",
            HEADINGS,
            [cells_of(row, rows) for row in ablation],
        ),
    ]


def cells_of(row: ResultRow, rows: Sequence[ResultRow]) -> list[Cell]:
    """The cells of a row in the tables; percentages are relative to the dense rows among `rows`."""
    dense, trained_on = _of(rows, row["model"], "dense"), _of(rows, row["model"], "trained on")
    before_tuning, difference_interval = row.get("loss_before_tuning"), row.get("behind_interval")
    return [
        f"{TITLES[row['model']]}: {row['what']}",
        row["heads"],
        row["parameters"],
        f"{100 * row['parameters'] / dense['parameters']:.1f}",
        None if before_tuning is None else f"{before_tuning:.4f}",
        f"{row['loss']:.4f}",
        f"{row['interval']:.4f}",
        _percent(row, dense),
        _percent(row, trained_on),
        None if difference_interval is None else f"{100 * difference_interval / trained_on['loss']:.2f}",
    ]


def _percent(row: ResultRow, reference: ResultRow) -> str | None:
    return None if row is reference else f"{100 * (row['loss'] / reference['loss'] - 1):+.2f}"


def _of(rows: Sequence[ResultRow], model: str, kind: str) -> ResultRow:
    return next(row for row in rows if row["model"] == model and row["kind"] == kind)


def figure_of(rows: Sequence[ResultRow], source: str) -> alt.TopLevelMixin:
    """Loss against parameters outside embeddings: a line through the shares of heads, and points for all rows."""
    points = [
        {
            "parameters": row["parameters"],
            "loss": row["loss"],
            "model": TITLES[row["model"]],
            "kind": KINDS[row["kind"]],
            "what": row["what"],
            "line": row["kind"] in ("trained on", "target"),
        }
        for row in rows
    ]
    colour = alt.Color(
        "model:N",
        scale=alt.Scale(domain=list(TITLES.values()), range=[BLUE, VERMILION]),
        legend=alt.Legend(title=None, symbolType="stroke", symbolSize=500, symbolStrokeWidth=3, labelLimit=300),
    )
    shape = alt.Shape(
        "kind:N",
        scale=alt.Scale(domain=list(KINDS.values()), range=[SHAPES[kind] for kind in KINDS]),
        legend=alt.Legend(title=None, labelLimit=300),
    )
    x = alt.X(
        "parameters:Q",
        title="Parameters outside embeddings",
        scale=alt.Scale(zero=False, padding=20),
        axis=alt.Axis(format="~s", grid=False, tickCount=6),
    )
    y = alt.Y("loss:Q", title="Validation loss (nats per byte)", scale=alt.Scale(zero=False, padding=20))
    lines = alt.Chart(alt.InlineData(values=[point for point in points if point["line"]])).mark_line(strokeWidth=2)
    marks = alt.Chart(alt.InlineData(values=points)).mark_point(filled=True, size=70, opacity=0.9)
    return apply_style(
        alt.layer(lines.encode(x, y, color=colour), marks.encode(x, y, color=colour, shape=shape)).properties(
            title=alt.TitleParams(
                "Validation loss against size, heads pruned by learned gates",
                subtitle=f"Lines join models that have had the same steps. Text: {source}.",
                fontSize=16,
            ),
            width=520,
            height=320,
        )
    )


def sentence_of(rows: Sequence[ResultRow], settings: Settings) -> str:
    """A sentence about the result at the share of heads of the ablation."""
    dense, trained_on = (_of(rows, "all-attention", kind) for kind in ("dense", "trained on"))
    row = next(r for r in rows if r["model"] == "all-attention" and r["what"] == f"keep={settings.ablation}")
    heads, size = (100 * (1 - row[key] / dense[key]) for key in ("heads", "parameters"))
    return (
        f"All-attention with {heads:.1f} % fewer heads has {size:.1f} % fewer parameters outside embeddings and a loss "
        f"of {row['loss']:.4f}: {_percent(row, dense)} % against dense, {_percent(row, trained_on)} % against dense "
        "trained for as many steps."
    )
