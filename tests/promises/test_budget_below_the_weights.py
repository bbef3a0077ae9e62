"""The promise: `narrowboat train`, `eval` and `export` keep a budget that is a part of the model's own weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from narrowboat import api, running
from narrowboat.errors import Interrupted
from narrowboat.model.embedded import fetch
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.load import load
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.training import loop
from narrowboat.training.governor import Governor
from narrowboat.units import MIB

LAYERS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 97 MiB in float32, a third of them the embedding."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(fetch(lambda event: None))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=2048, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dialogues.jsonl"
    records = [
        [
            {"role": "user", "content": f"What is {i} times two? " + "Think well. " * (3 * i)},
            {"role": "assistant", "content": f"It is {2 * i}, and never less than that. " * 3},
        ]
        for i in range(12)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records), encoding="utf-8")
    return path


def narrowboat(*words: str) -> str:
    """What the command prints; it has to succeed."""
    command = [sys.executable, "-c", "from narrowboat.cli import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def trained(model: Path, dialogues: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The events of a run."""
    narrowboat(
        "train", "--model.name", str(model), "--model.dtype", "float32", "--model.device", "cpu", "--lora.rank", "4",
        "--data.train", str(dialogues), "--data.heldout_share", "0.2", "--data.cache", str(folder.parent / "prepared"),
        "--optimizer.lr", "1e-3", "--optimizer.warmup_steps", "1", "--train.steps", "3", "--train.batch_tokens", "400",
        "--train.folder", str(folder), *words,
    )  # fmt: skip
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["event"] in ("StepDone", "Evaluated")]


@pytest.fixture(scope="module")
def free(model: Path, dialogues: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(model, dialogues, tmp_path_factory.mktemp("free") / "run", "--memory.budget", "2GiB")


@pytest.mark.parametrize("words", [("0.6",), ("0.25",), ("0.25", "--model.dtype", "bfloat16")], ids=" ".join)
def test_a_model_larger_than_the_budget(
    words: tuple[str, ...], model: Path, dialogues: Path, free: list[dict[str, Any]], tmp_path: Path
) -> None:
    """In its file's own format, or cast on its way to a scratch file; each phase within the budget."""
    weight_bytes = (model / "model.safetensors").stat().st_size
    budget = int(float(words[0]) * weight_bytes)
    events = trained(model, dialogues, tmp_path / "run", "--memory.budget", str(budget), *words[1:])
    (chosen,), (ended,) = of(events, "PlanChosen"), of(events, "RunEnded")
    assert chosen["plan"]["weights"] == "disk"
    assert ended["outcome"] == "done"
    assert 0 < ended["peak_bytes"] <= budget < weight_bytes
    assert not of(events, "PlanChanged")
    for phase, peak in ended["peak_by_phase"].items():
        assert peak <= chosen["phases"][phase] * 1.02, phase
    tolerance = 1e-5 if len(words) == 1 else 5e-3
    assert losses(events) == pytest.approx(losses(free), rel=tolerance)
    if len(words) == 1:
        found = json.loads(narrowboat("eval", str(tmp_path / "run"), "--json"))
        assert found["adapter"]["loss"] == pytest.approx(of(events, "Evaluated")[-1]["loss"], rel=1e-4)
        assert found["answers"]
        narrowboat("export", str(tmp_path / "run"), str(tmp_path / "merged"))
        assert (tmp_path / "merged" / "model.safetensors").stat().st_size == pytest.approx(weight_bytes, rel=0.02)


def test_stopped_below_the_weights_it_goes_on_as_if_it_had_not_been(
    model: Path, dialogues: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGTERM in step 2; stopping, saving, leaving and going on keep the budget, and the result is the same."""
    budget = (model / "model.safetensors").stat().st_size // 4

    def options(name: str) -> Options:
        return load(None, {
            "model.name": str(model), "model.dtype": "float32", "model.device": "cpu", "lora.rank": 4,
            "data.train": str(dialogues), "data.heldout_share": 0.2, "data.cache": str(tmp_path / "prepared"),
            "optimizer.warmup_steps": 1, "train.steps": 3, "train.batch_tokens": 400, "train.save_every": 1,
            "memory.budget": str(budget), "train.folder": str(tmp_path / name),
        })  # fmt: skip

    def stopped(*args: Any) -> float:
        if args[1] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(*args)

    api.train(options("whole"), quiet=True)
    plan = MemoryPlan.model_validate_json((tmp_path / "whole" / "plan.json").read_text())
    assert plan.weights == "disk"
    monkeypatch.setattr(
        running, "choose", lambda setting, data, num_ranks: Governor([plan], budget)
    )  # which takes ten seconds
    monkeypatch.setattr(loop, "learning_rate", stopped)
    with pytest.raises(Interrupted):
        api.train(options("part"), quiet=True)
    monkeypatch.setattr(loop, "learning_rate", learning_rate)
    api.train(options("part"), resume=True, quiet=True)
    whole, part = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "part"))
    assert whole.keys() == part.keys() and all(whole[name].equal(part[name]) for name in whole)
    events = [json.loads(line) for line in (tmp_path / "part" / "events.jsonl").read_text().splitlines()]
    assert [event["outcome"] for event in of(events, "RunEnded")] == ["interrupted", "done"]
    assert all(0 < event["peak_bytes"] <= budget for event in of(events, "RunEnded"))


def test_a_layer_larger_than_the_budget_is_refused_with_its_bytes(model: Path, dialogues: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from narrowboat.cli import main; main()", "train", "--model.name", str(model)]
    command += ["--data.train", str(dialogues), "--memory.budget", str(MIB), "--train.folder", str(tmp_path / "run")]
    done = subprocess.run([*command, "--model.dtype", "float32"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "memory.budget is 1.00 MiB" in done.stderr
    assert "Its largest layer takes 4.9" in done.stderr.replace("\n", " ")
