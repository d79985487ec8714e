"""Tables and curves in terminals of any width, whatever the numbers."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

import headprune
from headprune.cli.inspection_table import print_inspection
from headprune.cli.progress import Display, LiveCurve
from headprune.cli.score_map import print_scores
from headprune.measure.inspection import inspect
from headprune.measure.intervals import wilson
from headprune.reports.run_view import load_runs
from headprune.reports.scores import write_scores
from synthetic_runs import make_run
from zoo import ZOO


@pytest.mark.parametrize("width", [120, 80, 60])
def test_an_inspection_is_whole_on_a_narrow_terminal(width: int) -> None:
    """Headings and numbers are never cut; of paths, all letters are there."""
    config = transformers.BartConfig(
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 16),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8),
        d_model=32,
        vocab_size=30,
    )
    with torch.device("meta"):
        model = transformers.BartModel(config)
    text = io.StringIO()
    print_inspection("a/name", inspect(model), Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in text.getvalue()
    heading = next(line for line in lines if "site" in line and "path" in line)
    assert heading.split() == ["site", "path", "kind", "heads", "KV", "width", "uses"]
    column = slice(heading.index("path"), heading.index("kind"))
    start = lines.index(heading) + 2
    written = "".join(line[column].strip() for line in lines[start : lines.index("", start) if "" in lines else None])
    for site in inspect(model).sites:
        assert site.path in written
    assert text.getvalue().count("16 / 16") == 3


def test_a_live_curve_of_values_that_are_no_numbers(tmp_path: Path) -> None:
    known = load_runs([make_run(tmp_path / "known", values=[0.9, *[math.nan] * 12])])[0].steps
    curve = LiveCurve("x", Display(Console(file=io.StringIO()), None))
    curve.steps = known
    assert len(curve.curve()) == 11
    assert "metric nan (dense 0.9000)" in curve.status().plain
    sure = load_runs([make_run(tmp_path / "sure", values=[0.9] * 13, samples=100)])[0].steps
    curve.steps = sure
    low, high = wilson(90, 100)
    assert f"metric 0.9000 \u00b1 {(high - low) / 2:.2g} (dense" in curve.status().plain


def test_a_training_is_a_line_now_and_then_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO())
    curve = LiveCurve("x", Display(console, None))
    entry = {"loss": 0.51239, "step": 3, "steps": 9}
    curve.log(entry)  # too soon
    curve.display.printed -= 11
    curve.log({"epoch": 1.0, "step": 4, "steps": 9})  # nothing that is shown
    curve.log(entry)
    curve.log({**entry, "step": 5})  # too soon again
    curve.display.printed -= 11
    curve.log({"eval_metric": 0.75, "metric": "accuracy", "step": 6, "steps": 9})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "Training: step 3 of 9, loss 0.5124",
        "Training: step 6 of 9, loss 0.5124, accuracy 0.75 on held-out data at step 6",
    ]


@pytest.mark.parametrize(("width", "cell"), [(160, 3), (80, 2), (50, 1)])
def test_scores_fit_the_terminal(width: int, cell: int) -> None:
    """Thirty-two heads in a row: every one has its place, however narrow."""
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64,
            num_attention_heads=32,
            num_hidden_layers=2,
            intermediate_size=8,
            image_size=4,
            patch_size=2,
            num_labels=2,
        )
    )
    torch.manual_seed(0)
    images = torch.randn(6, 3, 4, 4)
    with torch.no_grad():
        labels = model(pixel_values=images).logits.argmax(-1)
    labels[0] = 1 - labels[0]
    result = headprune.score(model, [{"pixel_values": images, "labels": labels}], criterion="magnitude")
    text = io.StringIO()
    print_scores(model, "magnitude", result, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.removeprefix(f"site {site}") for site, line in enumerate(lines[2:4])]
    assert [len(row) for row in rows] == [32 * cell] * 2
    numbers = [(place.end(), int(place.group())) for place in re.finditer(r"\d+", lines[1])]
    assert len(numbers) > 5
    for end, number in numbers:  # a number ends above the cell of its head
        assert end == len("site 0") + cell * (number + 1)
    low, high = wilson(5, 6)
    assert "6 samples, 30 positions, " in text.getvalue()  # four patches and the class token of six images
    said = f"accuracy of the model as it is: 83.33% [{100 * low:.1f}, {100 * high:.1f}]"
    assert said in " ".join(text.getvalue().split())


def test_scores_of_neurons_are_deciles_of_their_layers(tmp_path: Path) -> None:
    model = ZOO["bert"].build()
    result = headprune.score(model, criterion="magnitude", units="heads,neurons")
    text = io.StringIO()
    print_scores(model, "magnitude", result, Console(file=text, width=100))
    neurons = [site for site in result.sites if site.kind == "neurons"]
    assert text.getvalue().count("the least to the most important") == len(neurons)
    assert text.getvalue().count("least important (site, neuron)") == 1
    assert text.getvalue().count("least important (site, head)") == 1
    only = io.StringIO()
    alone = headprune.score(model, criterion="magnitude", units="neurons")
    print_scores(model, "magnitude", alone, Console(file=only, width=100))
    assert "(site, head)" not in only.getvalue()
    write_scores("magnitude", result, tmp_path / "scores.csv")
    first, *rows = (tmp_path / "scores.csv").read_text().splitlines()
    assert first == "site,unit,path,score"
    assert len(rows) == sum(site.original for site in result.sites)
    write_scores("magnitude", result, tmp_path / "scores.svg")
    assert "Scores of neurons by magnitude" in (tmp_path / "scores.svg").read_text()
