"""Parts are found in every family by structure, with and without an adapter; what is missing is named."""

import pytest
import torch
from torch import nn

from narrowboat.errors import AnatomyError
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy, bare
from narrowboat.options.schema import LoraOptions

# family: backbone, attention, MLP, window of layers 0 and 1
FAMILIES = {
    "llama": ("LlamaModel", "LlamaAttention", "LlamaMLP", (None, None)),
    "qwen2": ("Qwen2Model", "Qwen2Attention", "Qwen2MLP", (None, None)),
    "qwen3": ("Qwen3Model", "Qwen3Attention", "Qwen3MLP", (None, None)),
    "mistral": ("MistralModel", "MistralAttention", "MistralMLP", (4096, 4096)),
    "mixtral": ("MixtralModel", "MixtralAttention", "MixtralSparseMoeBlock", (None, None)),
    "qwen3_moe": ("Qwen3MoeModel", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock", (None, None)),
    "gemma2": ("Gemma2Model", "Gemma2Attention", "Gemma2MLP", (4096, None)),
    "gemma3_text": ("Gemma3TextModel", "Gemma3Attention", "Gemma3MLP", (4096, 4096)),
    "phi3": ("Phi3Model", "Phi3Attention", "Phi3MLP", (None, None)),
    "gpt_oss": ("GptOssModel", "GptOssAttention", "GptOssMLP", (128, None)),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXAttention", "GPTNeoXMLP", (None, None)),
}


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_every_family_is_found(family: str, adapted: bool, model_of):
    backbone, attention, mlp, windows = FAMILIES[family]
    model = model_of(family)
    causal = model
    if adapted:
        model = adapt(model, LoraOptions(rank=2), tell=lambda _: None).model
    anatomy = Anatomy.of(model)
    assert anatomy.causal is causal
    assert type(anatomy.backbone).__name__ == backbone
    assert [layer.name for layer in anatomy.layers] == [
        name for name, part in causal.named_modules() if any(part is layer.module for layer in anatomy.layers)
    ]
    assert {type(layer.attention).__name__ for layer in anatomy.layers} == {attention}
    assert {type(layer.mlp).__name__ for layer in anatomy.layers} == {mlp}
    assert tuple(layer.window for layer in anatomy.layers) == windows
    assert [type(part).__name__.endswith("RotaryEmbedding") for part in anatomy.rotary] == [True]
    assert anatomy.tied == family.startswith("gemma")
    assert (anatomy.vocab_size, anatomy.hidden_size, anatomy.head_dim) == (128, 64, 16)
    assert anatomy.num_kv_heads == (4 if family == "gpt_neox" else 2)
    assert anatomy.max_positions == 512


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_parts_are_what_the_model_computes_with(family: str, model_of):
    """Embedding, layers, norm and head, put together by hand, give the model's own logits."""
    model = model_of(family).eval()
    anatomy = Anatomy.of(model)
    ids = torch.arange(3, 20)[None]
    hidden = anatomy.embedding(ids)
    places = torch.arange(ids.shape[1])[None]
    cos_sin = anatomy.rotary[0](hidden, places)
    mask = torch.full((1, 1, 17, 17), float("-inf")).triu(1)
    with torch.no_grad():
        for layer in anatomy.layers:
            hidden = layer.module(hidden, attention_mask=mask, position_embeddings=cos_sin, position_ids=places)
        logits = anatomy.head(anatomy.backbone.norm(hidden))
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = torch.tanh(logits / cap) * cap if cap else logits
        torch.testing.assert_close(logits, model(ids).logits)


def test_a_head_with_an_adapter_keeps_it_and_its_weight(model_of):
    model = adapt(model_of("llama"), LoraOptions(rank=2, targets=("lm_head",)), tell=lambda _: None).model
    anatomy = Anatomy.of(model)
    assert hasattr(anatomy.head, "lora_A")
    assert bare(anatomy.head).weight.shape == (128, 64)


def test_what_is_not_found_is_named(model_of):
    with pytest.raises(AnatomyError, match="Linear has no transformers configuration"):
        Anatomy.of(nn.Linear(2, 2))
    headless = model_of("llama").model
    with pytest.raises(AnatomyError, match="LlamaModel: no head found"):
        Anatomy.of(headless)
    short = model_of("llama")
    short.model.layers = short.model.layers[:1]
    with pytest.raises(
        AnatomyError, match=r"no list of num_hidden_layers = 2 layers .* lists found: model.layers of 1"
    ):
        Anatomy.of(short)
