from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from narrowboat.model import gaze
from narrowboat.model.gaze import Gaze

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "window"])
def test_what_is_seen_is_what_the_whole_attention_matrix_says(family, monkeypatch):
    monkeypatch.setattr(gaze, "PIECE_TOKENS", 7)
    monkeypatch.setattr(gaze, "QUERIES", 4)
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES))
    if family == "window":
        made = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9))
    model = made.eval()
    ids = np.random.default_rng(0).integers(0, 50, 60).astype(np.int32)
    spans, answer = [(0, 20), (20, 33), (33, 50), (50, 60)], (45, 56)
    with Gaze(lambda: nullcontext(model)) as look:
        found = look(ids, spans, answer)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(torch.from_numpy(ids[None].astype(np.int64)), output_attentions=True).attentions
    mass = sum(layer[0].mean(0)[slice(*answer)].sum(0) for layer in layers)
    mass[0] = 0
    assert found == pytest.approx([float(mass[slice(*span)].sum()) for span in spans], rel=1e-4, abs=1e-6)


def test_the_model_is_loaded_only_when_asked():
    def load() -> None:
        raise AssertionError

    with Gaze(load):
        pass
