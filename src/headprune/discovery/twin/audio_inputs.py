"""Dummy audio inputs: waves and spectrograms in the layouts that models accept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from .block_inputs import widths
from .module_facts import BATCH, Facts

AUDIO = r"audio|speech|encoder|sound"
FEATURES = ("input_features", "audio_input_features", "audio_mel", "spectrogram", "mel_spectrogram", "input_values")
MELS = (
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_feat_size",
    "n_mels",
    "num_mel_bands",
    "input_dim",
    "feature_size",
    "model_in_dim",
    "mel_dim",
)


class Sounds:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.name = next((name for name in FEATURES if name in facts), None)
        self.mels = facts.number(*MELS, among=AUDIO, default=80)
        self.frames = facts.number("max_source_positions", among=AUDIO)

    def layouts(self) -> Iterator[dict[str, Any]]:
        if self.name is None:
            return
        if self.name == "input_features" and "input_values" in self.facts:
            # One of the two is enough; waves are more common.
            self.name = "input_values"
        raw = self.name == "input_values" and self.facts.find("num_mel_bins") is None
        if raw:
            yield from self.waves()
        lengths = [64, 128, 100, 256, 3000]
        if self.frames:
            lengths = [2 * self.frames, self.frames, 4 * self.frames, *lengths]
        length = self.facts.find("max_length", "spec_size", among=AUDIO)
        if isinstance(length, int) and length > 64:
            lengths.insert(0, length)
        for length in lengths:
            yield from self.spectra(length)
        if not raw and self.name == "input_values":
            yield from self.waves()

    def select(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self.facts}

    def spectra(self, length: int) -> Iterator[dict[str, Any]]:
        facts = self.facts
        masks = {
            "input_features_mask": facts.ones(BATCH, length),
            "feature_attention_mask": facts.ones(BATCH, length),
            "audio_mel_mask": facts.ones(BATCH, length).bool(),
            "audio_attention_mask": facts.ones(BATCH, length).bool(),
            "mask": facts.ones(BATCH, length).bool(),
            "audio_feature_lengths": facts.ones(BATCH) * length,
            "feature_lens": facts.ones(BATCH) * length,
        }
        name = str(self.name)
        bands = dict.fromkeys([self.mels, *widths(facts.module)])
        if "attention_mask" in facts and "input_ids" not in facts:
            masks["attention_mask"] = facts.ones(BATCH, length)
        for rest, mels in product((masks, {}), bands):
            yield self.select({name: facts.floats(BATCH, length, mels), **rest})
            yield self.select({name: facts.floats(BATCH, mels, length), **rest})
        yield self.select({name: facts.floats(BATCH, 1, length, self.mels), "is_longer": facts.ones(BATCH, 1).bool()})
        yield self.select({name: facts.floats(self.mels, BATCH * length), **masks})

    def waves(self) -> Iterator[dict[str, Any]]:
        facts = self.facts
        for length in (4000, 16000):
            mask = {"attention_mask": facts.ones(BATCH, length), "padding_mask": facts.ones(BATCH, length)}
            if "input_ids" in facts:
                mask = {}
            wave = facts.floats(BATCH, length)
            for values in (wave, wave[:, None]):
                yield self.select({str(self.name): values, **mask})
                yield self.select({str(self.name): values})
