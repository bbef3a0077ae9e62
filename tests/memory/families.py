"""Tiny models of the real classes, with an adapter whose every weight matters."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_SIZE = {"head_dim": 8}
WINDOW = {"sliding_window": 9}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = LINEAR[:4]


def _rope(kind: str, **further: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **further}}


# family: (name of its configuration's class, what differs from SIZES, modules that get an adapter)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", {}, LINEAR),
    "llama, linear rope": ("LlamaConfig", _rope("linear"), LINEAR),
    "llama, dynamic rope": ("LlamaConfig", _rope("dynamic") | {"max_position_embeddings": 16}, LINEAR),
    "llama, yarn": ("LlamaConfig", _rope("yarn", original_max_position_embeddings=16), LINEAR),
    "llama, llama3 rope": (
        "LlamaConfig",
        _rope("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
        LINEAR,
    ),
    "qwen2": ("Qwen2Config", {}, LINEAR),
    "qwen3": ("Qwen3Config", HEAD_SIZE, LINEAR),
    "mistral": ("MistralConfig", HEAD_SIZE | WINDOW, LINEAR),
    "mixtral": ("MixtralConfig", HEAD_SIZE | EXPERTS | ROUTED, ATTENTION),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        HEAD_SIZE | ROUTED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ATTENTION,
    ),
    "gemma2": ("Gemma2Config", HEAD_SIZE | WINDOW | {"query_pre_attn_scalar": 16}, LINEAR),
    "gemma3": ("Gemma3TextConfig", HEAD_SIZE | WINDOW | {"query_pre_attn_scalar": 16}, LINEAR),
    "phi-3": ("Phi3Config", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt-oss": ("GptOssConfig", HEAD_SIZE | WINDOW | EXPERTS | {"router_aux_loss_coef": 0.5}, ATTENTION),
    "gpt-neox": ("GPTNeoXConfig", {}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
}
EAGER = ("gemma2", "gpt-oss")  # other attention leaves out the soft cap or the sinks


def tiny(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """The base model of a family, with weights large enough that attention is not uniform."""
    name, differs, _ = FAMILIES[family]
    sizes = SIZES | differs | changes
    if family == "gpt-neox":
        del sizes["num_key_value_heads"]
    config = getattr(transformers, name)(**sizes)
    config._attn_implementation = "eager" if family in EAGER else "sdpa"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def adapted(family: str, seed: int = 0, lora: dict[str, Any] | None = None, **changes: Any) -> PeftModel:
    """The same with a LoRA adapter; ``lora`` changes its configuration."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": list(FAMILIES[family][2]), "init_lora_weights": False}
    model = tiny(family, seed, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on tied weights, and deprecated names it asks transformers for
        return get_peft_model(model, LoraConfig(**settings | (lora or {}))).train()


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All trainable parameters' gradients in one fp64 vector; they are taken away from the model."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            found.append(parameter.grad.double().flatten())
            parameter.grad = None
    return torch.cat(found)


def difference(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to ``truth``."""
    return float((mine - truth).norm() / truth.norm())


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens, no special ones among them."""
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def untouched(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, for comparison with what was not trained or installed on."""
    return copy.deepcopy(model)
