"""The groups: what is pruned and how, to which budget, on which data, measured by what, computed where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headprune import defaults
from headprune.config.option import OptionGroup, option, parse_keep, parse_points

Measure = Literal["parameters", "flops", "memory", "latency", "units"]

# Options that are budgets, and what each of them measures.
BUDGETS: dict[str, Measure] = {
    "keep_parameters": "parameters",
    "keep_flops": "flops",
    "keep_memory": "memory",
    "speedup": "latency",
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    panel = "Model"

    model: str = option("", "A local folder or a hub name.")
    task: str | None = option(
        None, "What the model predicts, where its class does not say it: a name of the table of tasks."
    )
    processor: str | None = option(None, "Where the tokenizer or image processor is, if not with the model.")
    max_length: int = option(128, "Longer texts are cut to this many tokens.", minimum=2)


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    panel = "Data"

    data: str = option(
        "",
        "csv, tsv, jsonl, json or parquet with a text column (.gz as well); .txt; .npz or a folder of images; or a "
        "data set's name.",
        required=True,
    )
    text_column: str | None = option(None, "Column with the text, if it has none of the usual names.")
    pair_column: str | None = option(None, "Column with the second text of a pair.")
    label_column: str | None = option(None, "Column with the label, if it has none of the usual names.")
    context_column: str | None = option(
        None, "Column with the text that answers a question, if it has none of the usual names."
    )
    choices_column: str | None = option(None, "Column with the list of choices, if it has none of the usual names.")
    split: str | None = option(None, "Split of a data set, such as 'train', or of an .npz with x_SPLIT and y_SPLIT.")


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(OptionGroup):
    panel = "Data"

    calibration: str | None = option(
        None,
        "Data to score and repair on, apart from --data, which then evaluates; without labels where the criterion "
        "needs none.",
    )
    calibration_samples: int | None = option(
        None,
        f"Samples to score and repair on; by default {defaults.CALIBRATION_SAMPLES}, of --data "
        f"{defaults.CALIBRATION_SHARE:.0%} but at least {defaults.FEW_CALIBRATION_SAMPLES} and at most "
        f"{defaults.CALIBRATION_SAMPLES}, and never more than half.",
        type=int,
        minimum=1,
    )
    validation_samples: int | None = option(
        None,
        "Samples of --data that are neither scored nor evaluated; those that --alpha auto of compare chooses on, by "
        "default as many as to calibrate on, and at most half of the others.",
        type=int,
        minimum=1,
    )
    same_data: bool = option(False, "Score, repair and evaluate on the same samples.")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(OptionGroup):
    panel = "Evaluation"

    evaluation_samples: int | None = option(None, "Samples to evaluate on; all others by default.", type=int, minimum=1)
    metric: Any = option(
        None,
        "accuracy, f1, matthews, pearson, perplexity, fidelity, ...; by default the task's usual one, or 'fidelity' "
        "where the data has no labels.",
    )


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(OptionGroup):
    """Of verbs that measure a model, and some of them the dense one beside it."""

    panel = "Data"

    samples: int | None = option(None, "Draw this many samples, by the seed.", type=int, minimum=1)
    dense: str | None = option(
        None, "Model to compare with; by default the one that the run started from.", panel="Model"
    )


@dataclass(frozen=True, kw_only=True)
class CriterionOptions(OptionGroup):
    panel = "Pruning"

    criterion: Any = option(
        None,
        f"Name as in `headprune criteria`, with options in brackets; by default '{defaults.CRITERION}', for budgets "
        f"and neurons '{defaults.BUDGET_CRITERION}'.",
    )
    method: str | None = option(None, "A published method by its name, as in `headprune methods`.")


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(OptionGroup):
    panel = "Pruning"

    units: Any = option(
        None,
        "'heads', 'neurons' of feed-forward layers, or 'heads,neurons', which compete for one budget; by default "
        "heads, and both where there is a budget and the criterion scores both.",
    )
    labels: str = option("given", "Score by the labels 'given' in the data, or by the model's predictions: 'self'.")


@dataclass(frozen=True, kw_only=True)
class PruningOptions(OptionGroup):
    panel = "Pruning"

    repair: Any = option(
        None,
        "What makes up for removed units: 'lstsq' refits the output projection of the site by least squares, 'mean' "
        "its bias, 'none' nothing; with budgets also 'dense' (least squares towards the dense model) and 'scale' (a "
        "factor per unit towards it).",
        if_absent=f"By default '{defaults.REPAIR}', with budgets '{defaults.BUDGET_REPAIR}', or what the method has.",
    )
    schedule: str = option(
        None,
        "'greedy' scores again after every step, 'one-shot' only once, 'rounds' reaches a budget in a few steps, "
        "'layerwise' prunes layer after layer with one of them in memory; by default 'rounds' where there is a budget "
        "or neurons are removed, otherwise 'greedy'.",
    )
    rescore: str = option(
        None,
        "How often a greedy run scores again: before 'every' step, before every n-th ('4'), or 'auto', which removes "
        "several units in a step where scoring in between would hardly choose others.",
        if_absent="By default 'auto' for this project's criteria, 'every' for published ones.",
    )
    every: int = option(1, "Units to remove per step.", minimum=1)
    sites: Any = option(
        None,
        "Prune these sites alone, by their numbers in `headprune inspect` ('0-11,24'), also those that no calibration "
        "sample reaches; by default all that samples reach.",
    )
    min_per_site: int = option(0, "Leave at least this many units at every site.", minimum=0)
    rounds: int = option(
        None,
        f"Steps in which a budget is reached; by default {defaults.ROUNDS}, or what the method has.",
        type=int,
        minimum=1,
    )
    round_to: int = option(8, "Widths of feed-forward layers are multiples of this, for the hardware.", minimum=1)
    widths: str = option(
        None,
        "How sites share a budget: 'global' by error for its price, 'uniform' the same share everywhere, 'threshold' "
        f"one score below which units are removed; by default '{defaults.WIDTHS}', or what the method has.",
    )


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions(OptionGroup):
    panel = "Pruning"

    vocabulary: Any = option(
        None,
        "Keep only the tokens of these texts (.txt, or a table as for --data; give it once per file), of --data and of "
        "--calibration, and the special ones.",
        type=list[str],
    )


@dataclass(frozen=True, kw_only=True)
class StopOptions(OptionGroup):
    """Where a trajectory ends, but not how it goes: a run can be taken further with other values."""

    panel = "Budget"

    keep: float | int | None = option(
        None, "Stop at this share ('0.5') or number ('36') of heads left.", parse=parse_keep
    )
    max_drop: float | None = option(
        None,
        "The metric may fall at most this far below dense ('0.01'); perplexity and mse may rise by this share. A drop "
        "counts when it is more than noise.",
        type=float,
    )
    knee: bool = option(False, "Stop at the knee of the full curve: where most was removed for what it cost.")
    explore: bool = option(
        False, "Continue to the last unit after the stopping rule is met, to record the whole curve."
    )


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(OptionGroup):
    panel = "Budget"

    keep_parameters: Any = option(
        None,
        "Stop at this share of the model's parameters ('0.5'), or at each of several ('0.8,0.5').",
        parse=parse_points,
    )
    keep_flops: Any = option(None, "The same for FLOPs of a forward pass.", parse=parse_points)
    keep_memory: Any = option(None, "The same for bytes of weights.", parse=parse_points)
    speedup: Any = option(
        None, "Stop when the model is this many times as fast, measured here ('2', or '1.5,2,3').", parse=parse_points
    )


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(OptionGroup):
    panel = "Budget"

    latency_batch: int = option(32, "Sequences at once that a speed-up is measured for.", minimum=1)
    latency_tokens: int | None = option(
        None, "Tokens of each of them; the model's usual length by default.", type=int, minimum=1
    )
    threads: int | None = option(
        None,
        "Threads that a speed-up is measured for; as many as torch uses by default.",
        type=int,
        minimum=1,
        panel="Compute",
    )


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(OptionGroup):
    panel = "Compute"

    seed: int = option(0, "Seed of drawn samples and hidden tokens; in compare, of random too.")
    batch_size: int = option(32, "Samples per batch.", minimum=1)
    dtype: str = option("float32", "Precision to compute in: float32, bfloat16 or float16.")
    device: str = option(
        "auto", "Where to compute: cpu, cuda, cuda:1, mps; 'auto' takes a CUDA device if there is one."
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(OptionGroup):
    panel = "Compute"

    memory: Any = option(
        None,
        "Memory for what is kept between passes over the data, such as 4GB: less takes more passes, with the same "
        "results; 9GB by default.",
    )
    activations_on_disk: bool = option(
        False, "With '--schedule layerwise', keep hidden states between layers in files instead of in memory."
    )


# What two runs that are compared share, beside criteria, budgets, and the model, data and seed of each.
COMPARE_GROUPS = (
    *(ModelOptions, DataOptions, CalibrationOptions, EvaluationOptions, ScoringOptions, PruningOptions),
    *(VocabularyOptions, LatencyOptions, ComputeOptions, MemoryOptions),
)
# Criteria are compared as published, each with its schedule along curves, and greedy ones in the same steps.
COMPARE_DEFAULTS = {"repair": "none", "rescore": "every", "schedule": None}
