"""Writes a GGUF file: hyperparameters, vocabulary and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headprune.exports.gguf import rope
from headprune.exports.gguf.layers import Layer, head_size, layers_of
from headprune.exports.gguf.tensors import encode, format_of, tensors_of
from headprune.exports.quiet import quiet

FILE = "model.gguf"
ARCHITECTURE = "deci"  # of the Llama family, with layers that may differ


def context_length(config: Any) -> int:
    """The context length of the model; with sliding-window attention that of the window, because `deci` attends to all
    tokens: up to there both are the same."""
    windows = [config.max_position_embeddings]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        windows.append(getattr(config, "sliding_window", None) or config.max_position_embeddings)
    return min(windows)


def write_file(model: Any, file: Path, *, quantize: str | None, vocabulary: Any) -> None:
    """Write everything into one file; `vocabulary` adds its keys to the writer."""
    import gguf

    config, layers, size = model.config, layers_of(model, quantize=quantize), head_size(model)
    with quiet():
        writer = gguf.GGUFWriter(file, ARCHITECTURE)
        writer.add_name(Path(config.name_or_path).name or config.model_type)  # without local paths
        writer.add_context_length(context_length(config))
        writer.add_embedding_length(config.hidden_size)
        writer.add_vocab_size(model.model.embed_tokens.weight.shape[0])
        writer.add_block_count(len(layers))
        writer.add_head_count([layer.heads for layer in layers])
        writer.add_head_count_kv([layer.kv_heads for layer in layers])
        writer.add_feed_forward_length([layer.width for layer in layers])
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
        writer.add_rope_freq_base(rope.base(model))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{quantize.upper()}" if quantize else "ALL_F32"))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        vocabulary.add_to(writer)
        _write_tensors(writer, model, layers, quantize)
        writer.close()


def _write_tensors(writer: Any, model: Any, layers: list[Layer], quantize: str | None) -> None:
    """Write tensors one by one, so that there is no second copy of the model in memory: first their headers, then their
    data."""
    import gguf

    kinds = {}
    for name, values in tensors_of(model, layers):
        kinds[name] = kind = format_of(name, values.shape, quantize)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(name, values.shape, np.dtype(np.float32), values.numel() // block * size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, values in tensors_of(model, layers):
        writer.write_tensor_data(encode(values, kinds[name]))
