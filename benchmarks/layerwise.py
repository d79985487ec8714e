"""Peak memory of layer-wise pruning: a random Llama of about 1.1 B parameters in bfloat16, at three depths,
and pruned in memory by the same computation.

    python -m benchmarks.layerwise [--layers 22] [--folder DIR] [--out FILE.json] [--only layerwise,half,twice,memory]

Each run is a process of its own, which tells its peak resident memory (VmHWM) at its end. Goals, fixed before anything
was measured: at most 35 % of the peak in memory, at most 1.6 GB, and the same peak within 10 % at every depth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, NEURONS, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 4, 32_000
SAMPLES, TOKENS, KEEP = 16, 128, 0.7

ON_DISK = """
import sys
from headprune.__main__ import main
sys.argv = ["headprune", *sys.argv[1:]]
try:
    main()
finally:
    print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0], file=sys.stderr)
"""
IN_MEMORY = """
import sys
import headprune, torch
from headprune.runs.experiment import load
from headprune.search.config import Experiment
model, data, samples, tokens, keep = sys.argv[1:]
experiment = Experiment(model=model, data=data, calibration_samples=int(samples), max_length=int(tokens),
    evaluation_samples=8, batch_size=8, schedule="layerwise", keep_parameters=float(keep))
inputs, calibration, evaluation = load(experiment)
headprune.prune(inputs.model, calibration.batches(8), config=experiment, evaluation=evaluation.batches(8))
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0], file=sys.stderr)
"""


def make_model(folder: Path, layers: int) -> int:
    """A checkpoint of random weights, written layer by layer, with a tokenizer of words; its parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=NEURONS,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        files.setdefault("-".join(name.split(".")[1:3]) if ".layers." in name else name, []).append(name)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    for label, names in files.items():
        tensors = {name: _random(shapes[name], generator) for name in names}
        save_file(tensors, folder / f"{label}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(names, f"{label}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _make_tokenizer(folder)
    config.save_pretrained(folder)
    return sum(shape.numel() for shape in shapes.values())


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
    return tensor.to(torch.bfloat16)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<pad>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)


def make_text(file: Path) -> None:
    rng = random.Random(0)
    lines = [" ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(TOKENS)) for _ in range(2 * SAMPLES)]
    file.write_text("\n\n".join(lines) + "\n")


def peak(program: str, words: Iterable[object]) -> float:
    """Peak resident memory of this program in MB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--folder", type=Path, help="where models are made; a temporary folder by default")
    parser.add_argument("--only", default="layerwise,half,twice,memory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "text.txt"
        make_text(data)
        depths = {
            "layerwise": options.layers,
            "half": options.layers // 2,
            "twice": 2 * options.layers,
            "memory": options.layers,
        }
        for name in options.only.split(","):
            layers = depths[name]
            model = folder / f"llama-{layers}"
            if not (model / "config.json").is_file():
                make_model(model, layers)
            if name == "memory":
                megabytes = peak(IN_MEMORY, [model, data, SAMPLES, TOKENS, KEEP])
            else:
                arguments = (
                    f"--schedule layerwise --keep-parameters {KEEP} --calibration-samples {SAMPLES} --batch-size 8"
                )
                words = f"{arguments} --max-length {TOKENS} --evaluation-samples 8 --overwrite --json".split()
                megabytes = peak(ON_DISK, ["prune", model, "--data", data, "--out", folder / f"run-{name}", *words])
            results[name] = {"layers": layers, "peak_megabytes": round(megabytes)}
            if options.out:
                options.out.write_text(json.dumps(results, indent=2) + "\n")
    _show(results)
    return 0


def _ratio(one: dict[str, Any], other: dict[str, Any] | None) -> str:
    return "" if other is None else f"{one['peak_megabytes'] / other['peak_megabytes']:.2f}"


def _show(results: dict[str, Any]) -> None:
    table = Table(title="Peak resident memory, pruned layer-wise to 70 % of the parameters")
    for column in ("run", "layers", "peak MB", "of layerwise", "of the peak in memory"):
        table.add_column(column)
    for name, row in results.items():
        ratios = [
            f"{row['peak_megabytes'] / results[other]['peak_megabytes']:.2f}" if other in results else ""
            for other in ("layerwise", "memory")
        ]
        table.add_row(name, str(row["layers"]), str(row["peak_megabytes"]), *ratios)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
