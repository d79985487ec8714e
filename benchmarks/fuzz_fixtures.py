"""The files that fuzz_readers mutates: tiny models, a finished run with its records, tables, study and config files."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.synthetic_text import sentences, tokenizer

if TYPE_CHECKING:
    from headprune.runs.recovery_job import RecoveryRequest

ROWS = 12
CASES_OF_TASKS: dict[str, list[dict[str, Any]]] = {
    "tags": [{"tokens": ["w1", "w2"], "tags": ["LABEL_0", "LABEL_1"]}, {"tokens": ["w3"], "tags": ["LABEL_2"]}],
    "answers": [{"question": "w1 w2", "context": "w3 w4 w5", "answers": {"text": ["w4"], "answer_start": [3]}}] * 2,
    "choices": [
        {"text": "w1", "choices": ["w2", "w3"], "label": 1},
        {"text": "w4", "choices": ["w5", "w6"], "label": 0},
    ],
}


def make_fixtures(root: Path) -> None:
    """Everything below `root`, which must not exist yet."""
    import torch
    import transformers

    import headprune
    from headprune.runs.experiment import Experiment, run_experiment

    root.mkdir(parents=True)
    (root / "outside").mkdir()
    (root / "outside" / "canary.txt").write_text("must stay as it is\n")
    (root.parent / "beside").mkdir()
    (root.parent / "beside" / "canary.txt").write_text("must stay as it is\n")
    torch.manual_seed(0)
    words = tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(words), "hidden_size": 16, "pad_token_id": 1, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3, "max_position_embeddings": 40}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=3))
    headprune.save(model, root / "dense", processor=words)
    headprune.save(model, root / "sharded", processor=words, max_shard_size="8KB")
    if importlib.util.find_spec("torchao"):
        quantized = copy.deepcopy(model)
        headprune.quantize(quantized)
        headprune.save(quantized, root / "quantized")
    _write_tables(root / "data")
    _write_small_records(root)
    experiment = Experiment(
        model=str(root / "dense"),
        data=str(root / "data" / "rows.csv"),
        keep_flops=(0.8, 0.6),
        rounds=2,
        round_to=1,
        calibration_samples=6,
        criterion="magnitude",
    )
    run_experiment(experiment, root / "runs" / "run", publish=False)
    _write_records(root / "runs")
    _write_options(root / "options")
    (root / "cache" / "entry.json.gz").write_bytes(gzip.compress(json.dumps(_layout()).encode()))


def _write_small_records(root: Path) -> None:
    """What saves, exports and trainings leave for the next one."""
    from headprune.training.checkpoints import claim, mark_whole

    for name in ("shrunk", "export", "training/checkpoint-1", "cache"):
        (root / name).mkdir(parents=True)
    (root / "shrunk" / "kept_tokens.json").write_text(json.dumps([0, 1, 2, 3, 5, 8, 13, 21]))
    (root / "export" / "export.json").write_text(
        json.dumps({"files": ["model.onnx", "export.json"], "versions": {"headprune": "0"}})
    )
    (root / "training" / "checkpoint-1" / "weights.bin").write_bytes(b"weights")
    mark_whole(root / "training" / "checkpoint-1", {"step": 1})
    claim(root / "training", {"epochs": 1.0, "seed": 0})
    curve = {"kind": "heads", "place": "encoder", "sites": [0, 1], "counts": [0, 2, 4], "seconds": [0.0, 0.5, 1.0]}
    table = {"batch_size": 1, "length": 8, "threads": 1, "device": "cpu", "dtype": "float32", "processor": "x"}
    table |= {"repeats": 3, "rest": 0.25, "curves": [curve], "unmeasured": [2], "dense": 2.25}
    (root / "cache" / "latency.json").write_text(json.dumps(table))


def _write_tables(folder: Path) -> None:
    import pandas

    folder.mkdir()
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(sentences(ROWS, 0))]
    frame = pandas.DataFrame(rows)
    frame.to_csv(folder / "rows.csv", index=False)
    more = [{"text": text, "label": number % 3} for number, text in enumerate(sentences(ROWS, 1))]
    pandas.DataFrame(more).to_csv(folder / "more.csv", index=False)
    frame.to_csv(folder / "rows.tsv", index=False, sep="\t")
    frame.to_csv(folder / "rows.csv.gz", index=False)
    frame.to_json(folder / "rows.jsonl", orient="records", lines=True)
    frame.to_json(folder / "rows.json", orient="records")
    frame.to_parquet(folder / "rows.parquet")
    (folder / "rows.txt").write_text("\n".join(row["text"] for row in rows) + "\n")
    _write_images(folder)
    for name, cases in CASES_OF_TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cases))
        cells = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in cases]
        pandas.DataFrame(cells).to_csv(folder / f"{name}.csv", index=False)


def _write_images(folder: Path) -> None:
    import numpy
    from PIL import Image

    images = numpy.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=numpy.uint8)
    numpy.savez(folder / "images.npz", x=images, y=numpy.array([0, 1, 0, 1]))
    for number, image in enumerate(images):
        place = folder / "images" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")


def _write_records(runs: Path) -> None:
    """The records beside a run that other verbs write: of a comparison, a recovery, exports, gates."""
    run = runs / "run"
    result = json.loads((run / "run.json").read_text())["result"]
    value = {"value": 0.5, "interval": [0.3, 0.7]}
    recovery = {
        "format": 1,
        "versions": {"headprune": "0"},
        "settings": recovery_request(runs.parent).settings(),
        "of": {name: result.get(name) for name in ("step", "metric", "dense", "pruned", "heads_after")},
        "task": "sequence-classification",
        "metric": result["metric"],
        "higher_is_better": True,
        "samples": {"training": 30, "evaluation": 6},
        **dict.fromkeys(("dense", "pruned", "recovered"), value),
        "steps": 2,
        "best_step": 2,
        "stopped_early": False,
        "seconds": 1.5,
        "rounds": [],
        "notes": [],
        "history": [{"step": 1, "loss": 2.5, "task_loss": 1.5, "logits_loss": 1.0}],
    }
    (run / "finetuned").mkdir()
    (run / "finetuned" / "finetune.json").write_text(json.dumps(recovery, indent=2))
    measured = {"value": 0.5, "interval": [0.3, 0.7]}
    export = {
        "of": "model",
        "runtime": "onnx",
        "title": "ONNX Runtime",
        "quantize": None,
        "out": str(run / "exports" / "onnx"),
        "files": ["model.onnx"],
        "snippet": 'session = load("DIR")\n',
        "install": "onnxruntime",
        "task": "sequence-classification",
        "megabytes": {"dense": 0.1, "pruned": 0.05},
        "latency": {"threads": 1, "repeats": 5, "batch_1": {"dense": 1.0, "pruned": 0.5, "speedup": 2.0}},
        "check": {
            "metric": "accuracy",
            "samples": 6,
            "difference": 1e-06,
            "tolerance": 0.001,
            "tokens": None,
            "agreement": 1.0,
            "exported": measured,
            "pytorch": measured,
        },
    }
    (run / "exports.json").write_text(json.dumps({"format": 1, "exports": [export]}, indent=2))
    row = {"name": "magnitude", "runs": ["run"]}
    (runs / "comparison.json").write_text(
        json.dumps({"compared": {"criteria": ["magnitude"], "trials": 1}, "criteria": [row]})
    )
    gates = [{"gates": [[0, "heads", 0, 1], [0, "heads", 1, 1]]}, {"step": 0, "open": [0.9, 0.8], "task_loss": 1.0}]
    repair = {"site": 0, "kind": "dense", "error_without": 0.5, "error": 0.25}
    layers = [{"layer": f"bert.encoder.layer.{n}", "removed": {str(n): "0,2"}, "repairs": [repair]} for n in range(2)]
    (run / "layers").mkdir()
    (run / "layers" / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in layers))
    (run / "layers" / "widths.json").write_text(json.dumps({"0": 2, "1": 2}))
    for layer in layers:
        (run / "layers" / f"layer-0000{layer['layer'][-1]}.safetensors").write_bytes(b"")
    fitted = {"steps": 2, "best_step": 2, "seconds": 0.5, "samples": 30, "metric": None, "stopped_early": False}
    fitted |= {"resumed_from": None, "history": [{"step": 1, "loss": 2.5}], "evaluations": [[0, 0.5, 1.25]]}
    cycle = {"left": "6 of 8 heads", "pruned": value, "recovered": value, "fitted": fitted}
    (run / "finetuned" / "round-1").mkdir()
    (run / "finetuned" / "round-1" / "round.json").write_text(json.dumps(cycle))
    (run / "gates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in gates))


def recovery_request(root: Path) -> RecoveryRequest:
    """The recovery whose record is in the run."""
    from headprune.runs.recovery_job import RecoveryRequest

    return RecoveryRequest(run=root / "runs" / "run", data=str(root / "data" / "more.csv"))


def _write_options(folder: Path) -> None:
    folder.mkdir()
    (folder / "study.yaml").write_text(
        "models: [a, {model: b, max_length: 64}]\ndata: [dev.csv]\ncriteria: [gnorm, his, random]\nseeds: [0, 1]\n"
        "trials: 2\nkeep_flops: [0.5, 0.7]\nbatch-size: 16\nlabel_column: y\nsame_data: true\nvocabulary: [texts.txt]\n"
    )
    (folder / "prune.yaml").write_text(
        "criterion: his\nkeep: 0.5\nbatch-size: 16\nmax-length: 64\nsame_data: true\nlabels: self\n"
        "calibration-samples: 8\nseed: 3\nunits: heads\n"
    )


def _layout() -> Any:
    """What discovery stores of a class: here one attention module with two heads, and one that is not pruned."""
    from headprune.discovery.attention import Discovery
    from headprune.discovery.layout import Layout
    from headprune.discovery.sites_from_layouts import DenseSite
    from headprune.units.spec import ForwardNeeds

    layout = Layout(((0, 1), (2, 3)), 1, (), (), ())
    site = DenseSite("layers.0", "layers.0.o", ("layers.0.q",), layout, False, ForwardNeeds((("heads", 2),)))
    return Discovery((site,), (("layers.1", "its heads are mixed"),)).to_plain()
