"""Tiny random models of many families, as their transformers configuration classes make them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture
def config_of() -> Callable[..., Any]:
    """``config_of("llama", num_hidden_layers=3)``: a tiny configuration of a family."""

    def make(family: str, **changes: Any) -> Any:
        sizes = {key: value for key, value in SIZES.items() if not (family == "gpt_neox" and "key_value" in key)}
        if family == "gpt_oss":  # its default YaRN factor is for 4,096 positions
            sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        return AutoConfig.for_model(family, **{**sizes, **changes})

    return make


@pytest.fixture
def model_of(config_of: Callable[..., Any]) -> Callable[..., Any]:
    """``model_of("llama")``: a tiny model of a family with random weights from seed 0."""

    def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=dtype)

    return make
