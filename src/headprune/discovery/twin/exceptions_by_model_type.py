"""Exceptions by model type, for sizes that no rule covers or that a config leaves open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig, ResNetConfig

from .config_patterns import EXPERTS, EXPERTS_PER_TOKEN
from .config_tree import Node
from .rotary import head_width, sections
from .tokens import VOCABULARY
from .widths import HEAD_COUNT, main_width

SERIES = {"prediction_length": 4, "context_length": 16}


def cycle(*kinds: str) -> Callable[[Node], Any]:
    """A list that repeats these kinds of layers."""
    return lambda node: [kinds[layer % len(kinds)] for layer in range(node.current("num_hidden_layers"))]


def width(share: float = 1.0) -> Callable[[Node], int]:
    """A share of the width of the residual stream."""
    return lambda node: int(share * node.current(main_width(node)[0]))


def half_of_output(node: Node) -> int:
    return int(node.current("output_channels")) // 2


def patches_on_side(node: Node) -> int:
    return int(node.current("image_size")) // int(node.current("patch_size"))


def some_attention(node: Node) -> list[str]:
    """Layer types with at least one attention layer: a default config may have none."""
    kinds = list(node.current("layer_types"))
    return kinds if any(layer_type != "linear_attention" for layer_type in kinds) else [*kinds[:-1], "full_attention"]


# A function is called with the node, after all rules have been applied to it.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": lambda node: node.current("attn_layer_indices") or [1]},
    "granitemoehybrid": {"layer_types": some_attention},
    "autoformer": {**SERIES, "moving_average": 5, "label_length": 4},
    "informer": SERIES,
    "time_series_transformer": SERIES,
    # The width of its heads, 64, is hard-coded.
    "bridgetower": {"hidden_size": 192, "contrastive_hidden_size": 32},
    "bridgetower_text_model": {"hidden_size": 192},
    "bridgetower_vision_model": {"hidden_size": 192},
    "chameleon": {
        "vocabulary_map": {
            "<image>": VOCABULARY - 1,
            **{f"IMGIMG{chr(65 + token)}Z": 20 + token for token in range(10)},
        }
    },
    "chameleon_vqgan": {"num_embeddings": 10, "base_channels": 32},
    "zamba": {
        # Two attention layers, because the second shares the weights of the first.
        "num_hidden_layers": lambda node: max(3, node.current("num_hidden_layers")),
        "layers_block_type": lambda node: [*node.current("layers_block_type"), "hybrid"][
            : node.current("num_hidden_layers")
        ],
    },
    "deepseek_ocr2_text": {"mlp_layer_types": cycle("dense", "sparse")},
    "deepseek_ocr2_vision": {"pad_token_id": None},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "emu3": {
        "vocabulary_map": {
            "<image>": VOCABULARY - 1,
            "<|extra_200|>": VOCABULARY - 9,
            **{f"<|visual token {token:06d}|>": 20 + token for token in range(64)},
        }
    },
    "emu3_vqgan": {"codebook_size": 64, "base_channels": 32, "hidden_size": 128},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "granite4_vision": {
        "deepstack_layer_map": [(0, 0), (1, 1)],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "lfm2_moe": {"layer_types": cycle("conv", "full_attention")},
    # Each box is embedded in six parts.
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {
        "intermediate_size": width(4),
        "projector_input_dim": 48,
        "projector_output_dim": 48,
        "vision_output_dim": 48,
    },
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "num_feature_levels": 1,
        "projector_in_channels": lambda node: [node.current("d_model")],
    },
    "moonshine_streaming": {"num_key_value_heads": lambda node: node.current("num_attention_heads") or HEAD_COUNT},
    "omdet-turbo": {"timm_kwargs": {}, "encoder_in_channels": [16, 24, 32]},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "sam_vision_model": {"num_pos_feats": half_of_output},
    "sam_hq_vision_model": {"num_pos_feats": half_of_output},
    "sam_prompt_encoder": {"image_embedding_size": patches_on_side},
    "sam_hq_prompt_encoder": {"image_embedding_size": patches_on_side},
    "reformer": {"axial_pos_embds_dim": lambda node: [width(0.25)(node), width(0.75)(node)]},
    "janus_vqgan": {"base_channels": 32},
    # Its input is two images stacked vertically.
    "seggpt": {"image_size": [128, 64]},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # Inputs shorter than seven blocks switch its attention to a full one.
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "blip-2": {"image_token_index": VOCABULARY - 9},
    "instructblip": {"image_token_index": VOCABULARY - 9},
    "instructblipvideo": {"video_token_index": VOCABULARY - 9},
    "bros": {"dim_bbox_projection": 8},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 128},
    "perceiver": {
        "d_latents": 48,
        "num_latents": 6,
        "d_model": 40,
        "train_size": [16, 24],
        "num_frames": 2,
        "audio_samples_per_frame": 32,
    },
}
# Models whose code fills in rotary sections for full sizes where the config has none.
WITH_SECTIONS = (
    "hunyuan_vl",
    "glm4v",
    "glm_image",
    "glm_ocr",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_omni",
    "qwen3_vl",
    "qwen4_exp",
    "ernie4_5_vl",
    "cosmos3_edge",
    "cohere_compass",
)


def apply_exceptions(tree: list[Node]) -> None:
    for node in tree:
        for kind in (node.model_type, type(node.config).__name__):
            for name, value in EXCEPTIONS.get(kind, {}).items():
                node.set(name, value(node) if callable(value) else value)
        fill_heads(node)
        fill_sections(node)
        replace_timm(node)
        split_boxes(node)
    join_towers(tree)


def fill_heads(node: Node) -> None:
    """Replace None by the value that it stands for: some models read these attributes as they are."""
    heads = node.current("num_attention_heads")
    total = node.current(main_width(node)[0])
    if not isinstance(heads, int) or not isinstance(total, int) or not heads:
        return
    if "num_key_value_heads" in node.old and node.old["num_key_value_heads"] is None:
        node.set("num_key_value_heads", heads)
    if getattr(node.config, "sliding_window", None) is None and "sliding_attention" in (
        node.current("layer_types") or ()
    ):
        node.set("sliding_window", 4)
    for name, value in node.old.items():
        if (
            value is None
            and EXPERTS_PER_TOKEN.search(name)
            and any(EXPERTS.search(expert_name) and node.old[expert_name] for expert_name in node.old)
        ):
            node.set(name, 2)
    if "head_dim" in node.old and node.old["head_dim"] is None:
        node.set("head_dim", total // heads)


def fill_sections(node: Node) -> None:
    if (
        not node.model_type.startswith(WITH_SECTIONS)
        or not isinstance(node.current("rope_parameters"), dict)
        or "vision" in node.model_type
    ):
        return
    head = head_width(node)
    rope = node.current("rope_parameters")
    if "rope_theta" not in rope and not any(isinstance(inner, dict) for inner in rope.values()):
        rope.update(
            {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in node.current("layer_types") or []}
        )
    for parameters in [inner for inner in rope.values() if isinstance(inner, dict)] or [rope]:
        if "mrope_section" not in parameters and head:
            parameters["mrope_section"] = sections(
                [1, 1, 1], int(head * (parameters.get("partial_rotary_factor") or 1)) // 2
            )


def replace_timm(node: Node) -> None:
    """A ResNet of transformers in place of a timm backbone, whose sizes are not in its config."""
    for name, value in node.old.items():
        if isinstance(value, PretrainedConfig) and value.model_type == "timm_backbone":
            indices = getattr(value, "out_indices", None) or [4]
            small = ResNetConfig(
                embedding_size=16,
                hidden_sizes=[16, 24, 32, 48],
                depths=[1, 1, 1, 1],
                layer_type="basic",
                out_indices=list(indices),
            )
            node.set(name, small)


def split_boxes(node: Node) -> None:
    """Embedding widths of four coordinates and two lengths of a box; they add up to the residual stream's width."""
    total = node.current(main_width(node)[0])
    if "coordinate_size" in node.old and "shape_size" in node.old and total:
        length = next(length for length in range(total // 6, 0, -1) if (total - 2 * length) % 4 == 0)
        node.set("shape_size", length)
        node.set("coordinate_size", (total - 2 * length) // 4)


def join_towers(tree: list[Node]) -> None:
    """Set the output width of towers to the width of the text model: the default configs may not match."""
    for node in tree:
        texts = [
            sibling
            for sibling in tree
            if sibling.path.rpartition(".")[0] == node.path.rpartition(".")[0] and sibling.path.endswith("text_config")
        ]
        if not texts or node in texts or not node.path:
            continue
        target = texts[0].current(main_width(texts[0])[0])
        names = [name for name in ("out_hidden_size", "text_hidden_size") if name in node.old]
        if node.model_type in ("qwen2_vl_vision",):
            names.append("hidden_size")
        if node.model_type.endswith("audio_encoder") and "output_dim" in node.old:
            names.append("output_dim")
        for name in names:
            if target and isinstance(node.old[name], int):
                node.set(name, target)
