"""Prints the forecast of `inspect --plan`: memory and passes of each schedule."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from headprune.cli.options import print_json
from headprune.cli.table_style import LEAN
from headprune.display import counted
from headprune.measure.costs import total_parameters
from headprune.runs.loading import dtype_named
from headprune.search.forecast import Calibration, Need, forecast, tokens_in

GIGABYTE = 1e9
BATCH = 32


def show_plan(
    name: str,
    model: PreTrainedModel,
    samples: int,
    evaluation: int | None,
    max_length: int,
    batch_size: int | None,
    dtype: str,
    *,
    as_json: bool,
) -> None:
    """Print the forecast; by default there are as many `evaluation` samples as calibration samples."""
    length = tokens_in(model, max_length)
    data = Calibration(samples, length, batch_size or BATCH, evaluation or samples, dtype_named(dtype))
    needs = forecast(model, data)
    if as_json:
        data_json = {"samples": samples, "evaluation": data.evaluation, "length": length, "batch_size": data.batch_size}
        model_json = {"model_type": model.config.model_type, "parameters": total_parameters(model)}
        print_json({**model_json, "data": {**data_json, "dtype": dtype}, "plan": [need.to_json() for need in needs]})
    else:
        print_plan(name, model, data, dtype, needs)


def print_plan(
    name: str,
    model: PreTrainedModel,
    data: Calibration,
    dtype: str,
    needs: Sequence[Need],
    console: Console | None = None,
) -> None:
    console = console or Console()
    table = Table(
        title=f"{name}: {total_parameters(model):,} parameters in {dtype}",
        title_justify="left",
        caption="GB: peak memory, in that phase · passes: over the calibration data, a backward pass counts as two",
        caption_justify="left",
        **LEAN,
    )
    for heading in ("schedule", "GB", "phase", "most of it", "steps", "passes a step", "passes"):
        table.add_column(heading, justify="right" if heading in ("GB", "steps", "passes a step", "passes") else "left")
    for need in needs:
        largest = sorted(need.terms, key=lambda term: need.terms[term], reverse=True)[:3]
        most = ", ".join(f"{term} {need.terms[term] / GIGABYTE:.1f}" for term in largest)
        numbers = (f"{need.steps:,}", f"{need.per_step:.1f}", f"{need.forwards:,.0f}")
        table.add_row(need.schedule, f"{need.memory / GIGABYTE:.1f}", need.phase, most, *numbers)
    console.print(table)
    console.print(
        f"For {counted(data.samples, 'sample')} of {counted(data.length, 'token')} in batches of {data.batch_size}, "
        f"and {data.evaluation} to evaluate on after every step. Steps of greedy and one-shot are those to the last "
        "head.",
        highlight=False,
    )
