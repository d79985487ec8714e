"""A model that reads one text and writes another: its encoder is run once, and its decoder token after token.

Keys and values of cross attention depend on what was read alone, so they come out of the encoder's program, and the
decoder's never computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from headprune.hooks.outputs import largest_difference
from headprune.runtimes.programs.causal import empty_layers, filled
from headprune.runtimes.programs.plain import axes_of
from headprune.runtimes.programs.spec import (
    BATCH,
    CACHE,
    CROSS,
    SEQUENCE,
    SOURCE,
    TOTAL,
    Program,
    Programs,
    Tensors,
    Whole,
    named_layers,
    past_name,
)
from headprune.runtimes.spec import Source

STATES = "encoder_hidden_states"


class Reading(Whole):
    """The encoder, and what every cross attention will look at."""

    def __init__(self, model: Any, looking: Sequence[int]) -> None:
        super().__init__(model)
        self.looking = list(looking)

    def forward(self, inputs: Tensors) -> Tensors:
        states = self.model.get_encoder()(**inputs).last_hidden_state
        found = {STATES: states}
        if not self.looking:
            return found
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = torch.zeros(states.shape[0], 1, dtype=torch.long, device=states.device)
        self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=inputs.get("attention_mask"),
            decoder_input_ids=first,
            past_key_values=cache,
            use_cache=True,
        )
        return {**found, **named_layers(cache.cross_attention_cache, self.looking, "encoder")}


class Writing(Whole):
    """New tokens of the decoder after those that its layers remember."""

    def __init__(self, model: Any, layers: int, attending: Sequence[int], looking: Sequence[int], width: int) -> None:
        super().__init__(model)
        self.layers, self.attending, self.looking, self.width = layers, list(attending), list(looking), width

    def forward(self, inputs: Tensors) -> Tensors:
        own = filled(inputs, self.layers, self.attending, "decoder")
        cache = EncoderDecoderCache(own, DynamicCache())
        if self.looking:
            cache = EncoderDecoderCache(own, filled(inputs, self.layers, self.looking, "encoder"))
            cache.is_updated.update(dict.fromkeys(range(self.layers), True))
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._states(inputs)),
            attention_mask=inputs.get("encoder_attention_mask"),
            decoder_input_ids=inputs["input_ids"],
            decoder_attention_mask=inputs["attention_mask"],
            past_key_values=cache,
            use_cache=True,
        )
        return {"logits": output.logits, **named_layers(own, self.attending, "decoder")}

    def _states(self, inputs: Tensors) -> torch.Tensor:
        """What was read; nothing looks at it where its keys and values are there, but for its shape."""
        if STATES in inputs:
            return inputs[STATES]
        key = inputs[past_name(self.looking[0], "key", "encoder")]
        return key.new_zeros(key.shape[0], key.shape[2], self.width)


def seq2seq_programs(source: Source) -> Programs | None:
    """None for a model whose decoder does not work like this."""
    ids = source.batch.get("decoder_input_ids")
    if ids is None or ids.shape[1] < 2:
        return None
    try:
        return _tried(source, ids)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError, NotImplementedError):
        return None


def _tried(source: Source, ids: torch.Tensor) -> Programs | None:
    model, batch = source.model, source.task.inputs(source.batch)
    read = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and not name.startswith("decoder_") and name != "labels"
    }
    mask = source.batch.get("decoder_attention_mask", torch.ones_like(ids))
    cache, cut = EncoderDecoderCache(DynamicCache(), DynamicCache()), ids.shape[1] // 2
    with torch.no_grad():
        expected = model(**{**batch, "decoder_attention_mask": mask}).logits
        states = model.get_encoder()(**read).last_hidden_state
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=read.get("attention_mask"),
            decoder_input_ids=ids[:, :cut],
            decoder_attention_mask=mask[:, :cut],
            past_key_values=cache,
            use_cache=True,
        )
    own, other = cache.self_attention_cache, cache.cross_attention_cache
    decoder, layers = model.get_decoder(), len(own.layers)
    attending = [layer for layer in range(layers) if layer not in empty_layers(decoder)]
    looking = [
        layer for layer in range(len(other.layers)) if layer not in empty_layers(model.get_decoder(), cross=True)
    ]
    if not attending:
        return None  # there is nothing to remember
    inputs = {"input_ids": ids[:, cut:].contiguous(), "attention_mask": mask}
    axes = {"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: TOTAL}}
    if "attention_mask" in read:
        inputs["encoder_attention_mask"], axes["encoder_attention_mask"] = read["attention_mask"], {0: BATCH, 1: SOURCE}
    for side, kept, places, given in (("decoder", own, attending, CACHE), ("encoder", other, looking, CROSS)):
        for name, tensor in named_layers(kept, places, side).items():
            past = name.replace("present", "past_key_values")
            inputs[past], axes[past] = tensor.contiguous(), given
    reading = Program(
        "encoder", Reading(model, looking), read, {name: axes_of(name, value) for name, value in read.items()}
    )
    writing = Program("decoder", Writing(model, layers, attending, looking, states.shape[-1]), inputs, axes)
    with_states = replace(writing, inputs={**inputs, STATES: states}, axes={**axes, STATES: {0: BATCH, 1: SOURCE}})
    for chosen in (writing, with_states) if looking else (with_states,):
        real = mask[:, cut:].bool()
        worst, allowed = largest_difference([expected[:, cut:][real]], [chosen.outputs()["logits"][real]])
        if worst <= allowed:
            return Programs("seq2seq", (reading, chosen))
    return None
