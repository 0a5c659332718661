"""The registry of small MoE models that every parity test runs over.

Parameters and float buffers of the state dict are redrawn: biases, norm weights and score corrections that start at
zero or one would hide a compiler that drops them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from tests.support.handmade import VOCAB, Capacity, LanguageModel, Loop, OneLayer

logging.set_verbosity_error()

Batch = dict[str, Tensor]

_random = threading.Lock()  # ranks that are threads have one generator


@dataclass(frozen=True)
class Case:
    """One model. It pickles; `build()` gives the same training-mode model at every call, on every rank."""

    name: str
    make: Callable[[], nn.Module]
    masks: bool = False  # takes attention_mask
    frozen: tuple[str, ...] = ()  # parts of the names of parameters that do not train
    edit: Callable[[nn.Module], object] | None = None  # changes the model after its parameters are drawn

    def build(self) -> nn.Module:
        with _random, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().train()
            redraw(model)
        if self.edit is not None:
            self.edit(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def batch(self, seed: int, rows: int = 2, length: int = 8, *, padded: bool = False) -> Batch:
        """Token ids and labels int64 [rows, length]. `padded`: row 0 is padded on the left, the others not."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, VOCAB, (rows, length), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if padded:
            assert self.masks, f"{self.name} takes no attention_mask"
            pad = length // 3
            batch["attention_mask"] = torch.ones_like(tokens)
            batch["attention_mask"][0, :pad] = 0
            batch["labels"][0, :pad] = -100
        return batch


def redraw(model: nn.Module) -> None:
    """Draw all parameters and all float buffers of the state dict anew, from values that nothing can hide behind."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.2)
            elif parameter.dim() <= 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, min(parameter.shape[-2:]) ** -0.5)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.uniform_(-0.1, 0.1)


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any], dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8,
         "norm_topk_prob": True},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 12, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 8,
         "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
    ),
}


def hugging_face(family: str, experts: str = "eager", attention: str = "eager", *, checkpoints: bool = False,
                 **config: Any) -> nn.Module:  # fmt: skip
    """A tiny `family` model; `experts` is eager, grouped_mm or batched_mm, `attention` eager or sdpa. checkpoints: of
    activations; transformers then has the output of the embeddings require a gradient, also where they are frozen."""
    model_class, config_class, special = FAMILIES[family]
    settings = config_class(
        **{**COMMON, **special, **config}, attn_implementation=attention, experts_implementation=experts
    )
    model = model_class(settings)
    if checkpoints:
        model.gradient_checkpointing_enable()
    return model


CASES: dict[str, Case] = {}


def _add(name: str, make: Callable[..., nn.Module], *args: Any, masks: bool = False, frozen: tuple[str, ...] = (),
         **options: Any) -> None:
    CASES[name] = Case(name, partial(make, *args, **options), masks, frozen)


for _family in FAMILIES:
    for _experts in ("eager", "grouped_mm", "batched_mm"):
        _attention = "sdpa" if _experts == "grouped_mm" and _family != "gpt_oss" else "eager"
        _add(f"{_family}-{_experts}", hugging_face, _family, _experts, _attention, masks=True)
_add("mixtral-router_logits", hugging_face, "mixtral", output_router_logits=True, masks=True)
_add("mixtral-tied", hugging_face, "mixtral", "grouped_mm", tie_word_embeddings=True, masks=True)
_add("qwen3_moe-frozen", hugging_face, "qwen3_moe", "grouped_mm", masks=True, checkpoints=True,
     frozen=("embed_tokens", "self_attn", "layers.1.mlp.experts.down_proj"))

_LOOPS = {
    "twice": Loop(twice=True, bias=True),
    "plain": Loop(),
    "sigmoid": Loop(scores="sigmoid", renormalise=False, gather="nonzero", scatter="index_add", top_k=3),
    "before": Loop(weigh="before", scores="sigmoid", renormalise=False),
    "setitem": Loop(scatter="setitem", bias=True, gated=False, activation="gelu"),
    "continue": Loop(gather="continue", bias=True),
    "shared": Loop(shared="plain", router_bias=True, activation="gelu", clamp=0.5),
    "gated_shared": Loop(shared="gated", gather="nonzero", bias=True, num_experts=12, top_k=4),
    "counting": Loop(counting=True, correction=True, scores="sigmoid", router_bias=True),
    "mask": Loop(gather="mask", bias=True, shared="plain"),
    "dense": Loop(gather="dense", scores="sigmoid", renormalise=False, router_bias=True),
    "split": Loop(gather="split", bias=True, num_experts=12, top_k=3),
    "ungated": Loop(gated=False, activation="relu", dropout=0.0, renormalise=False, bias=True),
}
_CAPACITIES = {
    "top2": Capacity(),
    "top1": Capacity(top_k=1, capacity_factor=1.5, bias=True),
    "swiglu": Capacity(gated=True, renormalise=False),
    "grouped": Capacity(groups=2, bias=True),
    "grouped_top1": Capacity(groups=2, top_k=1, capacity_factor=2.0, gated=True),
}
for _name, _style in _LOOPS.items():
    _add(f"loop-{_name}", LanguageModel, _style)
for _name, _capacity in _CAPACITIES.items():
    _add(f"gshard-{_name}", LanguageModel, _capacity)
_add("loop-tied", LanguageModel, Loop(bias=True), tied=True)
_add("loop-checkpointed", LanguageModel, Loop(bias=True), checkpointed=True)
_add("loop-frozen", LanguageModel, Loop(bias=True, router_bias=True), frozen=(".down.", "router.weight", "embed"))


def shallow(name: str) -> Case:
    """`CASES[name]` with one layer of experts: it compiles in half the time, for tests that need no second layer. What
    is tied or checkpointed stays as it is."""
    case = CASES[name]
    if case.make.func is LanguageModel:
        if not case.make.keywords.keys() <= inspect.signature(OneLayer).parameters.keys():
            return case
        return replace(case, make=partial(OneLayer, *case.make.args, **case.make.keywords))
    dense = FAMILIES[case.make.args[0]][2].get("first_k_dense_replace", 0)
    return replace(case, make=partial(case.make, num_hidden_layers=dense + 1))


def chosen(names: Collection[str], among: Collection[str] = CASES) -> list:
    """The models `among` all as pytest parameters; those not in `names` only with --full."""
    return [pytest.param(name, marks=[] if name in names else [pytest.mark.full]) for name in among]
