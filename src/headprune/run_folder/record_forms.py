"""The forms of the JSON files beside a run, which are checked where each is read. Entries with a question mark are not
in the files of all versions, of all verbs, or of runs that have not ended."""

from __future__ import annotations

from typing import Any

from headprune.config.groups import BUDGETS
from headprune.config.option import options_of
from headprune.json_forms import COUNT_BY_NAME, INTERVAL, NUMBER, Form
from headprune.search.config import Experiment

BEFORE_AND_AFTER = {str: [int, int]}  # by kind or site
SHARES = {str: NUMBER}

RESULT = {
    "step": int,
    "steps": int,
    "rule?": str,
    "metric": str,
    "higher_is_better?": bool,
    "dense": NUMBER,
    "pruned": NUMBER,
    "dense_interval?": INTERVAL,
    "pruned_interval?": INTERVAL,
    "agreement": NUMBER,
    "units?": BEFORE_AND_AFTER,
    "heads_before": int,
    "heads_after": int,
    "original_heads?": [int],
    "mask": [[int]],
    "widths?": BEFORE_AND_AFTER,
}
COSTS = {
    "heads?": int,
    "neurons?": int,
    "parameters": int,
    "modules": COUNT_BY_NAME,
    "megabytes": float,
    "flops": float,
    "megabytes_on_disk?": NUMBER,
    "peak_memory_megabytes?": NUMBER,
    "joules_per_1000?": NUMBER,
}
SAVINGS = {
    "dense": COSTS,
    "pruned": COSTS,
    "shares?": SHARES,
    "note?": str,
    "latency": {"threads": int, "repeats": int, str: (None, int, {"dense": float, "pruned": float, "ratio": float})},
}
POINT = {
    "label": str,
    "step": int,
    "model": str,
    "metric": NUMBER,
    "interval": INTERVAL,
    "units": COUNT_BY_NAME,
    "shares": SHARES,
}
GATES = {"setting": str, "rate": float, **dict.fromkeys(("l0", "keep", "keep_parameters", "keep_flops"), NUMBER)}
TRAINING = {
    "data": str,
    "learning_rate": float,
    "epochs": float,
    "seed": int,
    "finetune_epochs?": float,
    "evaluation?": (str, None),
    "gate_rate?": NUMBER,
    "data_fingerprint?": (str, None),
}


def _settings() -> dict[str, Form]:
    """From the options of runs; those that have several types in JSON are listed."""
    several: dict[str, Form] = {"keep": float, "rescore": (str, int), "vocabulary": [str]}
    several |= {name: [float] for name in BUDGETS}
    forms = {option.field: several.get(option.field, option.type) for option in options_of(Experiment)}
    optional: dict[str, Any] = {f"{name}?": (form, None) for name, form in forms.items()}
    own: dict[str, Any] = {"criterion_revision?": int, "scored_samples?": int}  # which are no options
    return {**optional, **own, "model?": str, "data?": str, "gates?": (None, GATES), "training?": (None, TRAINING)}


RUN = {
    "settings": _settings(),
    "versions": {"headprune": str},
    "result?": RESULT,
    "savings?": (None, SAVINGS),
    "samples?": COUNT_BY_NAME,
    "task?": str,
    "points?": (None, [POINT]),
    "vocabulary?": {"before": int, "after": int, "parameters": int},
}
# What else a run has that has ended, for reports and cards.
ENDED = {
    "settings": {
        "model": str,
        "data": str,
        "criterion": (str, None),
        "schedule": str,
        "seed": int,
        "same_data": bool,
        "calibration": (str, None),
    },
    "samples": {"evaluation": int},
}
SAMPLES = {
    "prune": {"samples": {"calibration": int}},
    "train": {"samples": {"training": int}},
}  # by the verb of the run

MEASURED = {"value": NUMBER, "interval": INTERVAL}
RECOVERY = {"settings": dict}
# Of a recovery that has ended.
RECOVERED = {
    "settings": {
        "distill": float,
        "hidden": float,
        "lora": int,
        "epochs": float,
        "learning_rate": float,
        "seed": int,
    },
    "of": dict,
    "metric": str,
    "samples": {"training": int, "evaluation": int},
    "dense": MEASURED,
    "pruned": MEASURED,
    "recovered": MEASURED,
    "steps": int,
    "best_step": int,
    "rounds?": [{"left": str, "pruned": MEASURED, "recovered": MEASURED}],
    "history?": [{"step": int, str: NUMBER}],
}
# The source of the training data, by which its rows are found again.
TRAINED = {"data": str, "reading?": (None, dict), "data_fingerprint?": (str, None)}
# After one of several cycles of pruning and training.
CYCLE = {
    "left": str,
    "pruned": MEASURED,
    "recovered": MEASURED,
    "fitted": {
        "steps": int,
        "best_step": int,
        "seconds": float,
        "samples": int,
        "metric": (str, None),
        "stopped_early": bool,
        "resumed_from": (int, None),
        "history": [{"step": int}],
        "evaluations": [[int, NUMBER, NUMBER]],
    },
}

EXPORTS = {"exports": [{"of": str, "runtime": str, "quantize": (str, None)}]}
# An entry of it, for tables.
EXPORT = {
    "title": str,
    "out": str,
    "snippet": str,
    "install": str,
    "megabytes": {"dense?": float, "pruned": float},
    "latency": {
        "threads": int,
        "repeats": int,
        str: (int, {"dense?": float, "pruned": float, "speedup?": float}),
    },
    "check": {
        "metric": (str, None),
        "samples": int,
        "difference": NUMBER,
        "tolerance": NUMBER,
        "agreement?": NUMBER,
        "tokens": (int, None),
        "exported?": (None, MEASURED),
        "pytorch?": (None, MEASURED),
    },
}
COMPARED = {
    "criteria?": [str],
    "trials?": (int, None),
    "at?": [float],
    "repair?": (str, None),
    "compensate?": (str, None),
    "schedule?": (str, None),
    "rescore?": str,
}
ROWS = [{"name": str, "runs": [str]}]
COMPARISON = (ROWS, {"compared": COMPARED, "criteria": ROWS})
