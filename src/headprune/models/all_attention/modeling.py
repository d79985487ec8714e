"""The All-attention Transformer: layers of attention only, in which every head also attends to learned vectors.

Like configuration.py, this file imports only torch and transformers: portable checkpoints contain both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration import AllAttentionConfig

Rotations = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the positions


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precision = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=precision).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def rotations(config: AllAttentionConfig, position_ids: torch.Tensor, like: torch.Tensor) -> Rotations:
    """Cosines and sines of the angles at these positions, [batch, 1, tokens, half of the rotary width]."""
    precision = torch.promote_types(like.dtype, torch.float32)
    steps = torch.arange(0, config.rotary_dim, 2, device=like.device, dtype=precision) / config.rotary_dim
    theta = (config.rope_parameters or {}).get("rope_theta", 10000.0)
    angles = position_ids[:, None, :, None].to(precision) * theta**-steps
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(states: torch.Tensor, position_embeddings: Rotations) -> torch.Tensor:
    """The first `rotary_dim` features of each head, rotated by position."""
    cosines, sines = position_embeddings
    first, second = states[..., : 2 * cosines.shape[-1]].chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class AllAttention(nn.Module):
    """Attention to the tokens so far and, in the same softmax, to the persistent vectors of each head."""

    def __init__(self, config: AllAttentionConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = int(config.head_dim or 0)
        self.rotary_dim = config.rotary_dim
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        heads, memory = config.num_attention_heads, config.num_persistent_vectors
        width, bias = heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.persistent_keys = nn.Parameter(torch.empty(heads, memory, self.head_dim))
        self.persistent_values = nn.Parameter(torch.empty(heads, memory, self.head_dim))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotations,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        key = torch.cat([rotate(key, position_embeddings), key[..., self.rotary_dim :]], dim=-1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # Persistent keys follow those of the KV cache, which holds tokens only. They have no position, so queries must
        # not be rotated for them: queries contain both forms, and each type of key is zero at the other form.
        query = torch.cat([query, rotate(query, position_embeddings)], dim=-1)
        memory_keys, memory_values = (tensor.to(key.dtype).expand(len(key), -1, -1, -1) for tensor in self.memory())
        unrotated, rotated = key[..., self.rotary_dim :], key[..., : self.rotary_dim]
        key = torch.cat([nn.functional.pad(unrotated, (self.rotary_dim, 0)), rotated], dim=-1)
        key = torch.cat([key, nn.functional.pad(memory_keys, (0, self.rotary_dim))], dim=2)
        value = torch.cat([value, memory_values], dim=2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(heads.flatten(2).contiguous()), weights

    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The persistent keys and values, [heads, vectors, width]. The parameters have the scale of other weights, for
        the optimiser; as keys and values they are scaled to unit variance."""
        keys, values = self.persistent_keys, self.persistent_values
        return keys * math.sqrt(self.head_dim), values * math.sqrt(values.shape[1])


class AllAttentionLayer(GradientCheckpointingLayer):
    """Attention, the residual addition, and a norm before or after both: there is no feed-forward part."""

    def __init__(self, config: AllAttentionConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = AllAttention(config, layer_idx)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm_first = config.norm == "pre"
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        added, _ = self.self_attn(self.norm(hidden_states) if self.norm_first else hidden_states, **kwargs)
        hidden_states = hidden_states + self.dropout(added)
        return hidden_states if self.norm_first else self.norm(hidden_states)


class AllAttentionPreTrainedModel(PreTrainedModel):
    config: AllAttentionConfig
    config_class = AllAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("AllAttentionLayer",)
    _skip_keys_device_placement = ("past_key_values",)
    # Flash and flex attention do not support a mask with columns that are open to all queries.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": AllAttentionLayer, "attentions": AllAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AllAttention):
            init.normal_(module.persistent_keys, std=module.head_dim**-0.5)
            init.normal_(module.persistent_values, std=module.persistent_values.shape[1] ** -0.5)


class AllAttentionModel(AllAttentionPreTrainedModel):
    """The embeddings and the layers."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([AllAttentionLayer(config, index) for index in range(config.num_hidden_layers)])
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_length).unsqueeze(
                0
            )
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            allow_is_causal_skip=False,  # the causal mask of a kernel would hide the persistent vectors
        )
        mask = extend_mask(mask, self.config.num_persistent_vectors)
        position_embeddings = rotations(self.config, position_ids, hidden_states)
        hidden_states = self.dropout(hidden_states)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)


def extend_mask(mask: torch.Tensor | None, memory: int) -> torch.Tensor | None:
    """The mask of the tokens, with columns for the persistent vectors that are open to all queries."""
    if mask is None:
        return None
    open_column = mask.new_ones(()) if mask.dtype == torch.bool else mask.new_zeros(())
    return torch.cat([mask, open_column.expand(*mask.shape[:-1], memory)], dim=-1)


class AllAttentionForCausalLM(AllAttentionPreTrainedModel, GenerationMixin):
    """The model with a language modeling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        self.model = AllAttentionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept_positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept_positions, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
