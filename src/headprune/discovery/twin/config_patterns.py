"""The meaning of config attributes in transformers, recognised by their names."""

from __future__ import annotations

import re

HEADS = re.compile(
    r"(^|_)(n_heads?|num_heads|attention_heads|attn_heads|n_mamba_heads|mamba_n_heads|kv_heads|value_heads|key_heads"
    r"|resampler_heads|heads_per_layer|heads_per_stage|num_attention_groups)$"
)
KV_HEADS = re.compile(r"(kv_heads|key_value_heads|key_value_attention_heads|num_attention_groups)(_per_layer)?$")
HEAD_WIDTH = re.compile(r"(^|_)(head_dim|head_size|d_kv|d_head|dim_head|kv_channels|key_dim|head_width)$")
LATENT = re.compile(r"(lora_rank|gated_norm_rank|laurel_rank)$")
FFN = re.compile(
    r"(intermediate_size|ffn_dim|ffn_hidden_size|^d_ff|^d_inner|mlp_dim|n_inner|dim_ff|feed_?forward|intermediate_dim"
    r"|mlp_hidden_size|expert_dims?|feed_forward_hidden_size|hidden_dim_ff|intermediate_size_mlp)"
)
# Sizes that are no widths although their names match WIDTH.
NO_WIDTH = re.compile(
    r"(vocab|patch_size|image_size|img_size|kernel|window|block_size|chunk|batch_size|merge_size|group_size|state_size"
    r"|ngram|codebook_size|cache_size|frame_size|crop_size|num_channels|audio_channels|type|position|sample_size"
    r"|train_size|roi_size|spec_size|posemb_size|mask_size|unit_size|(?<!upsample)_groups|tubelet|num_mel|mel_dim|input_size"
    r"|feature_sizes|prompt_size|background_size|query_dim|visual_pos_dim|state_dim|act_dim|action_dim|dim_bbox"
    r"|fine_|stem_|context_size|min_size|max_size|embedding_size_|pool_size|input_dim|input_feat|feature_dim$"
    r"|feature_projection_input_dim|low_res|x4_feat|descriptor|keypoint)"
)
WIDTH = re.compile(
    r"(^d_model|^n_embd|^dim|^emb_dim|_width|hidden_size|hidden_dim|embed_dim|_dim|_dims|_size|_channels|embed_size"
    r"|_units|dimension|upsample_groups|hidden_size_global)$"
)
LAYERS = re.compile(
    r"^(depth|layers|.*num_hidden_layers.*|n_layers?|num_layers|.*encoder_layers|.*decoder_layers|num_(en|de)coder_layers"
    r"|.*num_attention_layers|resampler_depth|.*_num_layers|l_layers|x_layers|r_layers|num_blocks|num_layers_per_stack"
    r"|num_timestamp_prediction_layers)$"
)
# A period, in layers, after which something repeats.
PERIOD = re.compile(
    r"(_period|_interval|_frequency|_every_n_layers|sliding_window_pattern|_sparse_step|layer_group_size)$"
)
INDICES = re.compile(
    r"(_indexes|_indices|_ids|_idx|_hook_ids|extract_layers|cross_attention_layers|_target_layers|moe_layers"
    r"|attention_layers_idx|rope_scaling_layers|kv_source_layers|mlp_only_layers|feature_layers?|vision_layer"
    r"|look_ahead_layers|look_backward_layers|subsample_layers)$"
)
EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_experts_total)$")
EXPERTS_PER_TOKEN = re.compile(
    r"^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|moe_top_k|num_selected_experts|top_k_experts)$"
)
POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|model_max_length|n_ctx)$"
)
FRAMES = re.compile(r"^(max_source_positions|max_speech_positions)$")
TOKEN = re.compile(
    r"(token_id|token_ids|token_index|token_idx|_patch_id|_pad_id|_id|_token|_offset)$|^(pad|bos|eos|unk|mask)_index$"
)
VOCAB = re.compile(r"(vocab_size|vocab_size_per_layer_input)$")
WINDOWS = re.compile(
    r"^(sliding_window|sliding_window_size|attention_window_size|attention_window|attention_chunk_size|local_radius"
    r"|window_size|local_attention|keep_window_size|index_topk|attention_chunk)$"
)
