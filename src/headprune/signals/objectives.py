"""What is differentiated: a scalar per sample, as a tensor and the gradient that a backward pass starts with.

Where the gradient at the logits has a closed form, it is computed directly instead of by autograd. This saves a copy of
the logits, which matters for a large vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from headprune.batches import real_keys, widened
from headprune.errors import DataError
from headprune.hooks.logit_blocks import Start, States
from headprune.tasks import IGNORED, Labels, Task

BLOCK = 1 << 18  # signs that are drawn together
STRIDE = 0x9E3779B1  # between the seeds of two draws; the generator uses 32 bits
WITH_MASK = ("input_ids", "inputs_embeds", "input_values", "input_features", "bbox")  # which the attention mask is for
# Ends of the names of entries that say nothing of a sample that others do not say, or that are padded without a mask.
NOT_CONTENT = (
    *("labels", "decoder_input_ids", "decoder_inputs_embeds", "_positions"),
    *("mask", "token_type_ids", "position_ids", "cache_position"),
)


def start_backward(
    objective: str,
    aggregation: str,
    task: Task,
    logits: torch.Tensor | States,
    targets: torch.Tensor | None,
    batch: Mapping[str, Any],
    *,
    draw: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor, gradient at it) of the objective: summed over samples, or one scalar for the whole batch. Random signs
    differ in every `draw`. Of logits in blocks the tensor is the hidden states that they are computed from."""
    if objective in WITH_TARGETS and targets is None:
        raise DataError(
            'This criterion needs labels and the batches have none; add a "labels" entry, or use labels="self" to '
            "take the model's predictions."
        )
    if isinstance(logits, States):
        return logits.hidden, _in_blocks(objective, aggregation, task, logits, targets, batch, draw)
    if targets is not None and objective in WITH_TARGETS:
        values = WITH_TARGETS[objective](task, task.without_padding(logits, batch), targets)
        scalar = values.sum() if aggregation == "sample" else values.mean()
        return scalar, torch.ones_like(scalar) if torch.isfinite(scalar) else torch.full_like(scalar, torch.nan)
    with torch.no_grad():
        if objective == "logit-norm":
            gradient, scalar = norm_gradient(task, logits, batch, aggregation)
        else:
            gradient, scalar = sign_gradient(task, logits, batch, draw), logits.sum(dtype=torch.float32)
        if not torch.isfinite(scalar):  # the gradient may be finite all the same
            gradient.fill_(torch.nan)
    return logits, gradient


# The objective of each sample where targets are known; means over its tokens with a target.
WITH_TARGETS: dict[str, Callable[[Task, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "loss": lambda task, logits, targets: task.losses(logits, targets),
    "label-probability": lambda task, logits, targets: task.label_probabilities(logits, targets),
}


def _in_blocks(
    objective: str,
    aggregation: str,
    task: Task,
    states: States,
    targets: torch.Tensor | None,
    batch: Mapping[str, Any],
    draw: int,
) -> torch.Tensor:
    """The gradient at the hidden states, from blocks of logits, one in memory at a time."""
    scalars: list[torch.Tensor] = []
    start: Start
    if targets is not None and objective in WITH_TARGETS:
        start = _means(objective, aggregation, task, targets, scalars)
    elif objective == "logit-norm":
        lengths = torch.cat([token_lengths(block) for block in states.blocks()], dim=1)
        scale, norm = norm_scale(task, lengths, states.like, batch, aggregation)
        scalars.append(norm)

        def start(logits: torch.Tensor, window: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return logits, (logits.detach() * scale[:, window]).to(logits.dtype)

    else:
        signs = TokenSigns(task, states.like, batch, draw)

        def start(logits: torch.Tensor, window: slice) -> tuple[torch.Tensor, torch.Tensor]:
            scalars.append(logits.detach().sum(dtype=torch.float32))
            return logits, signs.gradient(logits.detach(), window)

    gradient = states.gradient(start)
    return gradient if torch.isfinite(torch.stack(scalars).sum()) else gradient.fill_(torch.nan)


def _means(objective: str, aggregation: str, task: Task, targets: torch.Tensor, scalars: list[torch.Tensor]) -> Start:
    """The part of a block in the mean over a sample's tokens with a target."""
    counted = targets != IGNORED
    whole = counted.sum(1).clamp_min(1)

    def start(logits: torch.Tensor, window: slice) -> tuple[torch.Tensor, torch.Tensor]:
        values = WITH_TARGETS[objective](task, logits, targets[:, window]) * counted[:, window].sum(1) / whole
        scalars.append(values.detach().sum())
        scalar = values.sum() if aggregation == "sample" else values.mean()
        return scalar, torch.ones_like(scalar)

    return start


def targets_of(task: Task, batch: Mapping[str, Any], logits: torch.Tensor | States, labels: Labels) -> Any:
    """The targets of a batch: its labels, or the predictions of the model itself."""
    if not isinstance(logits, States):
        return task.targets(batch, logits.detach(), labels)
    if labels == "self":
        predicted = torch.cat([block.argmax(-1) for block in logits.blocks()], dim=1)
        return task.at_real_tokens(predicted, batch, logits.like)
    return task.targets(batch, logits.like, labels)


def norm_gradient(
    task: Task, logits: torch.Tensor, batch: Mapping[str, Any], aggregation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the Euclidean norm of each sample's logits over its real tokens, or of the whole batch's, and the
    sum of the norms."""
    scale, norm = norm_scale(task, token_lengths(logits), logits, batch, aggregation)
    return (logits.detach() * scale).to(logits.dtype), norm


def token_lengths(logits: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of the logits at every position, [batch (x ..)]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.linalg.vector_norm(logits.detach(), dim=-1, dtype=wide)


def norm_scale(
    task: Task, lengths: torch.Tensor, logits: torch.Tensor, batch: Mapping[str, Any], aggregation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor [batch (x ..) x 1] by which logits of these lengths give the gradient of their norm, and the sum of
    the norms."""
    real = task.real_tokens(batch, logits) if task.per_token and logits.dim() == 3 else None
    if real is not None:
        lengths = lengths * real
    norms = torch.linalg.vector_norm(lengths.flatten(1) if lengths.dim() > 1 else lengths[:, None], dim=1)
    if aggregation == "batch":
        norms = torch.linalg.vector_norm(norms).expand_as(norms)
    scale = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))  # 0 has the subgradient 0, as in autograd
    scale = scale.view(-1, *(1,) * (logits.dim() - 1)).expand(*logits.shape[:-1], 1)
    return scale if real is None else scale * real.unsqueeze(-1), norms.sum()


def logit_norms(task: Task, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """The Euclidean norm of each sample's logits [batch], differentiable by autograd."""
    logits = widened(logits)
    if task.per_token and logits.dim() == 3:
        logits = logits * task.real_tokens(batch, logits).unsqueeze(-1)
    return logits.flatten(1).norm(dim=1)


def sign_gradient(task: Task, logits: torch.Tensor, batch: Mapping[str, Any], draw: int = 0) -> torch.Tensor:
    """Gradient of the sum of each sample's logits with random signs.

    Its expected square, from one backward pass, equals the sum of squares over all logits. The signs within one softmax
    add up to 0, since adding a constant to all of its logits changes nothing. They are seeded by the content of the
    sample, so they do not depend on its batch, and padding has none.
    """
    if task.per_token and logits.dim() == 3 and not task.over_tokens:
        return TokenSigns(task, logits, batch, draw).gradient(logits.detach())
    gradient = torch.zeros_like(logits.detach())
    real = task.real_tokens(batch, logits) if task.per_token and logits.dim() == 3 else None
    for row, generator in enumerate(_generators(task, batch, len(logits), draw)):
        if real is None:
            gradient[row] = vector_signs(logits[row].numel(), generator).view(logits.shape[1:]).to(gradient)
        else:
            positions = real[row].nonzero().flatten()
            signs = token_signs(len(positions), logits.shape[-1], generator)
            gradient[row, positions] = (signs - signs.mean(0)).to(gradient)
    return gradient


class TokenSigns:
    """Signs of real tokens with a softmax over classes, drawn in the order of tokens: the same for blocks of tokens,
    one after the other, as for all at once."""

    def __init__(self, task: Task, logits: torch.Tensor, batch: Mapping[str, Any], draw: int) -> None:
        self.real = task.real_tokens(batch, logits)
        self.generators = _generators(task, batch, len(logits), draw)

    def gradient(self, logits: torch.Tensor, window: slice = slice(None)) -> torch.Tensor:
        """The gradient of the logits of these tokens, which follow those of the last call."""
        gradient = torch.zeros_like(logits)
        classes = logits.shape[-1]
        for row, generator in enumerate(self.generators):
            positions = self.real[row, window].nonzero().flatten()
            for block in positions.split(max(1, BLOCK // classes)):  # so that signs need less memory than the logits
                signs = token_signs(len(block), classes, generator)
                gradient[row, block] = signs.sub_(signs.mean(-1, keepdim=True)).to(gradient)
        return gradient


def _generators(task: Task, batch: Mapping[str, Any], rows: int, draw: int) -> list[torch.Generator]:
    samples = [task.select(batch, slice(row, row + 1)) for row in range(rows)]
    seeds = [(content_seed(sample) + draw * STRIDE) % 2**32 for sample in samples]
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def vector_signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Half of a sample's numbers count positive and half negative; of an odd count one is left out."""
    if count == 1:
        return torch.ones(1)
    order = torch.randperm(count, generator=generator)
    half = count // 2
    return torch.zeros(count).index_fill_(0, order[:half], 1.0).index_fill_(0, order[half : 2 * half], -1.0)


# One random byte gives eight signs: drawing them one by one takes longer than the backward pass of a large vocabulary.
_SIGNS_OF_BYTE = torch.tensor([[1.0 if byte >> bit & 1 else -1.0 for bit in range(8)] for byte in range(256)])


def token_signs(tokens: int, classes: int, generator: torch.Generator) -> torch.Tensor:
    """Independent signs [tokens x classes]; each token uses the same number of random bytes."""
    drawn = torch.randint(0, 256, (tokens, -(-classes // 8)), generator=generator, dtype=torch.uint8)
    return _SIGNS_OF_BYTE[drawn.long()].flatten(1)[:, :classes]


def content_seed(sample: Mapping[str, Any]) -> int:
    """A seed from the content of a sample, a batch of one, whatever batch and padding it comes from."""
    return zlib.crc32(next(_contents(sample), b""))


def content_key(sample: Mapping[str, Any]) -> int:
    """A number from all the content of a sample, to sort samples by."""
    key = 0
    for content in _contents(sample):
        key = zlib.crc32(content, key)
    return key


def _contents(sample: Mapping[str, Any]) -> Iterator[bytes]:
    """The entries of a sample that are its content, without padding, in an order that is not that of the batch."""
    mask = sample.get("attention_mask")
    for name in sorted(sample, key=lambda name: (name not in WITH_MASK, name)):
        value = sample[name]
        if not isinstance(value, torch.Tensor) or not value.dim() or name.endswith(NOT_CONTENT):
            continue
        content = value[0] if len(value) == 1 else value
        if isinstance(mask, torch.Tensor) and name in WITH_MASK:
            real = mask.bool() if mask.dim() == 2 or mask.shape == value.shape else real_keys(mask)
            if real is not None and real.shape == value.shape[: real.dim()]:
                content = content[real[0]]
        yield content.detach().cpu().double().numpy().tobytes()
