"""The plan of a reproduction: sizes, numbers of steps, and one row per model to train and measure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headprune.models import AllAttentionConfig, AllAttentionForCausalLM
from headprune.papers.all_attention.text import VOCABULARY
from headprune.papers.paper_models import ReproductionError

PAPER = "arXiv 2110.03252"
TITLES = {"all-attention": "All-attention", "transformer": "Transformer, heads only"}
# Each technique of the paper -> the option of GateConfig, and its value without the technique.
TECHNIQUES: dict[str, tuple[str, Any]] = {
    "initial value": ("start", 0.0),
    "rescaling": ("rescale", False),
    "warm-up": ("warmup", 0.0),
}
# Not of the paper: a value that may suit short trainings better.
VARIANTS: dict[str, tuple[str, Any]] = {"a warm-up of half the training": ("warmup", 0.5)}
# Options of `headprune.prune` to compare gates with: criteria as published, and what it does by default.
CRITERIA: dict[str, dict[str, Any]] = {
    "his": {"criterion": "his", "schedule": "one-shot", "repair": "none"},
    "gnorm": {"criterion": "gnorm", "schedule": "greedy", "rescore": "every", "repair": "none"},
    "default": {},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a reproduction. Both models have the same width, layers and heads, and, norms aside, the same
    number of parameters outside of embeddings."""

    seed: int = 0  # of weights, batches and gates
    scale: float = 1.0
    layers: int = 5
    heads: int = 8
    hidden: int = 96
    persistent: int = (
        192  # vectors of a head; the feed-forward layers of the Transformer have the same number of parameters
    )
    context: int = 64
    batch: int = 16
    dense_steps: int = 1200
    gate_steps: int = 270
    tuning_steps: int = 180
    windows: int = 512  # of the validation text
    # Peak learning rates of AdamW: the best in dense trainings of 400 steps with seed 0. All-attention with the norm
    # first has losses 2.076, 1.907, 1.720 and 1.761 at 2e-3, 4e-3, 8e-3 and 16e-3 (post-norm 1.783 at 8e-3); of the
    # Transformer, 2e-3 and 4e-3 were tried.
    all_attention_rate: float = 8e-3
    transformer_rate: float = 2e-3
    later: float = 0.25  # share of these rates in trainings that start from a dense model
    gate_rate: float = 0.03  # of gates, which train for few steps
    rise: float = 0.1  # share of the steps for warm-up
    weight_decay: float = 0.01
    clip: float = 1.0
    keeps: tuple[float, ...] = (0.8, 0.6, 0.4)
    l0: tuple[float, ...] = (0.05,)
    ablation: float = 0.6  # share of heads kept in the runs without a technique
    compared: tuple[float, ...] = (0.6, 0.4)  # shares of heads at which criteria choose
    calibration: int = 32  # windows of the training text on which criteria score
    norm: str = "pre"  # of All-attention, as in the authors' configuration
    warmup: float = 0.1  # of the gates, likewise

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ReproductionError(f"--scale multiplies the steps and must be above 0, not {self.scale}.")
        if self.seed < 0:
            raise ReproductionError(f"A seed must be 0 or more, but --seeds has {self.seed}.")

    def rate(self, model: str) -> float:
        return self.all_attention_rate if model == "all-attention" else self.transformer_rate

    def scaled(self, scale: float) -> Settings:
        """The settings with more or fewer steps and windows, at least two of each."""
        copy = dataclasses.replace(self, scale=scale)
        steps = {
            name: max(2, round(scale * getattr(self, name))) for name in ("dense_steps", "gate_steps", "tuning_steps")
        }
        return dataclasses.replace(copy, **steps, windows=max(2, min(self.windows, round(scale * self.windows))))

    def to_json(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }


@dataclass(frozen=True)
class Row:
    """One model to train and measure. `gates` are options of GateConfig, `removal` those of `headprune.prune`; a dense
    model has neither."""

    model: str
    kind: str  # dense, trained on, target, l0, ablation, criterion or criterion first
    what: str
    gates: Mapping[str, Any] | None = None
    removal: Mapping[str, Any] | None = None
    compared_with: str | None = None  # the name of another row with as many heads and steps

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.model}-{self.what}".replace(" ", "-").replace("=", "-").replace(",", "")


def rows_of(settings: Settings) -> list[Row]:
    """The rows in order of training: all others start from a dense model."""
    rows = []
    for model in TITLES:
        rows += [Row(model, "dense", "dense"), Row(model, "trained on", "dense trained on")]
        rows += [Row(model, "target", f"keep={keep}", gates_of(settings, model, keep=keep)) for keep in settings.keeps]
        if model == "all-attention":
            rows += [Row(model, "l0", f"l0={weight}", gates_of(settings, model, l0=weight)) for weight in settings.l0]
            rows += ablation_of(settings, model)
            rows += criteria_of(settings, model)
    return rows


def ablation_of(settings: Settings, model: str) -> list[Row]:
    """`keep` at one share of heads, with one setting of the gates changed."""
    base = gates_of(settings, model, keep=settings.ablation)
    changes = {f"without {name}": change for name, change in TECHNIQUES.items()}
    changes |= {f"with {name}": change for name, change in VARIANTS.items()}
    return [Row(model, "ablation", what, {**base, key: value}) for what, (key, value) in changes.items()]


def criteria_of(settings: Settings, model: str) -> list[Row]:
    """Criteria at the shares of heads and after the steps at which gates remove them, and at one share before these
    steps, so that all of them are fine-tuning."""
    rows = []
    for keep in settings.compared:
        for name, options in CRITERIA.items():
            removal = {**options, "keep": keep}
            row = Row(model, "criterion", f"{name} keep={keep}", removal=removal, compared_with=f"{model}-keep-{keep}")
            rows.append(row)
            if keep == settings.ablation:
                rows.append(dataclasses.replace(row, kind="criterion first", what=f"{row.what}, removed first"))
    return rows


def gates_of(settings: Settings, model: str, **budget: float) -> dict[str, Any]:
    """Options of gates: the techniques of the paper, explicitly, and the rate as a multiple of the model's."""
    multiple = settings.gate_rate / (settings.later * settings.rate(model))
    return {"start": 2.0, "rescale": True, "warmup": settings.warmup, "rate": round(multiple, 6), **budget}


def build(model: str, settings: Settings) -> PreTrainedModel:
    """A new model; its weights depend on the seed of torch."""
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": settings.context,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model == "all-attention":
        # The whole head is rotated, as in the Transformer: a quarter of heads this narrow is one pair of numbers.
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
        options = {"num_persistent_vectors": settings.persistent, "rope_parameters": rope, "norm": settings.norm}
        return AllAttentionForCausalLM(AllAttentionConfig(**shared, **options))
    # Three maps of a gated feed-forward layer of width 2/3 M have as many parameters as M keys and M values.
    return LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=round(2 * settings.persistent / 3)))
