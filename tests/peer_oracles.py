"""The slow, obvious truth about the criteria of other training-free methods: loops over units, columns and tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from oracles import Oracle


def given(oracle: Oracle) -> dict[int, torch.Tensor]:
    """What each output map is given for every token of the data, [tokens x columns]."""
    parts: dict[int, list[torch.Tensor]] = {}
    for sample in oracle.samples:
        with torch.no_grad(), oracle.head_outputs() as seen:
            oracle.logits(sample)
        for site, columns in seen:
            parts.setdefault(site.index, []).append(columns.reshape(-1, columns.shape[-1]))
    return {index: torch.cat(own) for index, own in parts.items()}


def fluctuation(oracle: Oracle, *, standardize: bool = False) -> torch.Tensor:
    result, seen = oracle.blank(), given(oracle)
    for site in oracle.sites:
        if not site.kept:
            continue
        weight, tokens = oracle.weight(site.o), seen[site.index]
        values = [
            statistics.pvariance(tokens[:, column].tolist()) * float(weight[:, column].square().sum())
            for column in range(weight.shape[1])
        ]
        if standardize:
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            values = [(value - mean) / deviation for value in values]
        for position, member in enumerate(site.kept):
            own = values[position * site.width : (position + 1) * site.width]
            result[site.index, member] = statistics.mean(own) if standardize else sum(own)
    return result


def wanda(oracle: Oracle) -> torch.Tensor:
    result, seen = oracle.blank(), given(oracle)
    for site, member, position in oracle.heads():
        weight, tokens = oracle.weight(site.o), seen[site.index]
        total = 0.0
        for column in range(position * site.width, (position + 1) * site.width):
            size = float(tokens[:, column].square().mean().sqrt())
            total += sum(abs(float(weight[row, column])) * size for row in range(len(weight)))
        result[site.index, member] = total
    return result


def fisher(oracle: Oracle) -> torch.Tensor:
    """One gate per unit: its gradient is the sum of its members', and each member has the unit's square."""
    result = oracle.only_kept(torch.zeros(oracle.blank().shape, dtype=torch.float64))
    for gradient in oracle.gate_gradients():
        for site in oracle.sites:
            for unit in site.units():
                own = sum(float(gradient[member]) for member in unit) ** 2
                for member in unit:
                    result[member] += own
    return result


def effect(gradients: torch.Tensor, units: Sequence[int]) -> float:
    """1^T F 1 over these units, F the sum over samples of g g^T."""
    matrix = sum(torch.outer(own, own) for own in gradients)
    return sum(float(matrix[one, other]) for one in units for other in units)
