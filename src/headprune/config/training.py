"""The groups of verbs that train: distillation of a pruned model, and learned gates."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.config.option import OptionGroup, option, parse_keep


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptionGroup):
    panel = "Training"

    epochs: float = option(1.0, "Passes over the training data.")
    learning_rate: float = option(5e-5, "Highest learning rate; LoRA takes about ten times as much as full training.")
    batch_size: int = option(32, "Samples per batch, of all processes together.", minimum=1)
    gradient_accumulation: int = option(1, "Batches per step; their gradients are those of one large batch.", minimum=1)
    warmup: float = option(0.1, "Share of the steps in which the learning rate rises; after them it falls to zero.")
    weight_decay: float = option(0.0, "Weight decay of AdamW.")
    distill: float = option(1.0, "Weight of the dense model's predictions in the loss; 0 leaves them out.")
    temperature: float = option(2.0, "Temperature that both models' predictions are compared at.")
    hidden: float = option(10.0, "Weight of the dense model's hidden states, where widths match; 0 leaves them out.")
    dropout: bool = option(False, "Train with the model's dropout and layer drop; a small model learns better without.")
    evaluations: int = option(
        1,
        "Evaluations per epoch on held-out training data; the best model is kept.",
        minimum=1,
        flag="--evals-per-epoch",
    )
    validation: float = option(
        0.1, "Share of the training data that is held out for that, where there is more than one evaluation."
    )
    patience: int | None = option(
        None, "Early stopping: after this many evaluations without a better one.", type=int, minimum=1
    )
    save_steps: int | None = option(
        None, "Steps between checkpoints, beside those after every evaluation and epoch.", type=int, minimum=1
    )
    seed: int = option(0, "Seed of shuffling, dropout and LoRA's start.")
    report_to: str | None = option(
        None,
        "Where else losses are logged, by the names that transformers has: tensorboard, wandb.",
        panel="Output",
    )


@dataclass(frozen=True, kw_only=True)
class LoraOptions(OptionGroup):
    panel = "Training"

    lora: int = option(0, "Rank of LoRA; 0 trains all weights.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class GateBudgetOptions(OptionGroup):
    panel = "Budget"

    l0: float | None = option(None, "Weight of the L0 loss; how much is left is then learnt freely.", type=float)
    keep: float | int | None = option(
        None, "Share ('0.5') or number ('36') of heads that are left in the end.", parse=parse_keep
    )
    keep_parameters: float | None = option(None, "Share of the model's parameters that is left.", type=float)
    keep_flops: float | None = option(None, "Share of the FLOPs of a forward pass that is left.", type=float)
    units: str | None = option(
        None, "'heads', 'neurons' or 'heads,neurons'; by default heads, both for parameters and FLOPs."
    )


@dataclass(frozen=True, kw_only=True)
class GateOptions(OptionGroup):
    panel = "Gates"

    group: int = option(32, "Neighbouring neurons that share a gate.", minimum=1)
    setting: str = option("shim", "The paper whose values are the defaults: 'shim' or 'voita'.")
    beta: float = option(1 / 3, "Temperature of a gate.")
    gamma: float = option(-0.1, "Lower end that a gate is stretched to.")
    zeta: float = option(1.1, "Upper end that a gate is stretched to.")
    start: float = option(None, "log alpha at the start: 2, which is open; under voita 0.", type=float)
    straight_through: bool = option(
        None,
        "Gates are 0 or 1 in the forward pass, with the gradient of those between: yes; under voita no.",
        type=bool,
    )
    rescale: bool = option(
        None, "Outputs are multiplied by members / open members of their layer: yes; under voita no.", type=bool
    )
    warmup: float = option(
        None,
        "Share of the training in which the L0 weight grows from 0, or a target falls from all: 0.1; under voita 0.",
        type=float,
        flag="--gate-warmup",
    )
    rate: float = option(
        10.0,
        "Learning rate of gates, as a multiple of the model's: 10 as in the paper, on the command line by default more "
        "where the training is too short for a gate to close.",
        flag="--gate-rate",
    )
    difference: float = option(
        0.0, "Weight of the squared change of a layer's output without each unit, so that those of little change close."
    )
