"""Which sample each row of an activation belongs to; its rows are all axes but the last.

Most activations are [samples, tokens, features]. Windowed attention has the windows of all images as its first axis,
and some vision towers have the patches of all images in one row. For these there are guesses: as many rows for every
sample, or as many as the batch itself says. A guess holds for a module once its rows of a sample equal those of a run
of that sample alone. Where none holds, `NotPerSampleError` asks for one sample at a time, which is always exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.batches import batch_size, widened
from headprune.errors import DataError
from headprune.hooks.attach import hooks
from headprune.hooks.logit_blocks import few_logits
from headprune.hooks.module_paths import layer_path
from headprune.hooks.outputs import TOLERANCE, evaluating
from headprune.tasks import Task
from headprune.units import Site

EQUAL = "equal"  # the guess of as many rows for every sample; other guesses have the name of an entry of the batch

# By model and path of a module: the guesses that have held for its rows. There may be several while batches do not tell
# them apart, as those with images of one size.
_holding: WeakKeyDictionary[nn.Module, dict[str, set[str]]] = WeakKeyDictionary()


class NotPerSampleError(Exception):
    """The rows of an activation cannot be separated by sample, so samples have to run one at a time."""


class UnverifiedRowsError(Exception):
    """There are guesses for the rows of an activation, and none has been verified yet."""


class RowSamples:
    """The samples of the rows of activations, for one batch."""

    def __init__(self, model: PreTrainedModel, task: Task, batch: Mapping[str, Any]) -> None:
        self.model, self.task, self.batch = model, task, batch
        self.size, self.first_axis = batch_size(batch), batch_size(batch) * task.rows(batch)
        self.packed: dict[str, list[int]] = {}
        self.uneven = True  # whether samples have different numbers of images, or it is unknown
        with suppress(DataError):  # which is raised again where this batch has to be split
            self.packed = task.packed_rows(batch)
            self.uneven = any(len(set(counts)) > 1 for counts in self.packed.values())
        self._verified = False  # whether guesses were tried on this batch

    def counts(self, path: str, shape: torch.Size) -> list[int]:
        """How many rows each sample has, one sample after the other, in an activation of the module at `path`."""
        rows = shape[:-1].numel()
        if self.size == 1 or not rows:
            return [rows] * self.size
        if self._is_plain(shape):
            return [rows // self.size] * self.size
        guesses = self._guesses(rows)
        holding = _holding.setdefault(self.model, {}).get(path, set(guesses))
        possible = {tuple(counts) for guess, counts in guesses.items() if guess in holding}
        if not possible:
            raise NotPerSampleError
        if path not in _holding[self.model] or len(possible) > 1:
            raise NotPerSampleError if self._verified else UnverifiedRowsError
        return list(possible.pop())

    def split(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, features], with zeros after the tokens of samples that have fewer."""
        counts = self.counts(path, tensor.shape)
        if len(set(counts)) == 1:
            return tensor.reshape(self.size, counts[0], tensor.shape[-1])
        return pad_sequence(list(tensor.flatten(0, -2).split(counts)), batch_first=True)

    def of_logits(self, logits: Any) -> Any:
        """The logits, or `States` for them, with samples as their first axis; a vision tower may have the patches of
        all images there."""
        if logits.shape[0] == self.size:
            return logits
        if self.size > 1:
            raise NotPerSampleError
        return logits.unsqueeze(0)

    def per_sample(self, path: str, length: int) -> int:
        """How many entries each sample has on the first axis, of this length, of the attention probabilities of the
        site whose output map is at `path`: windows, or choices."""
        if self.size == 1 or (length == self.first_axis and not self.uneven):
            return length // self.size
        counts = self.counts(path, torch.Size((length, 1)))
        if len(set(counts)) > 1:
            raise NotPerSampleError
        return counts[0]

    def verify(self, sites: Sequence[Site]) -> None:
        """Try the guesses at all modules of these sites on this batch."""
        self._verified = True
        paths = dict.fromkeys(
            path for site in sites if site.kept for path in (site.o, *site.maps, layer_path(site.path))
        )
        # A sample with many images, as one without any has no rows to compare.
        tested = max(range(self.size), key=lambda row: (sum(counts[row] for counts in self.packed.values()), row))
        single = self.task.select(self.batch, slice(tested, tested + 1))
        together = self._prints(paths, self.batch)
        try:
            alone = self._prints(paths, single)
        except (RuntimeError, ValueError, IndexError):
            refuse_inseparable(self.model, self.task, single)
            raise
        for path in paths:
            prints = together.get(path, [])
            if all(self._is_plain(torch.Size((*shape, 1))) for shape, _ in prints):
                continue
            verdicts = {
                guess: self._verdict(guess, tested, prints, alone.get(path, [])) for guess in (*self.packed, EQUAL)
            }
            if None not in verdicts.values():
                held = _holding[self.model].get(path, set(verdicts))
                _holding[self.model][path] = {guess for guess in held if verdicts.get(guess, True)}

    def _is_plain(self, shape: torch.Size) -> bool:
        """Whether the first axis is certainly that of the samples: not where the second has their number too, nor
        where images are not one or several per sample."""
        return len(shape) > 2 and shape[0] == self.first_axis and shape[1] != self.first_axis and not self.uneven

    def _guesses(self, rows: int) -> dict[str, list[int]]:
        guesses = {EQUAL: [rows // self.size] * self.size} if rows % self.size == 0 else {}
        for name, counts in self.packed.items():
            scaled = [count * rows for count in counts]
            if all(count % sum(counts) == 0 for count in scaled):
                guesses[name] = [count // sum(counts) for count in scaled]
        return guesses

    def _verdict(self, guess: str, tested: int, together: Sequence[Print], alone: Sequence[Print]) -> bool | None:
        """Whether a guess holds in all applications of a module; None where the samples do not differ enough to
        tell."""
        if len(together) != len(alone):
            return False
        differ = False
        for (_, prints), (_, prints_alone) in zip(together, alone, strict=True):
            counts = self._guesses(len(prints)).get(guess)
            if counts is None:
                return False
            parts = prints.split(counts)
            if not _close(parts[tested], prints_alone):
                return False
            differ |= not all(_close(part, prints_alone) for part in parts)
        return True if differ else None

    def _prints(self, paths: Mapping[str, None], batch: Mapping[str, Any]) -> dict[str, list[Print]]:
        """A number for every row of the outputs of modules, application after application."""
        prints: dict[str, list[Print]] = {}

        def hook(path: str) -> Callable[..., None]:
            def record(module: nn.Module, args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, (tuple, list)) else output
                if isinstance(output, torch.Tensor) and output.dim() > 1:
                    values = widened(output.detach()).flatten(0, -2)
                    weights = torch.arange(values.shape[-1], device=values.device).to(values).cos()
                    prints.setdefault(path, []).append((output.shape[:-1], (values @ weights).to(output.dtype)))

            return record

        pairs = [(self.model.get_submodule(path), hook(path)) for path in paths]
        with torch.no_grad(), evaluating(self.model), hooks(pairs):
            self.model(**few_logits(self.model, self.task.inputs(batch)))
        return prints


def refuse_inseparable(model: PreTrainedModel, task: Task, single: Mapping[str, Any]) -> None:
    """Refuse a batch of which this sample does not run alone, as a tower of sounds or images whose entries are laid out
    in a way that is not known."""
    try:
        with torch.no_grad(), evaluating(model):
            model(**few_logits(model, task.inputs(single)))
    except Exception as error:  # whatever the code of a model raises on entries that do not fit together
        raise DataError(
            f"The rows of this batch cannot be separated by sample, as {type(model).__name__} does not run on one of "
            f"its samples alone ({' '.join(str(error).split())[:200]}); give batches of one sample."
        ) from None


Print = tuple[torch.Size, torch.Tensor]  # the axes of the rows of an activation, and a number for every row


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = other.abs().max() if other.numel() else other.new_zeros(())
    return bool(((one - other).abs() <= TOLERANCE.get(one.dtype, 1e-4) * scale).all())
