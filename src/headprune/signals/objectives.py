"""What is differentiated: a scalar per sample, as a tensor and the gradient that a backward pass starts with.

Where the gradient at the logits has a closed form it is written down instead of being recorded: a copy of the logits
less, which counts where a vocabulary is large.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from headprune.errors import DataError
from headprune.task import Task
from headprune.task.batch import real_keys, widened

BLOCK = 1 << 18  # signs that are drawn together
STRIDE = 0x9E3779B1  # from the seed of one draw to that of the next; the generator looks at 32 bits
NOT_CONTENT = ("labels", "attention_mask", "token_type_ids", "decoder_attention_mask", "pixel_mask")


def start_backward(
    objective: str,
    aggregation: str,
    task: Task,
    logits: torch.Tensor,
    targets: torch.Tensor | None,
    batch: Mapping[str, Any],
    *,
    draw: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor, gradient at it) of the objective: summed over samples, or one scalar for the whole batch. Random signs
    are others in every `draw`."""
    if objective == "loss":
        if targets is None:
            raise DataError(
                'This criterion needs labels and the batches have none; add a "labels" entry, or use labels="self" to '
                "take the model's own predictions."
            )
        losses = task.losses(logits, targets)
        scalar = losses.sum() if aggregation == "sample" else losses.mean()
        return scalar, torch.ones_like(scalar) if torch.isfinite(scalar) else torch.full_like(scalar, torch.nan)
    with torch.no_grad():
        if objective == "logit-norm":
            gradient, scalar = norm_gradient(task, logits, batch, aggregation)
        else:
            gradient, scalar = sign_gradient(task, logits, batch, draw), logits.sum(dtype=torch.float32)
        if not torch.isfinite(scalar):  # the gradient may well be finite, which would pass for a score
            gradient.fill_(torch.nan)
    return logits, gradient


def norm_gradient(
    task: Task, logits: torch.Tensor, batch: Mapping[str, Any], aggregation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the Euclidean norm of each sample's logits over its real tokens, or of the whole batch's, and the
    sum of the norms."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(logits.detach(), dim=-1, dtype=wide)  # [batch (x ..)]
    if task.per_token and logits.dim() == 3:
        lengths = lengths * task.real_tokens(batch, logits)
    norms = torch.linalg.vector_norm(lengths.flatten(1) if lengths.dim() > 1 else lengths[:, None], dim=1)
    if aggregation == "batch":
        norms = torch.linalg.vector_norm(norms).expand_as(norms)
    scale = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))  # 0 has the subgradient 0, as in autograd
    scale = scale.view(-1, *(1,) * (logits.dim() - 1)).expand(*logits.shape[:-1], 1)
    if task.per_token and logits.dim() == 3:
        scale = scale * task.real_tokens(batch, logits).unsqueeze(-1)
    return (logits.detach() * scale).to(logits.dtype), norms.sum()


def logit_norms(task: Task, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """The Euclidean norm of each sample's logits [batch], for those who differentiate it themselves."""
    logits = widened(logits)
    if task.per_token and logits.dim() == 3:
        logits = logits * task.real_tokens(batch, logits).unsqueeze(-1)
    return logits.flatten(1).norm(dim=1)


def sign_gradient(task: Task, logits: torch.Tensor, batch: Mapping[str, Any], draw: int = 0) -> torch.Tensor:
    """Gradient of the logits of each sample added up with random signs.

    The expected square of what it leads to is that of all logits together, from one backward pass. The signs of what
    one softmax goes over add up to 0, since adding a constant to all of it changes nothing. They follow from the
    sample's own content, so they do not depend on the batch it is in, and padding, wherever it stands, has none.
    """
    gradient = torch.zeros_like(logits.detach())
    real = task.real_tokens(batch, logits) if task.per_token and logits.dim() == 3 else None
    for row in range(len(logits)):
        generator = torch.Generator().manual_seed((content_seed(batch, row) + draw * STRIDE) % 2**32)
        if real is None:
            gradient[row] = vector_signs(logits[row].numel(), generator).view(logits.shape[1:]).to(gradient)
            continue
        places = real[row].nonzero().flatten()
        if task.over_tokens:
            signs = token_signs(len(places), logits.shape[-1], generator)
            gradient[row, places] = (signs - signs.mean(0)).to(gradient)
            continue
        for own in places.split(max(1, BLOCK // logits.shape[-1])):  # so that signs take no second copy of the logits
            signs = token_signs(len(own), logits.shape[-1], generator)
            gradient[row, own] = signs.sub_(signs.mean(-1, keepdim=True)).to(gradient)
    return gradient


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
    """Independent signs [tokens x classes]; a token takes as many bytes whatever comes before it."""
    drawn = torch.randint(0, 256, (tokens, -(-classes // 8)), generator=generator, dtype=torch.uint8)
    return _SIGNS_OF_BYTE[drawn.long()].flatten(1)[:, :classes]


def content_seed(batch: Mapping[str, Any], row: int) -> int:
    """A number that follows from a sample's content, whatever batch it is in and however it is padded."""
    name, value = next((n, v) for n, v in batch.items() if isinstance(v, torch.Tensor) and n not in NOT_CONTENT)
    mask = batch.get("attention_mask")
    content = value[row]
    if isinstance(mask, torch.Tensor) and name == "input_ids":
        real = mask.bool() if mask.shape == value.shape else real_keys(mask)
        if real is not None and real.shape == value.shape:
            content = content[real[row]]
    return zlib.crc32(content.detach().cpu().double().numpy().tobytes())
