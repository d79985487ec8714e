"""Calling exported programs as the model is called, whatever runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.runtimes.programs.causal import KNOWN
from headprune.runtimes.programs.seq2seq import STATES
from headprune.runtimes.programs.spec import Form, Tensors
from headprune.runtimes.spec import Outputs, Runner
from headprune.runtimes.words import reason

PAST = "past_key_values."


class Part:
    """One program in its runtime: how it is called, and the shapes of its inputs, None where a length is free."""

    def __init__(self, call: Callable[[Tensors], Tensors], shapes: Mapping[str, tuple[int | None, ...]]) -> None:
        self.call, self.shapes = call, shapes

    def __call__(self, inputs: Mapping[str, Any]) -> Tensors:
        missing = sorted(name for name in self.shapes if name not in inputs)
        if missing:
            raise ExportError(f"The exported model takes {', '.join(self.shapes)}; {missing[0]} is missing.")
        taken = {name: inputs[name] for name in self.shapes}
        rows = max(len(tensor) for tensor in taken.values())
        if rows == 1 or any(shape[0] != 1 for shape in self.shapes.values()):
            return self._called(taken)
        each = [self._called({name: tensor[row : row + 1] for name, tensor in taken.items()}) for row in range(rows)]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}

    def _called(self, inputs: Tensors) -> Tensors:
        try:
            return self.call(inputs)
        except Exception as error:  # every runtime has kinds of its own
            raise ExportError(f"The exported model does not run on this input ({reason(error)}).") from error

    def nothing_remembered(self, rows: int) -> Tensors:
        """What layers remember before the first token."""
        return {
            name: torch.zeros(rows, int(shape[1] or 0), 0, int(shape[3] or 0))
            for name, shape in self.shapes.items()
            if name.startswith(PAST) and ".encoder." not in name
        }


class ProgramRunner(Runner):
    """Runs a model of one program, or of an encoder and a decoder."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts

    def __call__(self, **inputs: Any) -> Outputs:
        if "decoder" in self.parts:
            fed = self._read(inputs)
            ids = inputs.get("decoder_input_ids")
            if ids is None:
                raise ExportError("The exported decoder takes decoder_input_ids; labels are not turned into them here.")
            mask = inputs.get("decoder_attention_mask")
            return Outputs(**self._next("decoder", ids, mask, fed))
        part = self.parts["model"]
        if "attention_mask" in part.shapes and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if self._continues:
            return Outputs(**self._next("model", inputs["input_ids"], inputs["attention_mask"], {}, inputs))
        return Outputs(**part(inputs))

    @property
    def _continues(self) -> bool:
        shapes = self.parts["model"].shapes
        return any(name.startswith(PAST) for name in shapes)

    @property
    def form(self) -> Form:
        """How it is called, again and again or once."""
        return "seq2seq" if "decoder" in self.parts else "causal" if self._continues else "plain"

    def can_generate(self) -> bool:
        own = self.parts["decoder" if "decoder" in self.parts else "model"].shapes
        return "decoder" in self.parts or all(name in KNOWN or name.startswith(PAST) for name in own)

    def _read(self, inputs: Mapping[str, Any]) -> Tensors:
        """What the encoder leaves for every step of the decoder."""
        encoder, decoder = self.parts["encoder"], self.parts["decoder"]
        given = dict(inputs)
        if "attention_mask" in encoder.shapes and given.get("attention_mask") is None:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        found = encoder(given)
        fed = {name.replace("present.", PAST): value for name, value in found.items() if name != STATES}
        fed[STATES] = found[STATES]
        if "encoder_attention_mask" in decoder.shapes:
            fed["encoder_attention_mask"] = given["attention_mask"]
        return fed

    def _next(
        self,
        name: str,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        fed: Tensors,
        given: Mapping[str, Any] | None = None,
    ) -> Tensors:
        """The decoder on new tokens; `mask` covers the earlier ones too."""
        part = self.parts[name]
        past = {**part.nothing_remembered(len(ids)), **fed}
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (given or {}).get("position_ids")
        if positions is None:
            positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1]).expand(len(ids), -1)
        return part({**past, "input_ids": ids, "attention_mask": mask, "position_ids": positions})

    def generate(self, inputs: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
        name = "decoder" if "decoder" in self.parts else "model"
        if "input_ids" not in self.parts[name].shapes:
            return super().generate(inputs, tokens)
        fed = self._read(inputs) if name == "decoder" else {}
        new = inputs["decoder_input_ids"] if name == "decoder" else inputs["input_ids"]
        every, found = new, []
        cached = any(key.startswith(PAST) for key in self.parts[name].shapes)
        for _ in range(tokens):
            given = new if cached else every  # nothing is remembered where no layer attends
            output = self._next(name, given, torch.ones_like(every), fed)
            new = output["logits"][:, -1:].argmax(-1)
            found.append(int(new[0, 0]))
            every = torch.cat([every, new], dim=1)
            fed = {**fed, **{key.replace("present.", PAST): value for key, value in output.items() if key != "logits"}}
        return found
