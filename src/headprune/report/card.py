"""The model card of a pruned checkpoint: what was removed, how, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from headprune.report import gates
from headprune.report.recovery import how, measured_of
from headprune.report.usage import pipeline_tag, usage
from headprune.report.words import measured_text, removed_text, stop_text, value_text, vocabulary_text


def model_card(record: Mapping[str, Any], folder: Path | None = None) -> str:
    """README.md with the yaml header that model hubs read; `folder` is that of the model, whose config says what loads
    it."""
    settings, result = record["settings"], record["result"]
    removed = result["heads_before"] - result["heads_after"]
    name, metric = str(settings["model"]), result["metric"]
    dense = measured_text(metric, result["dense"], result.get("dense_interval"))
    pruned = measured_text(metric, result["pruned"], result.get("pruned_interval"))
    tag = pipeline_tag(record, folder)
    header = [
        "---",
        "library_name: transformers",
        *([f"pipeline_tag: {tag}"] if tag else []),
        *([f"base_model: {json.dumps(name)}"] if _on_hub(name) else []),
        "tags:",
        "- headprune",
        "- pruned",
        "- attention-head-pruning",
        "---",
    ]
    lines = [
        *header,
        "",
        f"# {_plain(Path(name).name or name)}, {_gone(result)} removed",
        "",
        f"Pruned by headprune {record['versions']['headprune']}: {_how(record)}. " + _plain(stop_text(result)),
        "",
        "| | dense | pruned |",
        "|---|---|---|",
        f"| heads | {result['heads_before']} | {result['heads_after']} |",
        *_neurons_row(result),
        f"| {_plain(metric)} | {_plain(dense)} | {_plain(pruned)} |",
        f"| agreement with the dense model | 100.00% | {value_text('agreement', result['agreement'])} |",
        *_savings(record.get("savings")),
        *(["", "In brackets: 95% interval."] if "[" in dense + pruned else []),
        "",
        _heads(result["mask"], removed),
        *_widths(result),
        *(["", vocabulary_text(record)] if vocabulary_text(record) else []),
        "",
        "## Use",
        "",
        *usage(folder, record.get("task", ""), tag),
    ]
    return "\n".join(lines) + "\n"


def plain_card(folder: Path) -> str:
    """The card of a model of which nothing is known but its folder."""
    settings = json.loads((folder / "config.json").read_text())
    sites = settings.get("pruned_heads") or {}
    gone = sum(map(len, sites.values()))
    lines = [
        *("---", "library_name: transformers", "tags:", "- headprune", "- pruned", "---", ""),
        f"# {_plain(folder.resolve().name)}",
        "",
        f"Pruned by headprune: {gone} attention heads removed from {sum(map(bool, sites.values()))} sites; config.json "
        "says which.",
        "",
        "## Use",
        "",
        *usage(folder, "", ""),
    ]
    return "\n".join(lines) + "\n"


def _how(record: Mapping[str, Any]) -> str:
    settings, samples = record["settings"], record["samples"]
    if settings.get("gates"):
        return gates.how(record)
    return (
        f"criterion `{settings['criterion']}`, compensation `{settings.get('repair', 'none')}`, schedule "
        f"`{settings['schedule']}`, seed {settings['seed']}, {samples['calibration']} calibration samples, "
        f"{samples['evaluation']} evaluation samples" + (" (the same ones)" if settings["same_data"] else "")
    )


def recovered_card(card: str, record: Mapping[str, Any]) -> str:
    """The card of a pruned model when it has been recovered: what was done, and what came of it."""
    found = measured_of(record)
    lines = [
        "## Recovery",
        "",
        _plain(how(record)),
        "",
        f"| | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
        f"| {_plain(record['metric'])} | {' | '.join(map(_plain, found.values()))} |",
    ]
    before, use, after = card.partition("## Use\n")
    return before + "\n".join([*lines, "", ""]) + use + after


def _gone(result: Mapping[str, Any]) -> str:
    return removed_text(result).replace("heads", "attention heads")


def _neurons_row(result: Mapping[str, Any]) -> list[str]:
    before, after = (result.get("units") or {}).get("neurons", (0, 0))
    return [f"| neurons | {before:,} | {after:,} |"] if before else []


def _widths(result: Mapping[str, Any]) -> list[str]:
    """What is left of each feed-forward layer; which neurons these are, the config of the model says."""
    changed = {site: width for site, width in (result.get("widths") or {}).items() if width[0] != width[1]}
    if not changed:
        return []
    listed = "; ".join(f"{site}: {after:,} of {before:,}" for site, (before, after) in changed.items())
    return ["", f"Neurons left, by feed-forward site that lost some: {listed}."]


def _savings(saved: Mapping[str, Any] | None) -> list[str]:
    if not saved:
        return []
    dense, pruned, latency = saved["dense"], saved["pruned"], saved["latency"]
    tokens = f" for {latency['tokens']} tokens" if latency.get("tokens") else ""
    return [
        f"| parameters | {dense['parameters']:,} | {pruned['parameters']:,} |",
        f"| MB in float32 | {dense['megabytes']:.2f} | {pruned['megabytes']:.2f} |",
        f"| FLOPs{tokens} | {dense['flops']:,} | {pruned['flops']:,} |",
        *(
            f"| milliseconds, batch of {key[6:]}, {latency['threads']} CPU threads "
            f"| {value['dense']:.1f} | {value['pruned']:.1f} |"
            for key, value in latency.items()
            if key.startswith("batch_")
        ),
    ]


def _heads(mask: list[list[int]], removed: int) -> str:
    """The removed heads. Zeros of the mask are also heads that had gone before and, where sites have different numbers
    of heads, padding: with those, the kept heads are what the mask says for certain."""
    zeros = sum(not kept for row in mask for kept in row)
    word, wanted = ("Removed", 0) if zeros == removed else ("Kept", 1)
    by_site = {site: [head for head, kept in enumerate(row) if kept == wanted] for site, row in enumerate(mask)}
    listed = "; ".join(f"{site}: {heads}" for site, heads in by_site.items() if heads)
    return f"{word} heads, by site, in the original numbering: {listed or 'none'}."


def _on_hub(name: str) -> bool:
    """Hubs take the name of a model there, not a folder of somebody's machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _plain(text: str) -> str:
    """Text that markdown shows as it is, in one line."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in " ".join(text.split()))
