"""`headprune reproduce hies`: cells against plain PyTorch, disjoint samples, statistics, resuming and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from rich.console import Console

import headprune
from headprune.data import Examples
from headprune.papers import hies
from headprune.papers.hies import study as study_module
from headprune.papers.hies import subjects as subjects_module
from headprune.papers.hies.findings import findings_of
from headprune.papers.hies.outcome import Outcome
from headprune.papers.hies.plan import NAMES, Settings
from headprune.papers.hies.study import Part, Study, decode, measure_seed, removal_order, removed_at, split_pool
from headprune.papers.hies.subjects import Subject
from headprune.papers.paper_models import ReproductionError
from run_helpers import headprune as program

QUICK = Settings(seeds=(0, 1), shares=(0.1, 0.5), calibration=6, validation=10, evaluation=40, batch_size=16)
SIZE, LAYERS, HEADS = 8, 2, 4


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=SIZE,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=16,
        num_labels=3,
    )
    made = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():  # so large that heads matter
        for name, parameter in made.named_parameters():
            scale = 1.0 if "attention" in name or "patch" in name else 0.1
            parameter.copy_(torch.randn(parameter.shape) * scale + float("layernorm" in name and "weight" in name))
    return made


def examples(count: int = 120) -> Examples:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return Examples([{"pixel_values": i, "labels": label} for i, label in zip(images, labels, strict=True)], {})


def tiny_subject(name: str = "tiny") -> Subject:
    return Subject(name, "A tiny ViT", lambda folder: (model(), examples()), sizes=True)


@pytest.fixture
def only_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hies, "default_subjects", lambda *, long: [tiny_subject()])


def output_weight(made: Any, layer: int) -> torch.Tensor:
    named = dict(made.named_parameters())
    (name,) = [name for name in named if re.search(rf"\.{layer}\.attention\..*(o_proj|output\.dense)\.weight$", name)]
    return named[name]


def predicted(kept: dict[str, list[int]], rows: Examples) -> torch.Tensor:
    """The classes that plain PyTorch predicts with zeros in the columns of the removed heads."""
    silenced = model()
    width = 16 // HEADS
    with torch.no_grad():
        for layer, block in enumerate(
            silenced.vit.layers if hasattr(silenced.vit, "layers") else silenced.vit.encoder.layer
        ):
            attention = block.attention
            output = attention.o_proj if hasattr(attention, "o_proj") else attention.output.dense
            (path,) = [path for path in kept if re.search(rf"\.{layer}\.", path)]
            for head in {*range(HEADS)} - {*kept[path]}:
                output.weight[:, head * width : (head + 1) * width] = 0
        images = torch.stack([row["pixel_values"] for row in rows.rows])
        result: torch.Tensor = silenced(pixel_values=images).logits.argmax(-1)
    return result


# --- the cells ---


def test_cells_are_those_of_zeroed_columns() -> None:
    pool, rest = split_pool(examples(), QUICK, "tiny")
    result = measure_seed(model(), pool, Part(model(), rest, 16), QUICK, seed=1)
    dense = predicted({f".{layer}.": [*range(HEADS)] for layer in range(LAYERS)}, rest)
    labels = torch.stack([row["labels"] for row in rest.rows])
    assert len(result["cells"]) == len(NAMES) * len(QUICK.shares)
    for cell in result["cells"]:
        pruned = predicted(cell["kept"], rest)
        assert cell["metric"] == pytest.approx((pruned == labels).double().mean().item())
        assert cell["stability"] == pytest.approx((pruned == dense).double().mean().item())
        assert cell["heads_removed"] == round(cell["share"] * LAYERS * HEADS)
        assert sum(map(len, cell["kept"].values())) == LAYERS * HEADS - cell["heads_removed"]
        assert decode(cell["per_sample"]["metric"]).mean().item() == pytest.approx(cell["metric"])
    assert 0.2 < statistics.fmean(cell["stability"] for cell in result["cells"]) < 0.99  # heads matter


def test_heads_leave_in_the_order_of_the_scores_on_the_calibration_samples() -> None:
    pool, rest = split_pool(examples(), QUICK, "tiny")
    result = measure_seed(model(), pool, Part(model(), rest, 16), QUICK, seed=1)
    calibration, _ = pool.split(QUICK.calibration, 1)
    for name, criterion in (("HIS", "his"), ("AE", "entropy"), ("L2", "magnitude")):
        scores = headprune.score(model(), calibration.batches(16), criterion=criterion).scores
        cell = next(c for c in result["cells"] if c["criterion"] == name and c["share"] == 0.5)
        kept = {(site, head) for site, heads in enumerate(cell["kept"].values()) for head in heads}
        order = scores.flatten().argsort(descending=True)[: len(kept)].tolist()
        assert kept == {(index // HEADS, index % HEADS) for index in order}


def test_alpha_is_chosen_by_the_area_on_validation_samples() -> None:
    pool, rest = split_pool(examples(), QUICK, "tiny")
    result = measure_seed(model(), pool, Part(model(), rest, 16), QUICK, seed=0)
    calibration, others = pool.split(QUICK.calibration, 0)
    validation = others.sample(QUICK.validation, 0)
    labels = torch.stack([row["labels"] for row in validation.rows])
    sites = headprune.resolve(model())
    areas = {}
    for alpha in (0.0, 0.5, 0.9):
        scores = headprune.score(model(), calibration.batches(16), criterion="hies", alpha=alpha).scores
        weighted = weights = 0.0
        for share in QUICK.shares:
            removed = removed_at(removal_order(scores, sites), LAYERS * HEADS, share)
            kept = {site.path: [h for h in range(HEADS) if (site.index, h) not in removed] for site in sites}
            weighted += (1 - share) * (predicted(kept, validation) == labels).double().mean().item()
            weights += 1 - share
        areas[f"{alpha:g}"] = weighted / weights
    assert {alpha: result["areas"][alpha] for alpha in areas} == pytest.approx(areas)
    assert result["areas"][f"{result['alpha']:g}"] == max(result["areas"].values())


def test_samples_of_the_three_parts_are_disjoint() -> None:
    pool, rest = split_pool(examples(), QUICK, "tiny")
    for seed in range(3):
        calibration, others = pool.split(QUICK.calibration, seed)
        validation = others.sample(QUICK.validation, seed)
        parts = [{id(row["pixel_values"]) for row in part.rows} for part in (calibration, validation, rest)]
        assert [*map(len, parts)] == [QUICK.calibration, QUICK.validation, QUICK.evaluation]
        assert len(set.union(*parts)) == sum(map(len, parts))


def test_few_samples_are_refused() -> None:
    with pytest.raises(ReproductionError, match=r"tiny has 31 samples, .* need 32; give more data"):
        split_pool(examples(31), QUICK, "tiny")


def test_a_site_that_must_not_be_empty_keeps_its_best_head() -> None:
    sites = headprune.resolve(model())
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3]])
    assert [unit[0] for unit in removal_order(scores, sites)][:4] == [(0, 0), (0, 2), (0, 3), (0, 1)]
    guarded = [dataclasses.replace(site, needs=dataclasses.replace(site.needs, empty=False)) for site in sites]
    order = [unit[0] for unit in removal_order(scores, guarded)]
    assert order == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]


# --- statistics ---


def outcome(
    metric: dict[str, list[str]],
    shares: tuple[float, ...] = (0.3,),
    kept: dict[str, dict[str, list[int]]] | None = None,
    sizes: list[dict[str, Any]] | None = None,
) -> Outcome:
    """An outcome with these digits per sample: criterion -> one text per seed; other criteria are as random."""
    contents = []
    for seed in range(len(metric["HIES"])):
        cells = []
        for name in NAMES:
            digits = metric.get(name, metric["random"])[seed]
            values = {"metric": digits, "stability": digits}
            mean = statistics.fmean(map(int, digits))
            for share in shares:
                cells.append(
                    {"criterion": name, "share": share, "seed": seed, "metric": mean, "stability": mean}
                    | {"per_sample": values, "kept": (kept or {}).get(name, {"a": [0, 1], "b": [0, 1]})}
                )
        names = {name: dict.fromkeys(NAMES, 0.5) for name in NAMES}
        contents.append(
            {
                "subject": {"name": "s", "title": "S", "samples": 10, "dense": 1.0},
                "settings": {"shares": list(shares)},
                "result": {"seed": seed, "alpha": 0.3, "areas": {"0": 0.1, "0.3": 0.2}, "correlations": names}
                | {"cells": cells, "sizes": sizes or []},
            }
        )
    return Outcome(contents)


def test_verdicts_follow_from_the_interval() -> None:
    better = outcome({"HIES": ["1" * 40] * 5, "HIS": ["0" * 40] * 5, "random": ["1" * 20 + "0" * 20] * 5})
    by_claim = {finding.claim: finding for finding in findings_of(better)}
    assert by_claim["hies-quality"].verdict == "holds here"
    assert by_claim["hies-quality"].values["difference"][0] == 1.0
    assert by_claim["hies-quality"].sentence.startswith(
        "Accuracy of HIES minus HIS with 30% of the heads removed: +100"
    )
    assert by_claim["default-above-hies"].verdict == "does not hold here"
    assert by_claim["hies-entropy-direction"].verdict == "cannot be told apart"  # equal values
    assert by_claim["hies-complementary"].verdict == "holds here"
    assert by_claim["hies-alpha"].verdict == "holds here"
    # The same mean, but by one seed alone: seeds differ too much to tell.
    lucky = outcome({"HIES": ["1" * 40, "0" * 40], "HIS": ["0" * 40] * 2, "random": ["0" * 40] * 2})
    quality = next(finding for finding in findings_of(lucky) if finding.claim == "hies-quality")
    assert quality.verdict == "cannot be told apart"
    assert quality.values["difference"][0] == 0.5


def test_evenness_of_removed_heads() -> None:
    """By HIES both sites lose a head, by HIS one site loses both of its heads: entropies log 2 and 0."""
    same = ["10" * 4] * 2
    kept = {"HIES": {"a": [1], "b": [0]}, "HIS": {"a": [], "b": [0, 1]}}
    made = outcome({"HIES": same, "HIS": same, "random": same}, kept=kept)
    assert made.dispersion("HIES", [0.3]) == pytest.approx([1.0, 1.0])
    assert made.dispersion("HIS", [0.3]) == pytest.approx([0.0, 0.0])
    (finding,) = (finding for finding in findings_of(made) if finding.claim == "hies-dispersed")
    assert finding.verdict == "holds here"
    assert finding.values["difference"] == pytest.approx([1.0, 1.0, 1.0])


def test_few_calibration_samples_against_many() -> None:
    same = ["10" * 4] * 2
    rows = [{"criterion": "HIES", "size": size, "metric": {"0.3": value}} for size, value in ((32, 0.8), (384, 0.805))]
    made = outcome({"HIES": same, "HIS": same, "random": same}, sizes=rows)
    (finding,) = (finding for finding in findings_of(made) if finding.claim == "hies-calibration")
    assert finding.verdict == "holds here"  # half a point behind, for both seeds
    assert finding.values["difference"] == pytest.approx([-0.005] * 3)
    assert "with 32 calibration samples minus that with 384: -0.5 [" in finding.sentence


def test_means_and_deviations_of_rows() -> None:
    made = outcome({"HIES": ["1110", "1000"], "HIS": ["0000"] * 2, "random": ["1010"] * 2})
    row = next(row for row in made.rows() if row["criterion"] == "HIES")
    assert row["metric"] == 0.5
    assert row["metric_deviation"] == pytest.approx(math.sqrt(0.125))
    assert row["metric_range"] == [0.25, 0.75]


# --- the whole of it ---


def test_files_resume_and_refusals(only_tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    done = hies.reproduce_hies(out, settings=QUICK, console=Console(quiet=True))
    results = json.loads((out / "results.json").read_text())
    assert len(results["cells"]) == 2 * len(NAMES) * 2
    assert results["settings"]["seeds"] == [0, 1]
    assert {file.relative_to(out).as_posix() for file in done.files} >= {
        *(f"table{number}.{suffix}" for number in range(1, 8) for suffix in ("md", "csv")),
        *(
            f"figures/{name}.{s}"
            for name in ("accuracy", "stability", "alpha", "alpha-curves", "scores", "heads")
            for s in ("png", "svg")
        ),
        "results.json",
        "findings.md",
    }
    assert all(file.stat().st_size for file in done.files)
    # The same calibration samples in the same order give the same cells.
    first = json.loads((out / "cells" / "tiny-seed0.json").read_text())["result"]
    of_size = {(row["criterion"], row["size"]): row["metric"] for row in first["sizes"]}
    assert {size for _, size in of_size} == set(study_module.SIZES)
    assert all(0 <= value <= 1 for values in of_size.values() for value in values.values())
    before = {file.name: file.read_bytes() for file in (out / "cells").iterdir()}

    # A third seed is measured alone; what is there is read.
    measured: list[int] = []

    def spy(*args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        measured.append(args[-1] if seed is None else seed)
        return measure_seed(*args, **kwargs)

    monkeypatch.setattr(study_module, "measure_seed", spy)
    more = Settings(**{**vars(QUICK), "seeds": (0, 1, 2)})
    hies.reproduce_hies(out, settings=more, console=Console(quiet=True))
    assert measured == [2]
    assert all((out / "cells" / name).read_bytes() == content for name, content in before.items())

    other = Settings(**{**vars(QUICK), "calibration": 7})
    with pytest.raises(ReproductionError, match="other settings: calibration was 6 and is now 7"):
        hies.reproduce_hies(out, settings=other, console=Console(quiet=True))
    (out / "cells" / "tiny-seed1.json").write_text("{")
    with pytest.raises(ReproductionError, match=r"tiny-seed1\.json is damaged; delete it"):
        hies.reproduce_hies(out, settings=QUICK, console=Console(quiet=True))


def test_two_reproductions_are_equal(tmp_path: Path) -> None:
    def cells(name: str) -> list[bytes]:
        study = Study(tmp_path / name, QUICK)
        study.run_subject("tiny", "A tiny ViT", tiny_subject().make, lambda seed, content: None)
        return [study.file("tiny", seed).read_bytes() for seed in QUICK.seeds]

    assert cells("one") == cells("other")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "nowhere"], "Give the data to evaluate nowhere on as well, with --data."),
        (["--seeds", "1,1"], "1"),
        (["--seeds", "a"], "a"),
        (["--data", "missing.npz"], "missing.npz cannot be read as images"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = program("reproduce", "hies", "--out", tmp_path / "out", *words)
    assert done.code == 2
    assert sentence in " ".join(done.err.split())


def test_images_of_a_file_train_a_small_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = numpy.random.default_rng(0)
    labels = generator.integers(0, 2, 60)
    images = generator.integers(0, 100, (60, 14, 14)) + 150 * labels[:, None, None]  # bright ones are of class 1
    numpy.savez(tmp_path / "bright.npz", x=images, y=labels)
    subject = subjects_module.image_subject(tmp_path / "bright.npz")
    monkeypatch.setattr(subjects_module, "IMAGE_STEPS", 30)
    made, rest = subject.make(tmp_path / "model")
    assert len(rest) == 30
    (batch,) = rest.batches(30)
    with torch.no_grad():
        assert (made(**batch).logits.argmax(-1) == batch["labels"]).float().mean() > 0.9
