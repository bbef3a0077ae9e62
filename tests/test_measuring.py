"""An adapter is measured on any data, with a run or without one, and answers questions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from narrowboat import api
from narrowboat.errors import OptionError
from narrowboat.machine.extras import quiet
from narrowboat.options.schema import Options


@pytest.mark.parametrize("carry", [{}, {"carry.policy": "sinks", "carry.budget": "64", "carry.block_tokens": 16}])
def test_a_run_is_measured_on_other_data_and_answers(
    carry: dict[str, object], run_options: Callable[..., Options], tmp_path: Path
) -> None:
    options = run_options(**carry, **{"lora.rank": "auto", "train.steps": 2})
    api.train(options, quiet=True)
    turns = [
        [{"role": "user", "content": f"Where is {city}?"}, {"role": "assistant", "content": f"In {land}."}]
        for city, land in (("Paris", "France"), ("Rom", "Italien"), ("北京", "中国"))
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    folder = Path(options.train.folder)
    found = api.evaluate(folder, data=[str(data)], num_answers=3)
    assert len(found.base.losses) == len(found.adapter.answers) == 3
    assert {answer.expected.strip() for answer in found.base.answers} == {"In France.", "In Italien.", "In 中国."}
    assert (folder / "evaluation.json").is_file()
    said = api.generate(folder, "Where is Paris?", most_tokens=3)
    if not carry:  # an empty line begins anew
        command = [sys.executable, "-m", "narrowboat.cli", "chat", str(folder), "--tokens", "3"]
        asked = "Where is Paris?\n\nWhere is Paris?\n"
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
        assert done.stdout == f"{said}\n{said}\n"


def test_an_adapter_that_peft_wrote_is_measured(tiny_model: Path, dialogues: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with quiet():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    model.save_pretrained(tmp_path / "adapter")
    found = api.evaluate(tmp_path / "adapter", data=[str(dialogues)], base=str(tiny_model), num_answers=0)
    assert found.base.perplexity.loss == pytest.approx(found.adapter.perplexity.loss), "B is zero"
    assert [score.name for score in found.scores] == ["loss, nats a token"]
    with pytest.raises(OptionError, match="name what to measure on with --data"):
        api.evaluate(tmp_path / "adapter", base=str(tiny_model))
