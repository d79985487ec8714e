"""Runs a GGUF file: log-probabilities of every next token, one prefix after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.gguf.server import Llama
from headprune.exports.runtime import Outputs, Runner


class GgufRunner(Runner):
    """llama.cpp returns probabilities of the next token only, so each prefix of a text is a request, with the KV cache
    of the previous one."""

    def __init__(self, file: Path, *, context: int, threads: int | None = None) -> None:
        self._llama = Llama(file, context=context, threads=threads)
        self.vocabulary, self.context = self._llama.vocabulary, self._llama.context

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        last: int | None = None,
        **ignored: Any,
    ) -> Outputs:
        """Log-probabilities [batch x tokens x vocabulary], zeros at padding; with `last`, only those of the last
        positions of each row, and zeros at the others."""
        if input_ids is None:
            raise ExportError("A GGUF model reads token ids, so it needs input_ids.")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        for row, (ids, real) in enumerate(zip(input_ids, mask.bool(), strict=True)):
            positions = real.nonzero().flatten().tolist()
            text = ids[real].tolist()
            for count in range(max(0, len(text) - last) if last else 0, len(text)):
                logits[row, positions[count]] = self.next_log_probabilities(text[: count + 1])
        return Outputs(logits=logits)

    def next_log_probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every token after these, [vocabulary]."""
        self._check_length(len(ids), 1)
        candidates = self._llama.next(list(ids), candidates=self.vocabulary)
        numbers, values = zip(*candidates, strict=True)
        result = torch.full((self.vocabulary,), float("-inf"))
        result[list(numbers)] = torch.tensor(values)
        return result

    def generate(self, inputs: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
        ids = inputs["input_ids"].reshape(-1)
        if inputs.get("attention_mask") is not None:
            ids = ids[inputs["attention_mask"].reshape(-1).bool()]
        self._check_length(len(ids), tokens)
        sequence: list[int] = ids.tolist()
        for _ in range(tokens):
            sequence.append(self._llama.next(sequence, candidates=1)[0][0])
        return sequence[len(ids) :]

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text in llama.cpp."""
        return self._llama.tokenize(text)

    def close(self) -> None:
        self._llama.close()

    def _check_length(self, prompt: int, tokens: int) -> None:
        if not prompt:
            raise ExportError("llama.cpp needs a prompt of at least one token.")
        if prompt + tokens > self.context:
            raise ExportError(
                f"{prompt} tokens and {tokens} more exceed the context of {self.context} of this file; use "
                "shorter texts."
            )
