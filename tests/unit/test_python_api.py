"""What Python has beside the command line: data, comparisons, reports, frames, charts, bars, and `prune_heads`."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from test_extras import without
from tqdm import std as tqdm_bars

import headprune
from headprune.errors import CriterionError, DataError, HeadSelectionError, StudyError, UnsupportedModelError
from headprune.measure.curves import shares
from helpers import outputs
from run_helpers import COLOURS, ROWS, classifier, material, prune_command, steps_of, tokenizer
from run_helpers import headprune as program
from score_helpers import labelled
from zoo import BERT, ZOO


def labelled_batches(model: Any) -> list[dict[str, torch.Tensor]]:
    return headprune.load_examples(model, material().data_csv, processor=material().bert).batches(12)


# --- data ------------------------------------------------------------------------------------------------------------


def test_examples_are_those_of_the_command_line() -> None:
    m = material()
    model = headprune.load(m.bert)
    expected = [line.split(",") for line in Path(m.data_csv).read_text().splitlines()[1:]]
    for examples in (
        headprune.load_examples(model, m.data_csv),
        headprune.load_examples(m.bert, m.data_csv),
        headprune.load_examples(m.bert, Path(m.data_tsv), columns=headprune.Columns(text="text", label="label")),
        headprune.load_examples(classifier(), m.data_csv, processor=tokenizer()),
    ):
        assert isinstance(examples, headprune.Examples)
        assert len(examples) == ROWS
        for row, (text, label) in zip(examples.rows, expected, strict=True):
            assert row["input_ids"].tolist() == tokenizer()(text)["input_ids"]
            assert COLOURS[int(row["labels"])] == label
    with pytest.raises(DataError, match="does not say where its tokenizer"):
        headprune.load_examples(classifier(), m.data_csv)


def test_a_run_is_a_model_too(tmp_path: Path) -> None:
    m = material()
    assert program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "6")).code == 0
    of_run, of_model = (headprune.load_examples(place, m.data_csv) for place in (tmp_path / "run", m.bert))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(of_run.rows, of_model.rows, strict=True))


# --- comparisons and reports -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> headprune.CompareResult:
    m, out = material(), tmp_path_factory.mktemp("compared") / "runs"
    options = {"calibration_samples": 8, "batch_size": 6, "every": 4}
    return headprune.compare(m.bert, m.data_csv, ["gnorm", "random"], out=out, trials=2, **options)


def test_a_comparison_is_that_of_the_command_line(compared: headprune.CompareResult, tmp_path: Path) -> None:
    m, out = material(), tmp_path / "runs"
    words = ["--criteria", "gnorm,random", "--trials", "2", "--calibration-samples", "8", "--batch-size", "6"]
    done = program("compare", m.bert, "--data", m.data_csv, *words, "--every", "4", "--out", out, "--json")
    assert done.code == 0
    assert compared.to_json()["criteria"] == done.json["criteria"]
    written = json.loads((compared.out / "comparison.json").read_text())
    assert list(compared.verdict) == written["verdict"]
    assert (compared.out / "report.html").is_file()
    assert compared.best == written["criteria"][0]["name"]
    journal = steps_of(out / "gnorm")
    (curve,) = compared.curves["gnorm"]
    assert [step.metric for step in curve] == [line["metric"] for line in journal]
    assert len(compared.curves["random"]) == 2


def test_a_finished_comparison_is_read(compared: headprune.CompareResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.runs.studies.run_study.run_experiment", None)  # nothing runs
    m = material()
    options = {"calibration_samples": 8, "batch_size": 6, "every": 4}
    again = headprune.compare(m.bert, m.data_csv, "gnorm,random", out=compared.out, trials=2, **options)
    assert again.to_json() == compared.to_json()


def test_a_comparison_shows_itself(compared: headprune.CompareResult) -> None:
    frame = compared.to_frame()
    assert len(frame) == sum(len(steps) for trials in compared.curves.values() for steps in trials)
    mine = frame[frame["criterion"] == "gnorm"]
    (curve,) = compared.curves["gnorm"]
    assert mine["metric"].tolist() == [step.metric for step in curve]
    assert mine["removed"].tolist() == shares(curve)
    chart = compared.plot().to_dict()
    drawn = [row for layer in chart["layer"] for row in layer.get("data", {}).get("values", ()) if "step" in row]
    assert {row["trial"] for row in drawn} == set(frame["run"])
    page = compared._repr_html_()
    assert all(f">{row.name}</td>" in page for row in compared.rows)
    assert compared.verdict[0] in page
    assert "best first" in repr(compared)


def test_a_comparison_at_a_budget(tmp_path: Path) -> None:
    m = material()
    options = {"calibration_samples": 8, "batch_size": 6, "units": "heads"}
    criteria = ["residual-error", "random"]
    result = headprune.compare(m.bert, m.data_csv, criteria, out=tmp_path, keep_parameters=0.9, **options)
    assert {row.name for row in result.rows} == {"residual-error", "random"}
    assert all(trials[0][-1].parameters <= 0.9 * trials[0][0].parameters for trials in result.curves.values())
    assert "<table>" in result._repr_html_()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": 0.5}, "compare has no option 'keep'"),
        ({"calibration_sample": 3}, "did you mean 'calibration_samples'"),
        ({"batch_size": "many"}, "batch_size is a whole number"),
        ({"trials": 0}, "trials is a whole number"),
    ],
)
def test_options_that_there_are_not_are_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=sentence):
        headprune.compare(material().bert, material().data_csv, ["gnorm"], out=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_a_model_in_memory_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="pass the folder of the model"):
        headprune.compare(classifier(), material().data_csv, ["gnorm"], out=tmp_path)  # type: ignore[arg-type]


def test_a_report_of_runs(compared: headprune.CompareResult, tmp_path: Path) -> None:
    page = headprune.report(compared.out, tmp_path / "all.html")
    assert page == tmp_path / "all.html"
    assert "gnorm" in page.read_text()
    assert headprune.report([compared.out / "gnorm"], str(tmp_path / "one.html")).is_file()


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_pruned_result_shows_itself() -> None:
    model = classifier()
    result = headprune.prune(model, labelled_batches(model), criterion="gnorm", keep=0.5, every=2)
    frame = result.to_frame()
    assert frame["metric"].tolist() == [step.metric for step in result.trajectory]
    assert frame["heads"].tolist() == [step.heads for step in result.trajectory]
    assert frame["removed"].tolist() == [(12 - step.heads) / 12 for step in result.trajectory]
    chart = result.plot().to_dict()
    rows = [row for layer in chart["layer"] for row in layer.get("data", {}).get("values", ()) if "step" in row]
    drawn = {row["step"]: row["value"] for row in rows}
    assert drawn == {step.step: step.metric for step in result.trajectory}
    page = result._repr_html_()
    assert f"<td style='text-align:right'>{result.result.metric:.4g}</td>" in page
    assert f"{result.result.parameters:,}" in page


def test_a_result_shows_the_time_that_was_measured() -> None:
    model = classifier()
    result = headprune.prune(model, labelled_batches(model), keep_flops=0.8, rounds=2, progress=False)
    assert "latency" not in result.to_frame()
    assert "time of a forward pass" not in result._repr_html_()
    dense, *steps = result.trajectory
    timed = [dense, *(dataclasses.replace(step, latency=share) for step, share in zip(steps, (0.75, 0.5), strict=True))]
    result = dataclasses.replace(result, trajectory=timed)
    assert result.to_frame()["latency"].tolist() == [1.0, 0.75, 0.5]
    assert "time of a forward pass</td><td style='text-align:right'>1</td><td style='text-align:right'>0.5</td>" in (
        result._repr_html_()
    )


def test_an_inspection_shows_itself() -> None:
    model = classifier()
    headprune.remove(model, [(1, 2)])
    inspection = headprune.inspect(model)
    sites = [*inspection.sites, *inspection.feed_forward]
    frame = inspection.to_frame()
    assert frame["site"].tolist() == [site.index for site in sites]
    assert frame["left"].tolist() == [len(site.kept) for site in sites]
    assert frame["original"].tolist() == [site.original for site in sites]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert repr(inspection) == (
        f"<Inspection: bert, {parameters:,} parameters, 11 of 12 heads at 3 sites, 60 neurons at 3 sites>"
    )
    page = inspection._repr_html_()
    assert f"bert: {parameters:,} parameters" in page
    neurons = sum(
        tensor.numel()
        for layer in model.bert.encoder.layer
        for tensor in (layer.intermediate.dense.weight, layer.intermediate.dense.bias, layer.output.dense.weight)
    )
    assert f"<td style='text-align:right'>{neurons / parameters:.1%}</td>" in page
    assert inspection.proof in page


def test_scores_show_themselves() -> None:
    model = classifier()
    headprune.remove(model, [(1, 2)])
    result = headprune.score(model, labelled_batches(model), criterion="gnorm")
    frame = result.to_frame()
    assert len(frame) == 12
    for row in frame.itertuples():
        value = float(result.scores[row.site, row.member])
        assert row.score == value or (math.isnan(row.score) and (row.site, row.member) == (1, 2))
    assert "gnorm" in json.dumps(result.plot().to_dict())
    page = result._repr_html_()
    assert "3 of 4 heads" in page
    best = max((float(value), head) for head, value in enumerate(result.scores[0].tolist()))
    assert f"{best[1]}: {best[0]:.4g}" in page
    both = headprune.score(model, labelled_batches(model), criteria=["taylor", "magnitude"], units="heads,neurons")
    assert list(both.to_frame().columns) == ["site", "path", "kind", "member", "taylor", "magnitude"]
    assert set(both.to_frame()["kind"]) == {"heads", "neurons"}
    with pytest.raises(CriterionError, match="Name one of the criteria to plot: taylor, magnitude"):
        both.plot()
    assert "magnitude" in json.dumps(both.plot("magnitude").to_dict())
    neurons = headprune.score(model, criterion="magnitude", units="neurons")
    assert set(neurons.to_frame()["kind"]) == {"neurons"}


def test_without_pandas_one_sentence_says_what_to_install() -> None:
    program = """
from headprune.display import data_frame
from headprune.errors import HeadpruneError
try:
    data_frame([{"a": 1}])
except HeadpruneError as error:
    print(error)
"""
    done = without(("pandas",), program)
    assert done.stdout == "Data frames need pandas; install it with pip install 'headprune[data]'.\n", done.stderr


def test_html_is_escaped() -> None:
    from headprune.display import html_table

    page = html_table("<a>", ("", "<b>"), [("<c>", "<d>")], ["<e>"])
    assert "<a>" not in page
    assert all(f"&lt;{letter}&gt;" in page for letter in "abcde")


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the bars of a test looked like when they were closed."""
    closed: list[dict[str, Any]] = []
    close = tqdm_bars.tqdm.close

    def note(bar: Any) -> None:
        if not bar.disable:
            closed.append({"total": bar.total, "n": bar.n, "text": str(bar)})
        close(bar)

    monkeypatch.setattr(tqdm_bars.tqdm, "close", note)
    return closed


def test_a_bar_shows_heads_and_the_metric(bars: list[dict[str, Any]]) -> None:
    model = classifier()
    result = headprune.prune(model, labelled_batches(model), criterion="gnorm", keep=0.5, progress=True)
    (bar,) = bars
    assert bar["n"] == bar["total"] == 6
    assert f"metric={result.result.metric:.4g}" in bar["text"]
    assert f"dense={result.trajectory[0].metric:.4g}" in bar["text"]


@pytest.mark.parametrize(
    ("schedule", "total", "unit"), [("rounds", 2, "rounds"), ("layerwise", BERT["num_hidden_layers"], "layers")]
)
def test_a_bar_counts_what_the_schedule_goes_through(
    schedule: str, total: int, unit: str, bars: list[dict[str, Any]]
) -> None:
    model = classifier()
    batches = labelled_batches(model)
    result = headprune.prune(model, batches, schedule=schedule, keep_flops=0.8, rounds=2, progress=True)
    (bar,) = bars
    assert bar["n"] == bar["total"] == total
    assert f" {unit}" in bar["text"]
    assert f"metric={result.result.metric:.4g}" in bar["text"]


def test_a_bar_of_scores_counts_samples(bars: list[dict[str, Any]]) -> None:
    model = classifier()
    headprune.score(model, labelled_batches(model), criterion="gnorm", progress=True)
    (bar,) = bars
    assert bar["n"] == bar["total"] == ROWS


def test_a_bar_ends_where_pruning_is_refused(bars: list[dict[str, Any]]) -> None:
    model = classifier()
    with pytest.raises(DataError):
        headprune.prune(model, labelled_batches(model), metric="pearson", progress=True)
    assert len(bars) == 1


@pytest.mark.parametrize(("terminal", "asked", "shown"), [(0, None, 0), (1, None, 1), (1, False, 0), (0, True, 1)])
def test_bars_are_for_terminals_unless_asked_for(
    terminal: bool, asked: bool | None, shown: bool, bars: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: bool(terminal), raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    model, batch = ZOO["bert"].build(), labelled(ZOO["bert"], 0)
    headprune.score(model, [batch], criterion="gnorm", progress=asked)
    assert len(bars) == shown


def test_a_notebook_has_bars(bars: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    headprune.score(ZOO["bert"].build(), [labelled(ZOO["bert"], 0)], criterion="gnorm")
    assert len(bars) == 1


def test_the_command_line_draws_no_second_bar(
    bars: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headprune.progress.shows_progress", lambda asked: asked is not False)
    m = material()
    assert program(*prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "6")).code == 0
    assert not [bar for bar in bars if "Pruning" in bar["text"]]


# --- loggers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where TensorBoard is not installed, a writer that remembers stands in for it; the callback is transformers'."""
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            written.append(("opened", log_dir))

        def add_text(self, *_: Any) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append("closed")

    for name in ("torch.utils.tensorboard", "tensorboardX"):
        module = types.ModuleType(name)
        module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: True)
    return written


def test_steps_are_logged_as_they_are_in_the_journal(tensorboard: list[Any], tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    command = [
        *prune_command(m.bert, m.data_csv, out, "--keep", "6", "--every", "2"),
        "--report-to",
        "tensorboard",
    ]
    assert program(*command).code == 0
    assert tensorboard[0][0] == "opened"
    assert str(out / "logs") in tensorboard[0][1]
    assert tensorboard[-1] == "closed"
    logged = {(name, step): value for name, value, step in tensorboard[1:-1]}
    journal = steps_of(out)
    assert len(journal) > 2
    for line in journal:
        for name in ("metric", "agreement", "loss", "heads", "parameters"):
            assert logged[f"eval/{name}", line["step"]] == line[name]
        assert logged["eval/removed", line["step"]] == (12 - line["heads"]) / 12
        assert [logged[f"eval/{end}", line["step"]] for end in ("low", "high")] == line["interval"]


def test_a_logger_that_is_not_installed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    m = material()
    command = prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "6")
    done = program(*command, "--report-to", "nowhere")
    assert done.code == 2
    assert "Steps cannot be logged to 'nowhere' here; " in done.err
    assert not (tmp_path / "run").exists()


# --- prune_heads -----------------------------------------------------------------------------------------------------

OUTPUTS = {  # the output projection of a layer, and whether its weight is stored [in x out]
    "bert": ("bert.encoder.layer.{}.attention.output.dense", False),
    "distilbert": ("distilbert.transformer.layer.{}.attention.out_lin", False),
    "gpt2": ("transformer.h.{}.attn.c_proj", True),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_heads_by_layer_are_zeroed_columns_of_the_output_projection(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    zeroed, batch = copy.deepcopy(model), entry.batch(0)
    path, by_input = OUTPUTS[name]
    heads = {0: [1, 2], entry.sites - 1: [0]}
    with torch.no_grad():
        for layer, gone in heads.items():
            weight = zeroed.get_submodule(path.format(layer)).weight
            for head in gone:
                columns = slice(head * entry.head_dim, (head + 1) * entry.head_dim)
                weight[columns if by_input else (slice(None), columns)] = 0
    assert headprune.prune_heads(model, heads) is model
    assert model.get_submodule(path.format(0)).weight.numel() < zeroed.get_submodule(path.format(0)).weight.numel()
    before, after = outputs(zeroed, batch), outputs(model, batch)
    assert all(torch.allclose(after[part], before[part], atol=1e-5) for part in before)


def test_heads_keep_their_numbers_and_may_be_named_again() -> None:
    once, twice = ZOO["bert"].build(), ZOO["bert"].build()
    headprune.prune_heads(once, {1: [0, 3]})
    headprune.prune_heads(twice, {1: [0]})
    headprune.prune_heads(twice, {1: {0, 3}})
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "heads", "kind", "sentence"),
    [
        ("t5", {0: [1]}, UnsupportedModelError, r"use headprune\.remove\(model"),
        ("clip", {0: [1]}, UnsupportedModelError, r"use headprune\.remove\(model"),
        ("bert", {99: [1]}, HeadSelectionError, "There is no layer 99"),
        ("bert", {0: [99]}, HeadSelectionError, "99"),
        ("bert", [(0, 1)], HeadSelectionError, r"must be \{layer"),
        ("llama-gqa", {0: [1]}, HeadSelectionError, "group|together|unit"),
    ],
)
def test_heads_that_a_layer_does_not_name_are_refused(name: str, heads: Any, kind: type, sentence: str) -> None:
    model = ZOO[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(kind, match=sentence):
        headprune.prune_heads(model, heads)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- the package -----------------------------------------------------------------------------------------------------


def test_type_checkers_know_every_public_name() -> None:
    """What `import headprune` gives lazily is imported for type checkers too, from the same modules."""
    import ast

    tree = ast.parse(Path(headprune.__file__).read_text())
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"HeadpruneError"} == set(headprune.__all__)
    assert (Path(headprune.__file__).parent / "py.typed").is_file()
