"""A tiny model with a real tokenizer, on disk as users have theirs, and a run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from narrowboat.model.embedded import fetch
from narrowboat.options.load import load
from narrowboat.options.schema import Options


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def dialogues(tmp_path: Path) -> Path:
    """Twelve short dialogues of unequal length."""
    path = tmp_path / "dialogues.jsonl"
    records = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} times two? " + "Think well. " * i},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def run_options(tiny_model: Path, dialogues: Path, tmp_path: Path) -> Callable[..., Options]:
    """``run_options(**{"train.steps": 3})``: a run of the tiny model over the dialogues."""

    def make(**flags: Any) -> Options:
        given = {
            "model.name": str(tiny_model),
            "model.dtype": "float32",
            "model.device": "cpu",
            "lora.rank": 4,
            "data.train": (str(dialogues),),
            "data.heldout_share": 0.2,
            "data.cache": str(tmp_path / "prepared"),
            "memory.budget": "200MiB",
            "optimizer.lr": 1e-2,
            "optimizer.warmup_steps": 1,
            "train.folder": str(tmp_path / "run"),
            "train.steps": 4,
            "train.batch_tokens": 200,
        }
        return load(None, given | flags)

    return make
