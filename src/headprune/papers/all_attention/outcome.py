"""The results of a reproduction: its tables, the figure of the paper, and a sentence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.extras import require
from headprune.papers.all_attention.plan import CRITERIA, PAPER, TECHNIQUES, TITLES
from headprune.papers.all_attention.summary import format_spread
from headprune.papers.figures import BLUE, VERMILION, apply_style
from headprune.papers.tables import Cell, Table

with require("report", "Figures need"):
    import altair as alt

Results = Mapping[str, Any]  # of results.json
SummaryRow = Mapping[str, Any]  # one of its rows
KINDS = {
    "dense": "dense",
    "trained on": "dense, trained on",
    "target": "pruned to a share of heads",
    "l0": "pruned by a weight of L0",
}
SHAPES = {"dense": "circle", "trained on": "diamond", "target": "square", "l0": "triangle-up"}
HEADINGS = (
    "model",
    "heads",
    "parameters outside embeddings",
    "of dense (%)",
    "loss",
    "against dense (%)",
    "against dense, trained on (%)",
)


def tables_of(results: Results) -> list[Table]:
    """Loss against size, the techniques of the paper, gates against criteria, speeds, and the paper's sizes."""
    rows, settings = results["rows"], results["settings"]
    seeds = results["seeds"]
    over = f"means over the seeds {', '.join(map(str, seeds))} with the standard deviation"
    over = over if len(seeds) > 1 else f"of seed {seeds[0]}"
    note = f"Losses are nats per byte of held-out text ({results['text']['name']}), {over}; percentages compare models "
    note += "of the same seed."
    keep = f"keep={settings['ablation']}"
    main = [row for row in rows if row["kind"] in KINDS]
    ablation = [row for row in rows if row["kind"] == "ablation" or _is(row, keep)]
    compared = [f"keep={share}" for share in settings["compared"]]
    criteria = [
        row
        for share in compared
        for row in rows
        if _is(row, share) or (row["kind"].startswith("criterion") and f" {share}" in row["what"])
    ]
    timed = [row for row in rows if "speed" in row]
    return [
        Table(
            1,
            f"Loss against size, after {PAPER}: All-attention, and a Transformer whose heads alone are pruned.",
            f"{note} Pruned models and dense ones trained on have had the same steps.",
            HEADINGS,
            [cells_of(row) for row in main],
        ),
        Table(
            2,
            f"All-attention pruned to {settings['ablation']:.0%} of its heads, with one setting of the gates changed.",
            f"{note} {keep} has {', '.join(TECHNIQUES)} (of {settings['warmup']:.0%} of the steps with gates).",
            ("gates", "loss after removal", "loss", "against dense, trained on (%)"),
            [
                [
                    row["what"],
                    format_spread(row["loss_before_tuning"], ".4f"),
                    format_spread(row["loss"], ".4f"),
                    format_spread(row["percent_to_trained_on"], "+.2f"),
                ]
                for row in ablation
            ],
        ),
        Table(
            3,
            "All-attention: heads removed by gates and by criteria, as many and with as many steps.",
            f"{note} Criteria choose heads after the {settings['gate_steps']} steps that gates learn in, and then all "
            f"are fine-tuned for the same {settings['tuning_steps']}; removed first: before both. "
            f"Criteria: {', '.join(CRITERIA)}; the default is that of `headprune prune`, repair included.",
            ("heads chosen by", "heads", "loss after removal", "loss", "against gates", "95 % over the text"),
            [_criterion_cells(row) for row in criteria],
        ),
        Table(
            4,
            "Speed of the pruned models against the dense one, in one run per seed in which all take turns.",
            f"Forward passes of {settings['batch']} windows of {settings['context']} bytes with "
            f"{results['threads']} thread; medians of {results['turns']} turns with their 95 % intervals.",
            ("model", "heads", "milliseconds", "times as fast"),
            [_speed_cells(row) for row in timed],
        ),
        Table(
            5,
            "The sizes of the paper, in parameters outside embeddings.",
            "Our class in the authors' configuration (16 layers of 8 heads, width 512, 2,048 persistent vectors), and "
            "what their layers have besides: maps of positions, biases of queries and of output maps.",
            ("heads", "published", "our class", "besides", "sum", "sum to published (%)"),
            [
                [
                    row["heads"],
                    f"{row['published_millions']} M",
                    row["counted"],
                    row["relative_positions"],
                    row["total"],
                    f"{row['percent_to_published']:+.2f}",
                ]
                for row in results["sizes"]
            ],
        ),
    ]


def _is(row: SummaryRow, what: str) -> bool:
    return row["model"] == "all-attention" and row["what"] == what


def cells_of(row: SummaryRow) -> list[Cell]:
    """The cells of a row of the first table."""
    trained_on = row.get("percent_to_trained_on")
    return [
        f"{TITLES[row['model']]}: {row['what']}",
        _counts(row["heads"]),
        _counts(row["parameters"]),
        format_spread(row["of_dense"], ".1f"),
        format_spread(row["loss"], ".4f"),
        format_spread(row.get("percent_to_dense"), "+.2f"),
        format_spread(trained_on, "+.2f"),
    ]


def _criterion_cells(row: SummaryRow) -> list[Cell]:
    text = row.get("behind_gates_interval")
    return [
        row["what"] if "behind_gates" in row else f"gates, {row['what']}",
        _counts(row["heads"]),
        format_spread(row["loss_before_tuning"], ".4f"),
        format_spread(row["loss"], ".4f"),
        format_spread(row.get("behind_gates"), "+.4f"),
        None if text is None else " / ".join(f"± {half:.4f}" for half in text),
    ]


def _speed_cells(row: SummaryRow) -> list[Cell]:
    return [
        f"{TITLES[row['model']]}: {row['what']}",
        _counts(row["heads"]),
        " / ".join(f"{speed['milliseconds']:.1f}" for speed in row["speed"]),
        " / ".join(f"{s['speedup']:.2f} [{s['interval'][0]:.2f}, {s['interval'][1]:.2f}]" for s in row["speed"]),
    ]


def _counts(value: int | Sequence[int]) -> Cell:
    return value if isinstance(value, int) else " / ".join(f"{each:,}" for each in value)


def _middle(value: int | Sequence[int]) -> float:
    return value if isinstance(value, int) else statistics.fmean(value)


def figure_of(results: Results) -> alt.TopLevelMixin:
    """Loss against parameters outside embeddings: a line through the shares of heads, and points for all rows."""
    source = results["text"]["name"]
    points = [
        {
            "parameters": _middle(row["parameters"]),
            "loss": row["loss"]["mean"],
            "model": TITLES[row["model"]],
            "kind": KINDS[row["kind"]],
            "what": row["what"],
            "line": row["kind"] in ("trained on", "target"),
        }
        for row in results["rows"]
        if row["kind"] in KINDS
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


def sentence_of(results: Results) -> str:
    """A sentence about the result at the share of heads of the ablation."""
    rows = results["rows"]
    dense = next(row for row in rows if _is(row, "dense"))
    row = next(row for row in rows if _is(row, f"keep={results['settings']['ablation']}"))
    heads = 100 * (1 - row["heads"] / dense["heads"])
    return (
        f"All-attention with {heads:.1f} % fewer heads has {100 - row['of_dense']['mean']:.1f} % fewer parameters "
        f"outside embeddings and a loss of {format_spread(row['loss'], '.4f')}: "
        f"{format_spread(row['percent_to_dense'], '+.2f')} % against dense, "
        f"{format_spread(row['percent_to_trained_on'], '+.2f')} % against dense trained for as many steps."
    )
