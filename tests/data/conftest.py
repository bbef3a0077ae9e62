from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from narrowboat.model.embedded import fetch
from narrowboat.options.schema import Options
from tests.data.templates import with_template


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's: byte-level, ChatML, pad id = eos id, no BOS of its own."""
    return AutoTokenizer.from_pretrained(fetch(lambda event: None))


@pytest.fixture(scope="session", params=["chatml", "llama3", "qwen3", "gemma", "mistral", "llama2", "jsontool"])
def styled(request, tokenizer) -> PreTrainedTokenizerBase:
    """The same tokenizer under templates that behave as those of well-known models."""
    return with_template(tokenizer, request.param)


@pytest.fixture
def write_lines(tmp_path) -> Callable[..., Path]:
    def write(records: Iterable[object], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def options_for() -> Callable[..., Options]:
    """``options_for(path, max_tokens=100, segments={"overlap": 0.1})``: the rest is as it comes."""

    def make(path: Path | str, groups: dict | None = None, **data: object) -> Options:
        return Options.model_validate({"data": {"train": [str(path)], "heldout_share": 0, **data}, **(groups or {})})

    return make
