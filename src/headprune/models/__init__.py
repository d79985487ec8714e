"""Model classes that transformers does not have; importing the room registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from headprune.models.all_attention.configuration import AllAttentionConfig
from headprune.models.all_attention.modeling import AllAttentionForCausalLM, AllAttentionModel

AutoConfig.register(AllAttentionConfig.model_type, AllAttentionConfig, exist_ok=True)
AutoModel.register(AllAttentionConfig, AllAttentionModel, exist_ok=True)
AutoModelForCausalLM.register(AllAttentionConfig, AllAttentionForCausalLM, exist_ok=True)

OWN: dict[str, type[PreTrainedModel]] = {kind.__name__: kind for kind in (AllAttentionModel, AllAttentionForCausalLM)}

__all__ = ["OWN", "AllAttentionConfig", "AllAttentionForCausalLM", "AllAttentionModel"]
