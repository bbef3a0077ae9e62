"""Promise: the page on serving is true: its exports run, and its Python loads what they wrote."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowboat import api, exporting
from narrowboat.cli import app
from narrowboat.machine.extras import quiet
from narrowboat.options.schema import Options
from tests.promises.readme_map import TOP

PAGE = (TOP / "docs" / "serving.md").read_text(encoding="utf-8")


def test_its_exports_and_its_python_run(
    run_options: Callable[..., Options], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("convert_model", "convert_adapter"):  # which tests/test_exporting.py runs and reads back
        monkeypatch.setattr(exporting, name, lambda *args: args[-3].write_bytes(b"GGUF"))
    api.train(run_options(**{"train.steps": 1, "train.folder": str(tmp_path / "runs" / "first")}), quiet=True)
    commands = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("narrowboat ")]
    files = set(re.findall(r"served/[\w-]+/[\w.]+\.gguf", PAGE))
    assert len(commands) == 4 and len(files) == 2
    with chdir(tmp_path), quiet():
        for words in commands:
            app(words[1:], standalone_mode=False)
        assert all(Path(file).is_file() for file in files)
        (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        found: dict[str, Any] = {}
        exec(code.replace("Qwen/Qwen3-0.6B", str(tiny_model)), found)
        merged = found["AutoModelForCausalLM"].from_pretrained("served/merged")
    ids = torch.tensor([found["tokenizer"].encode("What floats?")])
    with torch.no_grad():
        assert (merged(input_ids=ids).logits - found["model"](input_ids=ids).logits).abs().max() <= 1e-4
