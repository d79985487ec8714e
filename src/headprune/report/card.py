"""The model card of a pruned checkpoint: what was removed, how, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(record: Mapping[str, Any]) -> str:
    """README.md with the yaml header that model hubs read."""
    settings, result = record["settings"], record["result"]
    removed = result["heads_before"] - result["heads_after"]
    name = str(settings["model"])
    header = [
        "---",
        "library_name: transformers",
        # Hubs take the name of a model there, not a folder of somebody's machine.
        *([f"base_model: {json.dumps(name)}"] if not Path(name).exists() else []),
        "tags:",
        "- headprune",
        "- pruned",
        "- attention-head-pruning",
        "---",
    ]
    lines = [
        *header,
        "",
        f"# {name.rstrip('/').rsplit('/', 1)[-1]}, {removed} of {result['heads_before']} attention heads removed",
        "",
        f"Pruned by headprune {record['versions']['headprune']}: criterion "
        f"`{settings['criterion']}`, schedule `{settings['schedule']}`, seed {settings['seed']}, "
        f"{record['samples']['calibration']} calibration samples, {record['samples']['evaluation']} evaluation samples"
        + (" (the same ones)." if settings["same_data"] else "."),
        "",
        "| | dense | pruned |",
        "|---|---|---|",
        f"| heads | {result['heads_before']} | {result['heads_after']} |",
        f"| {result['metric']} | {result['dense']:.4f} | {result['pruned']:.4f} |",
        f"| agreement with the dense model | 1 | {_number(result['agreement'])} |",
    ]
    saved = record.get("savings")
    if saved:
        dense, pruned = saved["dense"], saved["pruned"]
        lines += [
            f"| parameters | {dense['parameters']:,} | {pruned['parameters']:,} |",
            f"| MB in float32 | {dense['megabytes']:.2f} | {pruned['megabytes']:.2f} |",
            f"| FLOPs | {dense['flops']:,} | {pruned['flops']:,} |",
        ]
    gone = {
        site: [head for head, kept in enumerate(row) if not kept] for site, row in enumerate(result["mask"]) if 0 in row
    }
    lines += ["", "Removed heads, by site: " + ("; ".join(f"{s}: {ids}" for s, ids in gone.items()) or "none") + "."]
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "import headprune",
        "",
        'model = headprune.load("path/to/this/folder")',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
