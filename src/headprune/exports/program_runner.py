"""Calls exported programs with the inputs of the model, in any runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.programs.causal import TOKEN_INPUTS
from headprune.exports.programs.seq2seq import STATES
from headprune.exports.programs.spec import Form, Tensors
from headprune.exports.quiet import reason
from headprune.exports.runtime import Outputs, Runner

PAST = "past_key_values."


class Part:
    """One program in its runtime: a function that calls it, and the shapes of its inputs, None where a length is
    free."""

    def __init__(self, call: Callable[[Tensors], Tensors], shapes: Mapping[str, tuple[int | None, ...]]) -> None:
        self.call, self.shapes = call, shapes

    def __call__(self, inputs: Mapping[str, Any]) -> Tensors:
        missing = sorted(name for name in self.shapes if name not in inputs)
        if missing:
            raise ExportError(f"The exported model takes {', '.join(self.shapes)}; {missing[0]} is missing.")
        arguments = {name: inputs[name] for name in self.shapes}
        rows = max(len(tensor) for tensor in arguments.values())
        if rows == 1 or any(shape[0] != 1 for shape in self.shapes.values()):
            return self._call_once(arguments)
        each = [
            self._call_once({name: tensor[row : row + 1] for name, tensor in arguments.items()}) for row in range(rows)
        ]
        return {name: torch.cat([part[name] for part in each]) for name in each[0]}

    def _call_once(self, inputs: Tensors) -> Tensors:
        try:
            return self.call(inputs)
        except Exception as error:  # every runtime has its own errors
            raise ExportError(f"The exported model does not run on this input ({reason(error)}).") from error

    def empty_cache(self, rows: int) -> Tensors:
        """The KV cache before the first token."""
        return {
            name: torch.zeros(rows, int(shape[1] or 0), 0, int(shape[3] or 0))
            for name, shape in self.shapes.items()
            if name.startswith(PAST) and ".encoder." not in name
        }


class ProgramRunner(Runner):
    """Runs a model of one program, or of an encoder and a decoder."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts

    @property
    def shapes(self) -> dict[str, Mapping[str, tuple[int | None, ...]]]:
        """The shapes of the inputs of each program."""
        return {name: part.shapes for name, part in self.parts.items()}

    def __call__(self, **inputs: Any) -> Outputs:
        if "decoder" in self.parts:
            cache = self._encode(inputs)
            ids = inputs.get("decoder_input_ids")
            if ids is None:
                raise ExportError("The exported decoder takes decoder_input_ids; labels are not turned into them here.")
            mask = inputs.get("decoder_attention_mask")
            return Outputs(**self._decode("decoder", ids, mask, cache))
        part = self.parts["model"]
        if "attention_mask" in part.shapes and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if self._has_cache:
            return Outputs(**self._decode("model", inputs["input_ids"], inputs["attention_mask"], {}, inputs))
        return Outputs(**part(inputs))

    @property
    def _has_cache(self) -> bool:
        shapes = self.parts["model"].shapes
        return any(name.startswith(PAST) for name in shapes)

    @property
    def form(self) -> Form:
        """Whether it is one pass, a decoder with a KV cache, or an encoder and a decoder."""
        return "seq2seq" if "decoder" in self.parts else "causal" if self._has_cache else "plain"

    def can_generate(self) -> bool:
        names = self.parts["decoder" if "decoder" in self.parts else "model"].shapes
        return "decoder" in self.parts or all(name in TOKEN_INPUTS or name.startswith(PAST) for name in names)

    def _encode(self, inputs: Mapping[str, Any]) -> Tensors:
        """The inputs of every step of the decoder that come from the encoder."""
        encoder, decoder = self.parts["encoder"], self.parts["decoder"]
        arguments = dict(inputs)
        if "attention_mask" in encoder.shapes and arguments.get("attention_mask") is None:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        outputs = encoder(arguments)
        cache = {name.replace("present.", PAST): value for name, value in outputs.items() if name != STATES}
        cache[STATES] = outputs[STATES]
        if "encoder_attention_mask" in decoder.shapes:
            cache["encoder_attention_mask"] = arguments["attention_mask"]
        return cache

    def _decode(
        self,
        name: str,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Tensors,
        others: Mapping[str, Any] | None = None,
    ) -> Tensors:
        """The decoder on new tokens; `mask` covers the earlier ones too."""
        part = self.parts[name]
        past = {**part.empty_cache(len(ids)), **cache}
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (others or {}).get("position_ids")
        if positions is None:
            positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1]).expand(len(ids), -1)
        return part({**past, "input_ids": ids, "attention_mask": mask, "position_ids": positions})

    def generate(self, inputs: Mapping[str, torch.Tensor], tokens: int) -> list[int]:
        name = "decoder" if "decoder" in self.parts else "model"
        if "input_ids" not in self.parts[name].shapes:
            return super().generate(inputs, tokens)
        cache = self._encode(inputs) if name == "decoder" else {}
        next_ids = inputs["decoder_input_ids"] if name == "decoder" else inputs["input_ids"]
        sequence, generated = next_ids, []
        cached = any(key.startswith(PAST) for key in self.parts[name].shapes)
        for _ in range(tokens):
            step_ids = next_ids if cached else sequence  # without a KV cache, where no layer has attention
            output = self._decode(name, step_ids, torch.ones_like(sequence), cache)
            next_ids = output["logits"][:, -1:].argmax(-1)
            generated.append(int(next_ids[0, 0]))
            sequence = torch.cat([sequence, next_ids], dim=1)
            cache = {
                **cache,
                **{key.replace("present.", PAST): value for key, value in output.items() if key != "logits"},
            }
        return generated
