"""The programs of an encoder-decoder model: the encoder runs once, the decoder for every token.

Keys and values of cross attention depend only on the input text, so they are outputs of the encoder's program, and the
decoder's does not compute them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from headprune.exports.programs.causal import empty_layers, fill_cache
from headprune.exports.programs.forward import axes_of
from headprune.exports.programs.spec import (
    BATCH,
    CACHE,
    CROSS,
    SEQUENCE,
    SOURCE,
    TOTAL,
    ModelProgram,
    Program,
    Programs,
    Tensors,
    named_layers,
    past_name,
)
from headprune.exports.runtime import Source
from headprune.hooks.outputs import largest_difference

STATES = "encoder_hidden_states"


class EncoderProgram(ModelProgram):
    """The encoder, and the keys and values of every cross attention."""

    def __init__(self, model: Any, cross_layers: Sequence[int]) -> None:
        super().__init__(model)
        self.cross_layers = list(cross_layers)

    def forward(self, inputs: Tensors) -> Tensors:
        states = self.model.get_encoder()(**inputs).last_hidden_state
        outputs = {STATES: states}
        if not self.cross_layers:
            return outputs
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = torch.zeros(states.shape[0], 1, dtype=torch.long, device=states.device)
        self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=inputs.get("attention_mask"),
            decoder_input_ids=first,
            past_key_values=cache,
            use_cache=True,
        )
        return {**outputs, **named_layers(cache.cross_attention_cache, self.cross_layers, "encoder")}


class DecoderStep(ModelProgram):
    """New tokens of the decoder after those in its KV cache."""

    def __init__(
        self, model: Any, layers: int, attention_layers: Sequence[int], cross_layers: Sequence[int], width: int
    ) -> None:
        super().__init__(model)
        self.layers, self.attention_layers, self.cross_layers, self.width = (
            layers,
            list(attention_layers),
            list(cross_layers),
            width,
        )

    def forward(self, inputs: Tensors) -> Tensors:
        self_cache = fill_cache(inputs, self.layers, self.attention_layers, "decoder")
        cache = EncoderDecoderCache(self_cache, DynamicCache())
        if self.cross_layers:
            cache = EncoderDecoderCache(self_cache, fill_cache(inputs, self.layers, self.cross_layers, "encoder"))
            cache.is_updated.update(dict.fromkeys(range(self.layers), True))
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._states(inputs)),
            attention_mask=inputs.get("encoder_attention_mask"),
            decoder_input_ids=inputs["input_ids"],
            decoder_attention_mask=inputs["attention_mask"],
            past_key_values=cache,
            use_cache=True,
        )
        return {"logits": output.logits, **named_layers(self_cache, self.attention_layers, "decoder")}

    def _states(self, inputs: Tensors) -> torch.Tensor:
        """The hidden states of the encoder; where its keys and values are inputs, only their shape is used."""
        if STATES in inputs:
            return inputs[STATES]
        key = inputs[past_name(self.cross_layers[0], "key", "encoder")]
        return key.new_zeros(key.shape[0], key.shape[2], self.width)


def seq2seq_programs(source: Source) -> Programs | None:
    """None for a model whose decoder cannot be called like this."""
    ids = source.batch.get("decoder_input_ids")
    if ids is None or ids.shape[1] < 2:
        return None
    try:
        return _build_programs(source, ids)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError, NotImplementedError):
        return None


def _build_programs(source: Source, ids: torch.Tensor) -> Programs | None:
    model, batch = source.model, source.task.inputs(source.batch)
    encoder_inputs = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and not name.startswith("decoder_") and name != "labels"
    }
    mask = source.batch.get("decoder_attention_mask", torch.ones_like(ids))
    cache, half = EncoderDecoderCache(DynamicCache(), DynamicCache()), ids.shape[1] // 2
    with torch.no_grad():
        expected = model(**{**batch, "decoder_attention_mask": mask}).logits
        states = model.get_encoder()(**encoder_inputs).last_hidden_state
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=encoder_inputs.get("attention_mask"),
            decoder_input_ids=ids[:, :half],
            decoder_attention_mask=mask[:, :half],
            past_key_values=cache,
            use_cache=True,
        )
    self_cache, cross_cache = cache.self_attention_cache, cache.cross_attention_cache
    decoder, layers = model.get_decoder(), len(self_cache.layers)
    attention_layers = [layer for layer in range(layers) if layer not in empty_layers(decoder)]
    cross_layers = [
        layer for layer in range(len(cross_cache.layers)) if layer not in empty_layers(model.get_decoder(), cross=True)
    ]
    if not attention_layers:
        return None  # nothing to cache
    inputs = {"input_ids": ids[:, half:].contiguous(), "attention_mask": mask}
    axes = {"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: TOTAL}}
    if "attention_mask" in encoder_inputs:
        inputs["encoder_attention_mask"], axes["encoder_attention_mask"] = (
            encoder_inputs["attention_mask"],
            {0: BATCH, 1: SOURCE},
        )
    for side, cache_of_side, layers_of_side, axes_of_side in (
        ("decoder", self_cache, attention_layers, CACHE),
        ("encoder", cross_cache, cross_layers, CROSS),
    ):
        for name, tensor in named_layers(cache_of_side, layers_of_side, side).items():
            past = name.replace("present", "past_key_values")
            inputs[past], axes[past] = tensor.contiguous(), axes_of_side
    encoder_program = Program(
        "encoder",
        EncoderProgram(model, cross_layers),
        encoder_inputs,
        {name: axes_of(name, value) for name, value in encoder_inputs.items()},
    )
    decoder_program = Program(
        "decoder", DecoderStep(model, layers, attention_layers, cross_layers, states.shape[-1]), inputs, axes
    )
    with_states = replace(
        decoder_program, inputs={**inputs, STATES: states}, axes={**axes, STATES: {0: BATCH, 1: SOURCE}}
    )
    for candidate in (decoder_program, with_states) if cross_layers else (with_states,):
        real = mask[:, half:].bool()
        worst, allowed = largest_difference([expected[:, half:][real]], [candidate.outputs()["logits"][real]])
        if worst <= allowed:
            return Programs("seq2seq", (encoder_program, candidate))
    return None
