"""lm-evaluation-harness takes a run's adapter as it is, on a tiny task; runs where the harness is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowboat import api
from narrowboat.options.schema import Options

pytest.importorskip("lm_eval")

TASK = """
task: twice
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["{{{{answer}}}}", "{{{{wrong}}}}"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def test_the_harness_loads_a_run(run_options: Callable[..., Options], tmp_path: Path) -> None:
    options = run_options(**{"train.steps": 1})
    api.train(options, quiet=True)
    data = tmp_path / "tasks" / "questions.jsonl"
    data.parent.mkdir()
    asked = ({"question": f"What is {i} times two?", "answer": f"{2 * i}", "wrong": f"{2 * i + 1}"} for i in range(8))
    data.write_text("".join(json.dumps(one) + "\n" for one in asked))
    (data.parent / "twice.yaml").write_text(TASK.format(data=data))
    given = f"pretrained={options.model.name},peft={options.train.folder}/adapter"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", given, "--tasks", "twice"]
    command += ["--include_path", str(data.parent), "--device", "cpu", "--batch_size", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "|twice|" in done.stdout
