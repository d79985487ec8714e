"""The order of training rows: every row once, similar lengths together, the same after a resume."""

from __future__ import annotations

import random

import torch

from headprune.training.samplers import POOL, SimilarLengthSampler, row_lengths

LENGTHS = random.Random(0).choices(range(3, 61), k=1003)


def batches(order: list[int], size: int) -> list[list[int]]:
    return [order[at : at + size] for at in range(0, len(order), size)]


def padded(order: list[int], size: int) -> int:
    """Tokens of all batches, with padding."""
    return sum(len(batch) * max(LENGTHS[row] for row in batch) for batch in batches(order, size))


def test_every_row_once_and_little_padding() -> None:
    order = list(SimilarLengthSampler(LENGTHS, 8, seed=0))
    assert sorted(order) == list(range(len(LENGTHS)))
    drawn = random.Random(1).sample(range(len(LENGTHS)), len(LENGTHS))
    assert padded(order, 8) < 1.1 * sum(LENGTHS) < padded(drawn, 8)


def test_batches_of_all_lengths_are_mixed() -> None:
    """Were they in order of length, the last ones a model sees would all be short, or all long."""
    shown = [LENGTHS[batch[0]] for batch in batches(list(SimilarLengthSampler(LENGTHS, 8, seed=0)), 8)[:-1]]
    first, second = shown[: len(shown) // 2], shown[len(shown) // 2 :]
    assert abs(sum(first) / len(first) - sum(second) / len(second)) < 10
    assert shown != sorted(shown)
    assert shown != sorted(shown, reverse=True)


def test_epochs_and_seeds_differ_and_an_epoch_is_itself() -> None:
    sampler = SimilarLengthSampler(LENGTHS, 8, seed=0)
    first = list(sampler)
    sampler.epoch = 1
    second = list(sampler)
    assert first != second
    sampler.epoch = 0
    assert list(sampler) == first
    assert list(SimilarLengthSampler(LENGTHS, 8, seed=1)) not in (first, second)


def test_only_the_last_batch_is_not_full() -> None:
    size = 4
    count = POOL * size + 7  # the second pool has a rest, the first has none
    order = list(SimilarLengthSampler(LENGTHS[:count], size, seed=0))
    assert sorted(order) == list(range(count))
    # Were the rest of a pool in the midst, all batches after it would be of two batches each.
    spread = [max(LENGTHS[row] for row in batch) - min(LENGTHS[row] for row in batch) for batch in batches(order, size)]
    assert sorted(spread)[-4:][0] <= 6


def test_lengths_of_rows() -> None:
    rows = [{"input_ids": torch.zeros(length, dtype=torch.long)} for length in (3, 5)]
    assert row_lengths(rows) == [3, 5]
    assert row_lengths(rows[:1] * 2) is None  # all alike: plain shuffling will do
    assert row_lengths([{"pixel_values": torch.zeros(3, 2, 2)}]) is None
    assert row_lengths([]) is None
