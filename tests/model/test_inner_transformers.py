"""Canaries: what is used of transformers' insides is there and does what Narrowboat relies on."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig

from narrowboat.model.inner_transformers import (
    attention_name,
    classes_of,
    names_attention,
    set_attention_name,
    supports_sdpa,
    with_random_weights,
)


def small() -> LlamaConfig:
    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def test_an_auto_class_says_what_it_makes_of_a_configuration() -> None:
    assert classes_of(AutoModelForCausalLM, small()) is LlamaForCausalLM
    assert classes_of(AutoModelForCausalLM, object()) is None


def test_a_class_says_whether_it_uses_pytorchs_attention() -> None:
    assert supports_sdpa(LlamaForCausalLM)


def test_a_class_makes_a_model_in_the_format_asked_for() -> None:
    model = with_random_weights(LlamaForCausalLM, small(), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_a_model_follows_the_attention_that_its_configuration_names() -> None:
    config = small()
    config._attn_implementation = "eager"
    model = with_random_weights(LlamaForCausalLM, config, torch.float32).eval()
    ids = torch.arange(4)[None]
    assert names_attention(model.config) and attention_name(model.config) == "eager"
    assert model(input_ids=ids, output_attentions=True).attentions[0] is not None  # only eager hands weights out
    set_attention_name(model.config, "sdpa")
    assert model.config._attn_implementation == attention_name(model.config) == "sdpa"


def test_the_name_is_that_of_one_configuration_and_not_of_its_parts() -> None:
    config = LlavaConfig()
    before = attention_name(config.text_config)
    set_attention_name(config, "eager")
    assert attention_name(config) == "eager" and attention_name(config.text_config) == before


def test_what_is_no_configuration_names_no_attention() -> None:
    assert names_attention(BertConfig()) and not names_attention(object())
