"""Promise: resumed is the same run, for every kind of state, adapter and format; and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from narrowboat import api
from narrowboat.errors import CheckpointError, OptionError
from narrowboat.options.schema import Options

COMBINATIONS = [
    {"optimizer.name": "adamw8bit", "lora.variants": "dora", "model.quantize": "nf4", "lora.rank": 64},
    {"optimizer.name": "sophia_h", "lora.init": "pissa", "model.dtype": "float16"},
    {"optimizer.name": "schedule_free", "lora.modules_to_save": "norm", "model.dtype": "bfloat16"},
    {"optimizer.name": "bnb_adamw8bit", "optimizer.states": "paged", "model.quantize": "int8_weight", "lora.rank": 64},
    {"optimizer.name": "adalomo", "lora.rank_by_layer": "0=2", "lora.variants": "fa,rslora"},
]
CHANGES = {"train.steps": 4, "train.save_every": 1, "train.keep_checkpoints": 10, "train.evaluate_every": 1}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: str(c["optimizer.name"]))
def test_resumed_it_is_the_same_to_the_last_bit(
    combination: dict[str, str], run_options: Callable[..., Options], tmp_path: Path
) -> None:
    def options(name: str) -> Options:
        return run_options(**CHANGES, **combination, **{"train.folder": str(tmp_path / name)})

    api.train(options("whole"), quiet=True)
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert any("optimizer states take" in event.get("text", "") for event in events)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(tmp_path / "part" / "adapter")
    api.train(options("part"), resume=True, quiet=True)
    whole, part = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "part"))
    assert whole.keys() == part.keys()
    assert all(whole[name].equal(part[name]) for name in whole)


def test_r17_an_8_bit_checkpoint_is_not_taken_for_a_32_bit_one(run_options: Callable[..., Options]) -> None:
    api.train(run_options(**{"train.steps": 1, "optimizer.name": "adamw8bit"}), quiet=True)
    other = run_options(**{"train.steps": 1, "optimizer.name": "adamw"})
    with pytest.raises(OptionError, match=r"optimizer\.name was adamw8bit, is adamw"):
        api.train(other, resume=True, quiet=True)
    with pytest.raises(CheckpointError, match="holds states of adamw8bit, this run's optimizer is adamw"):
        api.train(other, quiet=True, resume_anyway=["optimizer.name"])
