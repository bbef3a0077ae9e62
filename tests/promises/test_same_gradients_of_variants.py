"""The promise for every kind of adapter: streamed gradients are those of plain autograd."""

from __future__ import annotations

import pytest
import torch

from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.options.schema import LoraOptions
from narrowboat.plan import MemoryPlan
from tests.memory.families import difference, gradients, tiny, token_ids

VARIANTS = [
    {"variants": ["rslora"]}, {"variants": ["dora"]}, {"variants": ["fa"]}, {"variants": ["dora", "rslora", "fa"]},
    {"init": "pissa"}, {"rank_by_layer": ["0=2", "up_proj=7/3"]}, {"bias": "all"},
    {"modules_to_save": ["norm", "input_layernorm"]}, {"modules_to_save": ["lm_head", "embed_tokens"]},
    {"targets": ["all-linear", "lm_head", "embed_tokens"]},
]  # fmt: skip
PLANS = [
    MemoryPlan(layers="recompute", chunk_tokens=16),
    MemoryPlan(layers="stream", tile_tokens=13, chunk_tokens=11),
    MemoryPlan(layers="stream", tile_tokens=8, inputs="host", input_stride=2),
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_streamed_gradients_are_plain_ones(options: dict, tied: bool):
    family = "qwen2" if "bias" in options else "llama"
    model = adapt(tiny(family, tie_word_embeddings=tied), LoraOptions(rank=4, **options), lambda _: None).model.train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                p.normal_(std=0.1)
    ids = token_ids(2, 37)
    plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    plain.backward()
    truth = gradients(model)
    for plan in PLANS:
        with install(model, plan):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        assert loss.detach() == pytest.approx(float(plain.detach()), rel=1e-5)
        assert difference(gradients(model), truth) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_learn_the_same_under_every_plan(dtype: torch.dtype):
    options = LoraOptions(rank=4, modules_to_save=["norm", "input_layernorm", "lm_head"], bias="all")
    model = adapt(tiny("qwen2").to(dtype), options, lambda _: None).model.train()
    ids = token_ids(2, 37)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = gradients(model)
    for plan in PLANS:
        with install(model, plan):
            model(input_ids=ids, labels=ids).loss.backward()
        assert difference(gradients(model), truth) < 0.05
