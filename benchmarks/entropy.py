"""What attention entropy of long texts costs: whole maps of queries by keys against blocks of queries.

    python -m benchmarks.entropy [--tokens 512,1024,2048,4096] [--out F]

A random Llama (2 layers of 16 heads that share 8 keys and values, width 512, float32) and one text, plain or padded.
Each measurement has a process of its own with one thread: the peak of its resident memory beyond the loaded model, and
its CPU time. Goal: at 4,096 tokens at most an eighth of the memory of whole maps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import headprune
from headprune.hooks import attention_blocks

TOKENS = (512, 1024, 2048, 4096)
WAYS = ("direct", "blocks")
TEXTS = ("plain", "padded")
GOAL = 1 / 8
OUT = Path("benchmarks/results/entropy.json")


def llama(tokens: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=tokens,
    )
    return transformers.LlamaModel(config).eval()


def batch_of(tokens: int, text: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if text == "padded":
        mask[0, : tokens // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def peak() -> float:
    """Of this process's resident memory, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(tokens: int, way: str, text: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = llama(tokens)
    headprune.score(model, [batch_of(64, text)], criterion="entropy")
    if way == "direct":
        attention_blocks.BLOCK = 1 << 62
    before, started = peak(), time.process_time()
    scores = headprune.score(model, [batch_of(tokens, text)], criterion="entropy").scores
    seconds = time.process_time() - started
    return {"megabytes": peak() - before, "seconds": seconds, "scores": scores.flatten().tolist()}


def in_a_process(tokens: int, way: str, text: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.entropy", "--child", str(tokens), way, text]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(tokens: int, text: str) -> dict[str, Any]:
    direct, blocks = (in_a_process(tokens, way, text) for way in WAYS)
    differences = [abs(a - b) / abs(a) for a, b in zip(direct["scores"], blocks["scores"], strict=True)]
    return {
        "tokens": tokens,
        "text": text,
        "direct_megabytes": round(direct["megabytes"], 1),
        "blocks_megabytes": round(blocks["megabytes"], 1),
        "memory_ratio": round(blocks["megabytes"] / direct["megabytes"], 4),
        "time_ratio": round(blocks["seconds"] / direct["seconds"], 3),
        "largest_relative_difference": max(differences),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        tokens, way, text = options.child
        print(json.dumps(child(int(tokens), way, text)))
        return 0
    results = [compare(int(tokens), text) for tokens in options.tokens.split(",") for text in TEXTS]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"goal": GOAL, "rows": results}, indent=1) + "\n")
    table = Table("tokens", "text", "direct MB", "blocks MB", "memory", "time", "scores apart")
    for row in results:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    longest = [row for row in results if row["tokens"] == max(results, key=lambda row: row["tokens"])["tokens"]]
    return int(any(row["memory_ratio"] > GOAL for row in longest if row["tokens"] >= TOKENS[-1]))


if __name__ == "__main__":
    sys.exit(main())
