"""Scores and budgets of models whose code does something that few others do: adds to an output in place, has one key
and value for all heads, masks by the length of a sound, has a tower that does not run."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from benchmarks import small_models

import headprune
from headprune.repair.front_to_back import calls_of_sites
from headprune.tasks import task_of
from headprune.units import all_sites
from oracles import Oracle, relative_differences
from zoo import BERT, LABELS, VOCAB, spread, text_batch


def made(model: Any) -> Any:
    spread(model)
    return model.double().eval()


@functools.cache
def falcon() -> Any:
    """The form of the model with 7B parameters, which adds the attention to the output of the feed-forward layer."""
    config = tf.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        num_labels=LABELS,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    return made(tf.FalconForSequenceClassification(config))


@functools.cache
def longformer() -> Any:
    torch.manual_seed(0)
    return made(tf.LongformerForSequenceClassification(tf.LongformerConfig(**BERT, attention_window=4)))


def labelled_texts() -> list[dict[str, torch.Tensor]]:
    return [{**text_batch(seed), "labels": torch.tensor([seed % 3, 1, 2])} for seed in range(2)]


def whole_windows() -> list[dict[str, torch.Tensor]]:
    """Texts of eight tokens, two windows of Longformer, which pads others."""
    return [
        {**{name: value[:1, :8] for name, value in text_batch(seed).items()}, "labels": torch.tensor([seed % 3])}
        for seed in range(4)
    ]


@pytest.mark.parametrize("build", [falcon, longformer], ids=["falcon", "longformer"])
def test_the_default_scores_classifiers_whose_queries_and_keys_cannot_be_told_apart(build: Any) -> None:
    scores = headprune.score(build(), whole_windows()).scores
    oracle = Oracle(build(), whole_windows())
    assert float(relative_differences(scores, oracle.repair()).max()) < 1e-5


def test_tokens_that_longformer_adds_to_fill_a_window_do_not_count() -> None:
    """A batch of nine tokens gets three more, a sample of five of them gets three more when it is alone."""
    batches, alone = labelled_texts(), []
    for batch in batches:
        for row in range(3):
            texts = {name: batch[name][row : row + 1, : 9 - 2 * row] for name in ("input_ids", "attention_mask")}
            alone.append({**texts, "labels": batch["labels"][row : row + 1]})
    for criterion in ("residual-gradient", "elimination", "wanda"):
        together = headprune.score(longformer(), batches, criterion=criterion).scores
        single = headprune.score(longformer(), alone, criterion=criterion).scores
        assert float(relative_differences(together, single).max()) < 1e-5, criterion


@pytest.mark.parametrize("build", [falcon, longformer], ids=["falcon", "longformer"])
def test_the_defaults_of_budgets_prune_them(build: Any) -> None:
    model = copy.deepcopy(build())
    result = headprune.prune(model, labelled_texts(), keep_flops=0.8, rounds=2)
    assert len(result.trajectory) > 1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_targets_of_a_repair_are_outputs_before_the_model_adds_to_them() -> None:
    """Tokens of a batch without a mask are not copied, and the model adds to them in place."""
    full = [{"input_ids": batch["input_ids"].clamp_min(5), "labels": batch["labels"]} for batch in labelled_texts()]
    masked = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in full]
    models = [copy.deepcopy(falcon()) for _ in range(2)]
    for model, batches in zip(models, (full, masked), strict=True):
        headprune.prune(model, batches, keep_flops=0.8, rounds=1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


SPEECH = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def moonshine() -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """With two sounds, and the frames of each after three convolutions: of 127 by 64, 7 by 3, 3 by 2 samples."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 4000, dtype=torch.long)
    mask[1, 3000:] = 0
    frames = []
    for length in (4000, 3000):
        for kernel, stride in ((127, 64), (7, 3), (3, 2)):
            length = (length - kernel) // stride + 1
        frames.append(length)
    values = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    model = tf.MoonshineForConditionalGeneration(tf.MoonshineConfig(**SPEECH))
    return model, {"input_values": values, "attention_mask": mask}, frames


def cohere() -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """With two sounds; three times every other frame of them stays. Its class inherits the rule of Moonshine, which is
    for other inputs."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    encoder = tf.ParakeetEncoderConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=20,
        num_mel_bins=16,
        subsampling_conv_channels=8,
    )
    settings = {name: value for name, value in SPEECH.items() if not name.startswith(("encoder", "decoder_num"))}
    config = tf.CohereAsrConfig(
        **settings, encoder_config=encoder, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    features = torch.randn(2, 64, 16, generator=generator, dtype=torch.float64)
    return tf.CohereAsrForConditionalGeneration(config), {"input_features": features, "attention_mask": mask}, [8, 5]


@pytest.mark.parametrize("speech", [moonshine, cohere])
def test_masks_of_sounds_become_masks_of_frames(speech: Any) -> None:
    torch.manual_seed(0)
    model, sounds, frames = speech()
    made(model)
    task = task_of(model)
    encoder = next(site for site in headprune.resolve(model) if site.stack == "encoder")
    real = task.site_tokens(encoder, sounds, frames[0])
    assert real is not None
    assert real.sum(1).tolist() == frames
    batch = {**sounds, "decoder_input_ids": torch.randint(5, VOCAB, (2, 6))}
    batch["labels"] = batch["decoder_input_ids"]
    for criterion in ("residual-gradient", "gnorm", "his", "elimination", "wanda", "hies"):
        scores = headprune.score(model, [batch], criterion=criterion).scores
        alone = [task.select(batch, slice(row, row + 1)) for row in range(2)]
        single = headprune.score(model, alone, criterion=criterion).scores
        assert float(relative_differences(scores, single).max()) < 1e-5, criterion


def test_attribution_gives_no_score_to_a_tower_that_does_not_run() -> None:
    config = tf.LlavaConfig(
        text_config={
            "model_type": "llama",
            **{name: BERT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
            "intermediate_size": 20,
            "num_key_value_heads": 4,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
        image_token_index=VOCAB - 1,
    )
    torch.manual_seed(0)
    model = made(tf.LlavaForConditionalGeneration(config))
    batch = text_batch(0)
    batch["input_ids"] = batch["input_ids"].clamp_max(VOCAB - 2)
    scores = headprune.score(model, [batch], criterion="attribution", steps=2).scores
    vision = [site.index for site in headprune.resolve(model) if site.stack == "vision"]
    assert vision
    assert scores[vision].isnan().all()
    assert (scores[[row for row in range(len(scores)) if row not in vision]] != 0).any()


@pytest.mark.slow
def test_a_model_with_a_number_of_layers_per_stack_is_pruned_and_saved(tmp_path: Path) -> None:
    """LXMERT: its config has a dict where others have a number, and its last layer a branch that no output reads."""
    torch.manual_seed(0)
    config = tf.LxmertConfig(
        vocab_size=60,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=40,
        l_layers=1,
        x_layers=2,
        r_layers=1,
        visual_feat_dim=8,
    )
    model = tf.LxmertModel(config).eval()
    batch = {
        "input_ids": torch.randint(5, 50, (3, 7)),
        "attention_mask": torch.ones(3, 7, dtype=torch.long),
        "visual_feats": torch.randn(3, 5, 8),
        "visual_pos": torch.rand(3, 5, 4),
    }
    shared = [site for site in all_sites(model) if site.path.endswith("visual_attention.att")]
    calls = calls_of_sites(model, all_sites(model), batch, task_of(model))
    assert {calls[site.index] for site in shared} == {2}  # which the structure of the model does not say
    headprune.prune(model, [batch], keep_flops=0.8, rounds=2)
    headprune.save(model, tmp_path / "pruned")
    loaded = headprune.load(tmp_path / "pruned")
    with torch.no_grad():
        expected, actual = (each(**batch).language_output for each in (model, loaded))
    assert torch.allclose(expected, actual, atol=1e-6)


@pytest.mark.slow
def test_buffers_that_no_checkpoint_has_are_filled_where_a_site_is_empty(tmp_path: Path) -> None:
    """LeViT's indices of attention biases: its code reads them in a site without heads too."""
    model, _ = small_models.build("levit")
    headprune.remove(model, [head for site in headprune.resolve(model)[:2] for head in site.units()[0]])
    headprune.save(model, tmp_path)
    loaded = dict(headprune.load(tmp_path).named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded[name].to(buffer), buffer), name
