"""Small mixture-of-experts language models over bytes, of architectures that transformers has."""

from __future__ import annotations

from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NUM_EXPERTS = 8
COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig,
                  {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 192, "head_dim": 32, "norm_topk_prob": True}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": NUM_EXPERTS}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": NUM_EXPERTS}),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A model of about three million parameters, drawn from torch's random state."""
    model_class, config_class, special = MODELS[name]
    return model_class(config_class(**COMMON, **special))
