"""The base class of tasks: everything that depends on the predictions of a model, in one object per model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from headprune.batches import IGNORED, real_keys, rows_of, to_device, widened
from headprune.display import counted
from headprune.errors import DataError
from headprune.tasks.packed import packed_rows
from headprune.units import Site

Labels = Literal["given", "self"]


class Parts(NamedTuple):
    """The loss of every sample as sums and counts, [batch x parts] each.

    The loss of a sample is the mean of sum / count over its parts with a count; that of a batch is the same with both
    summed over samples.
    """

    sums: torch.Tensor
    counts: torch.Tensor

    def per_sample(self) -> torch.Tensor:
        return (self.sums / self.counts.clamp_min(1)).sum(1) / (self.counts > 0).sum(1).clamp_min(1)


class Task:
    """Inputs, targets, loss per sample, predictions, metric and real tokens of one model.

    `logits` is the output that scores are derived from: [batch x classes], or [batch x tokens x classes].
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # in the table of tasks
    data: ClassVar[str] = ""  # contents of a row of data, for the same table
    pipeline_tag: ClassVar[str] = ""  # its name on the hub and in pipelines of transformers
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    per_token: ClassVar[bool] = False  # whether logits have a token axis
    transcribes: ClassVar[bool] = False  # whether a prediction is a text without positions of the logits
    over_tokens: ClassVar[bool] = False  # whether the softmax is over tokens and not over classes
    classes: ClassVar[bool] = True  # whether predictions are classes that can agree
    reduction: Literal["mean", "sum"] = "mean"  # how the loss of the model reduces over samples

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = getattr(model, "config", None)
        self.encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        self._decoder_inputs = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        self._length_rules = _length_rules(model)
        takes = forward_arguments(model)
        text = getattr(self.config, "get_text_config", lambda: None)()  # of a model of images and text
        caches = any(getattr(config, "use_cache", False) for config in (self.config, text))
        self._has_cache = caches and (takes is None or "use_cache" in takes)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that fit, the default first."""
        return ("accuracy", "f1", "matthews")

    @property
    def transferable_name(self) -> str:
        """The name that gives the same task for another model."""
        return self.name

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    # --- inputs ---

    def prepare(self, batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The batch on the device, with decoder inputs added where they follow from the labels: later code reads the
        decoder's tokens from the batch."""
        moved = to_device(batch, device)
        if not self.encoder_decoder or "decoder_input_ids" in moved or "decoder_inputs_embeds" in moved:
            return moved
        if not _are_tokens(moved.get("labels")) or self._decoder_inputs is None:
            return moved
        return {**moved, "decoder_input_ids": self._decoder_inputs(moved["labels"])}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the forward: no labels unless a decoder derives its inputs from them, and no KV cache."""
        inputs = {name: value for name, value in batch.items() if name not in self.label_names}
        if self.encoder_decoder and "decoder_input_ids" not in batch and "labels" in batch:
            inputs["labels"] = batch["labels"]
        if self._has_cache:
            inputs["use_cache"] = False
        return inputs

    def has_labels(self, batch: Mapping[str, Any]) -> bool:
        return all(name in batch for name in self.label_names)

    def rows(self, batch: Mapping[str, Any]) -> int:
        """The number of rows of the model per sample."""
        return 1

    def packed_rows(self, batch: Mapping[str, Any]) -> dict[str, list[int]]:
        """The rows of each sample in entries that hold the images or sounds of all samples one after the other."""
        return packed_rows(batch, self.config)

    def select(self, batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
        """These samples of a batch, with their images and sounds."""
        return rows_of(batch, rows, self.packed_rows(batch))

    # --- outputs ---

    def logits(self, output: Any) -> torch.Tensor:
        for name in ("logits", "last_hidden_state"):
            value = getattr(output, name, None)
            if isinstance(value, torch.Tensor):
                return value
        raise DataError(
            f"{type(output).__name__} has neither logits nor hidden states, so it cannot be scored; use another model."
        )

    def predictions(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """A class per sample, or per position; numbers where the model predicts numbers."""
        return logits.argmax(-1)

    def embeddings(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """The embedding of each sample for a model without classes, [batch x width]; None where there are classes."""
        return None

    # --- targets and losses ---

    def targets(self, batch: Mapping[str, Any], logits: torch.Tensor, labels: Labels = "given") -> torch.Tensor | None:
        """The labels in the format of `parts`, from the batch or predicted by the model; None where there are none."""
        if labels == "self":
            return self.own_targets(batch, logits)
        return self.given_targets(batch, logits) if self.has_labels(batch) else self.implied_targets(batch, logits)

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return batch["labels"]

    def implied_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor | None:
        """Targets without labels: language models predict their inputs."""
        return None

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return self.predictions(logits.detach(), batch)

    def at_real_tokens(self, predicted: torch.Tensor, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Predictions [batch x tokens] as targets, with padding ignored."""
        return predicted.masked_fill(~self.real_tokens(batch, logits), IGNORED)

    def reference(self, targets: torch.Tensor) -> torch.Tensor:
        """The values that predictions are compared with."""
        return targets

    def without_padding(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """The logits for a loss or a probability: where a softmax is over tokens, padding has none of it."""
        return logits

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        raise DataError(f"headprune has no loss for the task {self.name!r}; use a criterion without a loss.")

    def losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The task loss of each sample [batch], which gives per-sample gradients in one backward pass."""
        return self.parts(logits, targets).per_sample()

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """The count of each part of the loss in a batch [parts], before the model has run; None without targets.

        With the sums of each batch divided by the counts of all batches, the losses add up to that of one large batch.
        """
        return (batch["labels"] != IGNORED).sum().reshape(1) if self.has_labels(batch) else None

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of the batch as computed by the model."""
        parts = self.parts(logits, targets)
        if self.reduction == "sum":
            return parts.per_sample().sum()
        return (parts.sums.sum(0) / parts.counts.sum(0)).mean()

    def label_probabilities(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The probability of each sample's label [batch]; with a token axis, the mean over its labelled tokens."""
        if targets.is_floating_point():
            raise DataError(
                f"The task {self.name} has no single class per sample, so its labels have no probability; use another "
                "criterion."
            )
        probabilities = widened(logits).softmax(-1)
        picked = probabilities.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        if picked.dim() == 1:
            return picked
        counted = targets != IGNORED
        return (picked * counted).sum(1) / counted.sum(1).clamp_min(1)

    def check_classes(self, labels: torch.Tensor, logits: torch.Tensor) -> None:
        """Raise for labels that are not classes of the model, or have another shape than its predictions."""
        classes = logits.shape[-1]
        if labels.shape != logits.shape[:-1]:
            raise DataError(f"Labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}.")
        if labels.is_floating_point():
            raise DataError(f"Labels of the task {self.name!r} must be integers, not {labels.dtype}; convert them.")
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise DataError(
                f"Label {int(wrong[0])} is out of range: the model has {counted(classes, 'label')}, numbered "
                f"0 to {classes - 1}."
            )

    # --- masks of padding ---

    def has_decoder(self, batch: Mapping[str, Any]) -> bool:
        """Whether the batch has decoder tokens, or labels that a model makes them of; without them the decoder runs on
        those of the encoder."""
        given = "decoder_input_ids" in batch or "decoder_attention_mask" in batch
        return self.encoder_decoder and (given or _are_tokens(batch.get("labels")))

    def token_mask(self, batch: Mapping[str, Any], *, decoder: bool = False) -> torch.Tensor | None:
        """Bool [rows x tokens] of the decoder, or of the encoder (or only) stack; None where the batch has no mask."""
        mask = real_keys(batch.get("decoder_attention_mask" if decoder else "attention_mask"))
        if mask is not None or not decoder:
            return mask
        labels = batch.get("labels")
        return labels != IGNORED if labels is not None and labels.dim() == 2 else None

    def real_tokens(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Bool [batch x tokens] for the token axis of the logits: True where a token is not padding."""
        mask = self.fitted(self.token_mask(batch, decoder=self.has_decoder(batch)), logits.shape[1])
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask

    def site_tokens(self, site: Site, batch: Mapping[str, Any], tokens: int) -> torch.Tensor | None:
        """Which of the `tokens` per row at the output of a site are not padding; None where the batch has no mask."""
        if getattr(site, "stack", "") == "vision":
            return None
        decoder = self.has_decoder(batch) and getattr(site, "stack", "") == "decoder"
        return self.fitted(self.token_mask(batch, decoder=decoder), tokens)

    def key_tokens(self, site: Site, batch: Mapping[str, Any], tokens: int) -> torch.Tensor | None:
        """The same for the keys of a site, which in cross-attention are tokens of the other stack."""
        if getattr(site, "attention", "self") != "cross":
            return self.site_tokens(site, batch, tokens)
        if self.has_decoder(batch) and getattr(site, "stack", "") == "decoder":
            return self.fitted(self.token_mask(batch, decoder=False), tokens)
        return self.fitted(real_keys(batch.get("encoder_attention_mask")), tokens)

    def fitted(self, mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """The mask if it has this many tokens; for audio, a mask of frames computed from one of input samples."""
        if mask is None or mask.shape[-1] == tokens:
            return mask
        missing = -mask.shape[-1] % _window(self.config)
        if missing and mask.shape[-1] + missing == tokens:  # the model pads texts to whole windows
            return nn.functional.pad(mask, (0, missing))
        if mask.dim() != 2:
            return None
        for rule in self._length_rules:
            # A class may inherit the rule of another: that of its own gives the number of frames that there are.
            if _frames(rule, mask.new_tensor(mask.shape[-1], dtype=torch.long)) == tokens:
                lengths = [_frames(rule, length) for length in mask.sum(-1)]
                return torch.arange(tokens, device=mask.device) < mask.new_tensor(lengths, dtype=torch.long)[:, None]
        return None


def forward_arguments(model: nn.Module) -> set[str] | None:
    """The names of the arguments of the model's forward; None where it takes any."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else {*parameters}


def _window(config: Any) -> int:
    """The tokens of a window of local attention; 1 where there are none."""
    window = getattr(config, "attention_window", None) or getattr(config, "block_size", None)
    window = max(window) if isinstance(window, (list, tuple)) else window
    return window if isinstance(window, int) else 1


LengthRule = Callable[[torch.Tensor], Any]


def _length_rules(model: nn.Module) -> list[LengthRule]:
    """Methods of the model that map the length of a sound to a number of frames."""
    owners = (model, getattr(model, "base_model", None), getattr(getattr(model, "base_model", None), "encoder", None))
    names = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
    rules = [rule for owner in owners for name in names if callable(rule := getattr(owner, name, None))]
    return [*rules, *(functools.partial(rule, add_adapter=False) for rule in rules)]  # of layers before an adapter


def _frames(rule: LengthRule, length: torch.Tensor) -> int:
    """The number of frames of a sound of this length, a scalar: some rules take nothing else. -1 where the rule is for
    other inputs."""
    try:
        return int(rule(length))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return -1


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every position, 0 where the target is ignored.

    Without gradients, in blocks of positions, so that logits over a large vocabulary are not copied at once.
    """
    rows, classes = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    block = len(rows) if torch.is_grad_enabled() else max(1, BLOCK // rows.shape[-1])
    parts = [
        nn.functional.cross_entropy(
            widened(rows[start : start + block]),
            classes[start : start + block],
            ignore_index=IGNORED,
            reduction="none",
        )
        for start in range(0, max(len(rows), 1), block)
    ]
    return torch.cat(parts).view(targets.shape)


BLOCK = 1 << 20  # logits of a block


def counted_parts(losses: torch.Tensor, counted: torch.Tensor) -> Parts:
    """`Parts` with one part, from losses and a mask of those that count, [batch] or [batch x tokens]."""
    size = len(losses)
    sums = (losses * counted).reshape(size, -1).sum(1, keepdim=True)
    return Parts(sums, counted.reshape(size, -1).sum(1, keepdim=True).to(sums.dtype))


TASKS: list[type[Task]] = []


def task(kind: type[Task]) -> type[Task]:
    """Register a task; the table of tasks lists them in this order."""
    assert all(kind.name != registered.name for registered in TASKS), f"two tasks are called {kind.name}"
    TASKS.append(kind)
    return kind


def _are_tokens(labels: Any) -> bool:
    """Whether labels are a token, or none, for every position of a text."""
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()
