"""Tiny models of every task, at least two families each, with labelled batches: what tests of tasks run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

from zoo import BART, BERT, CLIP_TOWER, GQA, LABELS, LLAMA, VISION, VOCAB, _model, audio_batch, image_batch, text_batch

Batch = dict[str, torch.Tensor]
T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 5,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_ff": 20,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 10,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 24,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 20,
    "max_position_embeddings": 40,
    "num_labels": LABELS,
    "pad_token_id": 1,
}
WAV2VEC2 = {
    "vocab_size": 12,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "pad_token_id": 0,
    "num_labels": LABELS,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 10,
}


@dataclass(frozen=True)
class TaskCase:
    task: str
    name: str
    build: Callable[[], Any]
    batch: Callable[[int], Batch]

    @property
    def id(self) -> str:
        return f"{self.task}-{self.name}"


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 100)


def with_classes(make: Callable[[int], Batch]) -> Callable[[int], Batch]:
    return lambda seed: {**make(seed), "labels": torch.randint(0, LABELS, (3,), generator=_generator(seed))}


def with_one_ignored(make: Callable[[int], Batch]) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        made = with_classes(make)(seed)
        made["labels"][1] = -100
        return made

    return batch


def with_several(make: Callable[[int], Batch]) -> Callable[[int], Batch]:
    return lambda seed: {
        **make(seed),
        "labels": torch.randint(0, 2, (3, LABELS), generator=_generator(seed)).float(),
    }


def with_numbers(make: Callable[[int], Batch], *shape: int) -> Callable[[int], Batch]:
    return lambda seed: {**make(seed), "labels": 3 * torch.randn(3, *shape, generator=_generator(seed))}


def with_token_classes(seed: int) -> Batch:
    made = text_batch(seed)
    labels = torch.randint(0, LABELS, made["input_ids"].shape, generator=_generator(seed))
    labels[:, 0] = -100  # a word's further pieces, special tokens
    return {**made, "labels": labels.masked_fill(made["attention_mask"] == 0, -100)}


def with_masked_tokens(seed: int) -> Batch:
    made = text_batch(seed)
    hidden = torch.rand(made["input_ids"].shape, generator=_generator(seed)) < 0.4
    hidden[:, 1] = True
    labels = made["input_ids"].masked_fill(~hidden | (made["attention_mask"] == 0), -100)
    return {**made, "input_ids": made["input_ids"].masked_fill(hidden, 4), "labels": labels}


def with_next_tokens(seed: int, left: bool = False) -> Batch:
    made = text_batch(seed, left=left)
    return {**made, "labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def without_padded_predictions(batch: Batch) -> Batch:
    """The same without the label of a token that padding on its left predicts, which only the model itself counts."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if labels is None or mask is None or labels.shape != mask.shape or bool(mask[:, 0].all()):
        return batch
    first = torch.arange(mask.shape[1]) == mask.argmax(1, keepdim=True)
    return {**batch, "labels": labels.masked_fill(first & (mask[:, :1] == 0), -100)}


def with_target_text(make: Callable[[int], Batch]) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        target = text_batch(seed + 1000, length=6)
        made = {name: value for name, value in make(seed).items() if not name.startswith("decoder")}
        return {**made, "labels": target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)}

    return batch


def with_spans(seed: int) -> Batch:
    return {**text_batch(seed), "start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([4, 2, 3])}


def with_spans_beyond(seed: int) -> Batch:
    """One end lies beyond the text, which does not count."""
    return {**with_spans(seed), "end_positions": torch.tensor([4, 99, 3])}


def with_choices(seed: int) -> Batch:
    flat = text_batch(seed, size=6)
    return {
        **{name: value.view(3, 2, -1) for name, value in flat.items()},
        "labels": torch.randint(0, 2, (3,), generator=_generator(seed)),
    }


def sound(seed: int) -> Batch:
    mask = torch.ones(3, 800, dtype=torch.long)
    mask[1, 640:], mask[2, 500:] = 0, 0
    return {"input_values": torch.randn(3, 800, generator=_generator(seed)) * mask, "attention_mask": mask}


def whole_sound(seed: int) -> Batch:
    return {"input_values": torch.randn(3, 800, generator=_generator(seed))}


def with_transcripts(make: Callable[[int], Batch]) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        labels = torch.randint(1, 12, (3, 5), generator=_generator(seed))
        labels[1, 3:] = -100
        return {**make(seed), "labels": labels}

    return batch


def with_image_and_text(seed: int) -> Batch:
    """Four places for the image's patches come first, and the words after them are predicted."""
    made = text_batch(seed, length=10)
    ids = made["input_ids"].clone()
    ids[:, :4] = 3
    labels = ids.masked_fill(made["attention_mask"] == 0, -100)
    labels[:, :4] = -100
    return {**made, "input_ids": ids, **image_batch(seed), "labels": labels}


class MyGPT(tf.GPT2LMHeadModel):
    """A user's own class: what it predicts follows from the class it comes from."""


def _own_gpt() -> Any:
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=40, bos_token_id=0, eos_token_id=2
    )
    return MyGPT(config).eval()


def _auto(auto: str, config: str, base: dict[str, Any], **settings: Any) -> Callable[[], Any]:
    return _model(auto, config, **{**base, **settings})


def _llava() -> Callable[[], Any]:
    text = tf.LlamaConfig(**{**LLAMA, "vocab_size": VOCAB, "num_hidden_layers": 2})
    vision = tf.CLIPVisionConfig(**CLIP_TOWER, image_size=16, patch_size=8)
    return _model(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=text,
        vision_config=vision,
        image_token_index=3,
        image_seq_length=4,
        vision_feature_layer=-1,
    )


def _vip_llava() -> Callable[[], Any]:
    text = tf.LlamaConfig(**{**GQA, "vocab_size": VOCAB, "num_hidden_layers": 2})
    vision = tf.CLIPVisionConfig(**CLIP_TOWER, image_size=16, patch_size=8)
    return _model(
        "VipLlavaForConditionalGeneration",
        "VipLlavaConfig",
        text_config=text,
        vision_config=vision,
        image_token_index=3,
        image_seq_length=4,
        vision_feature_layers=[-1, -2],
    )


CLASSIFY = "AutoModelForSequenceClassification"
AST = {**VISION, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}


def spectrogram(seed: int) -> Batch:
    return {"input_values": torch.randn(3, 16, 8, generator=_generator(seed))}


CASES = [
    TaskCase("sequence-classification", "bert", _auto(CLASSIFY, "BertConfig", BERT), with_classes(text_batch)),
    TaskCase(
        "sequence-classification", "bert-ignored", _auto(CLASSIFY, "BertConfig", BERT), with_one_ignored(text_batch)
    ),
    TaskCase("sequence-classification", "llama", _auto(CLASSIFY, "LlamaConfig", LLAMA), with_classes(text_batch)),
    TaskCase(
        "sequence-classification",
        "bart",
        _auto(CLASSIFY, "BartConfig", {**BART, "num_labels": LABELS}),
        lambda seed: _with_ends(with_classes(text_batch)(seed)),
    ),
    TaskCase(
        "sequence-classification",
        "multi-label-roberta",
        _auto(CLASSIFY, "RobertaConfig", BERT),
        with_several(text_batch),
    ),
    TaskCase(
        "sequence-classification",
        "multi-label-distilbert",
        _auto(CLASSIFY, "DistilBertConfig", DISTILBERT, problem_type="multi_label_classification"),
        with_several(text_batch),
    ),
    TaskCase(
        "sequence-classification",
        "regression-bert",
        _auto(CLASSIFY, "BertConfig", BERT, num_labels=1),
        with_numbers(text_batch),
    ),
    TaskCase(
        "sequence-classification",
        "regression-column-electra",
        _auto(CLASSIFY, "ElectraConfig", {**BERT, "embedding_size": 12}, num_labels=1),
        with_numbers(text_batch, 1),
    ),
    TaskCase(
        "sequence-classification",
        "regression-outputs-bert",
        _auto(CLASSIFY, "BertConfig", BERT, problem_type="regression"),
        with_numbers(text_batch, LABELS),
    ),
    TaskCase(
        "sequence-classification",
        "regression-outputs-roberta",
        _auto(CLASSIFY, "RobertaConfig", BERT, problem_type="regression"),
        with_numbers(text_batch, LABELS),
    ),
    TaskCase(
        "token-classification", "bert", _auto("AutoModelForTokenClassification", "BertConfig", BERT), with_token_classes
    ),
    TaskCase(
        "token-classification",
        "distilbert",
        _auto("AutoModelForTokenClassification", "DistilBertConfig", DISTILBERT),
        with_token_classes,
    ),
    TaskCase(
        "question-answering",
        "bert",
        _auto("AutoModelForQuestionAnswering", "BertConfig", BERT, num_labels=2),
        with_spans,
    ),
    TaskCase(
        "question-answering",
        "bert-beyond",
        _auto("AutoModelForQuestionAnswering", "BertConfig", BERT, num_labels=2),
        with_spans_beyond,
    ),
    TaskCase(
        "question-answering",
        "distilbert",
        _auto("AutoModelForQuestionAnswering", "DistilBertConfig", DISTILBERT, num_labels=2),
        with_spans,
    ),
    TaskCase("multiple-choice", "bert", _auto("AutoModelForMultipleChoice", "BertConfig", BERT), with_choices),
    TaskCase("multiple-choice", "roberta", _auto("AutoModelForMultipleChoice", "RobertaConfig", BERT), with_choices),
    TaskCase("masked-lm", "bert", _auto("AutoModelForMaskedLM", "BertConfig", BERT), with_masked_tokens),
    TaskCase(
        "masked-lm", "distilbert", _auto("AutoModelForMaskedLM", "DistilBertConfig", DISTILBERT), with_masked_tokens
    ),
    TaskCase("causal-lm", "llama", _auto("AutoModelForCausalLM", "LlamaConfig", GQA), with_next_tokens),
    TaskCase(
        "causal-lm",
        "llama-left",
        _auto("AutoModelForCausalLM", "LlamaConfig", GQA),
        lambda seed: with_next_tokens(seed, True),
    ),
    TaskCase("causal-lm", "own-gpt2", _own_gpt, with_next_tokens),
    TaskCase("seq2seq-lm", "t5", _auto("AutoModelForSeq2SeqLM", "T5Config", T5), with_target_text(text_batch)),
    TaskCase("seq2seq-lm", "bart", _auto("AutoModelForSeq2SeqLM", "BartConfig", BART), with_target_text(text_batch)),
    TaskCase(
        "seq2seq-lm",
        "whisper",
        _auto(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            BART,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=40,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        with_target_text(audio_batch),
    ),
    TaskCase(
        "image-classification",
        "vit",
        _auto("ViTForImageClassification", "ViTConfig", VISION),
        with_classes(image_batch),
    ),
    TaskCase(
        "image-classification",
        "dinov2",
        _auto("Dinov2ForImageClassification", "Dinov2Config", VISION),
        with_classes(image_batch),
    ),
    TaskCase(
        "audio-classification", "ast", _auto("ASTForAudioClassification", "ASTConfig", AST), with_classes(spectrogram)
    ),
    TaskCase(
        "audio-classification",
        "wav2vec2",
        _auto("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2),
        with_classes(whole_sound),
    ),
    TaskCase("ctc", "wav2vec2", _auto("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2), with_transcripts(sound)),
    TaskCase(
        "ctc",
        "hubert-mean",
        _auto("HubertForCTC", "HubertConfig", {**WAV2VEC2, "ctc_loss_reduction": "mean"}),
        with_transcripts(whole_sound),
    ),
    TaskCase("image-text-to-text", "llava", _llava(), with_image_and_text),
    TaskCase("image-text-to-text", "vip-llava", _vip_llava(), with_image_and_text),
]


def _with_ends(batch: Batch) -> Batch:
    """BART answers at the end of a text, so every text must have one."""
    ids = batch["input_ids"].clone()
    last = batch["attention_mask"].sum(1) - 1
    ids[torch.arange(3), last] = 2
    return {**batch, "input_ids": ids}
