"""Curves are what rehearsals say: those that come with the package, and those that are kept for the next question."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions, Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner import catalog
from narrowboat.planner.curves import Curves
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.ladder import ladder
from narrowboat.planner.rehearsed import Rehearsed, kept_for
from narrowboat.planner.shipped import shipped
from narrowboat.planner.target import SOME_CARD
from narrowboat.planner.write_curves import FOLDER

RUNGS = tuple(ladder(on_card=True))
RECOMPUTE, STREAM = RUNGS[2], RUNGS[6]


@pytest.mark.parametrize(
    ("plan", "quantize", "rank", "optimizer", "num_tokens"),
    [
        (RECOMPUTE, "none", 16, "adamw", 8192),  # a knot, as it was written
        (STREAM, "nf4", 32, "adamw", 65536),  # between two knots, at another rank
        (RECOMPUTE, "nf4", 64, "adamw8bit", 1024),
        (RECOMPUTE.model_copy(update={"num_kept_layers": 10}), "none", 16, "adamw", 8192),
    ],
)
def test_what_is_shipped_is_what_a_rehearsal_says(
    plan: MemoryPlan, quantize: str, rank: int, optimizer: str, num_tokens: int
) -> None:
    """Where this fails, the engine takes other amounts than it did: python -m narrowboat.planner.write_curves."""
    options = Options.model_validate(
        {
            "model": {"name": "smollm2-135m", "quantize": quantize},
            "lora": {"rank": rank},
            "optimizer": {"name": optimizer},
        }
    )
    curves = shipped(options)
    assert curves is not None
    rehearsal = Forecaster(Workload(catalog.model_config("smollm2-135m"), options, torch.bfloat16, SOME_CARD))
    found, made = (each.forecast(plan, num_tokens) for each in (curves, rehearsal))
    off = 0.01 if not plan.num_kept_layers else 0.08  # kept layers lie on a line above the step
    assert found.device_bytes == pytest.approx(made.device_bytes, rel=off)
    assert found.device_bytes > 0.99 * made.device_bytes
    assert found.host_bytes == pytest.approx(made.host_bytes, rel=0.04)
    assert found.work.counts == pytest.approx(made.work.counts, rel=0.15)
    assert sum(found.by_cause.values()) == found.device_bytes
    phases, again = (each.phases(plan, num_tokens) for each in (curves, rehearsal))
    assert list(phases) == list(again)
    assert phases["loading"] == pytest.approx(again["loading"], rel=0.01)
    if optimizer == "adamw" and not plan.num_kept_layers:
        assert phases["saving"] == pytest.approx(again["saving"], rel=0.01)


def test_each_file_is_that_of_a_shape_of_the_catalogue() -> None:
    shapes = {catalog.name_of_shape(catalog.fields_of(name) or {}) for name in catalog.model_names()}
    written = {path.stem for path in FOLDER.glob("*.json")}
    assert written
    assert written <= shapes
    for path in FOLDER.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert set(content["plans"]) == {"none", "nf4"}


def test_a_model_of_the_catalogue_needs_no_torch(tmp_path: Path) -> None:
    """Which takes seconds to import: the answer is arithmetic on what is shipped."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from narrowboat.cli import main; main()"
    )
    page = tmp_path / "plan.html"
    words = f"plan --model smollm2-135m --tokens 32768 --budget 8GiB --html {page}"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "32,768 tokens: fits" in done.stdout
    assert " a step, by the card" in done.stdout  # seconds from the fastest to the slowest card of that size
    assert page.exists()


def test_other_options_are_not_answered_from_what_is_shipped() -> None:
    name = ModelOptions(name="smollm2-135m")
    assert shipped(Options(model=name, lora=LoraOptions(alpha=64))) is not None
    assert shipped(Options(model=name, lora=LoraOptions(targets=("q_proj",)))) is None
    assert shipped(Options(model=name, optimizer=OptimizerOptions(name="lion"))) is None
    assert shipped(Options(model=ModelOptions(name="smollm2-135m", quantize="int8"))) is None


def test_what_was_rehearsed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path))
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    said: list[str] = []

    def ask(rank: int) -> int:
        work = Workload(config, Options(lora=LoraOptions(rank=rank)), torch.float32)
        return Curves(work, Rehearsed(work, said.append, kept_for(work))).forecast(RECOMPUTE, 1500).device_bytes

    first = ask(4)
    assert len(said) == 1
    assert ask(4) == first
    assert len(said) == 1  # nothing was rehearsed again
    assert ask(8) > first
    assert len(said) == 2  # another adapter, another file
    (kept,) = {path for path in (tmp_path / "plans").glob("*.json") if '"num_layers": 3' in path.read_text()} - {
        kept_for(Workload(config, Options(lora=LoraOptions(rank=8)), torch.float32))
    }
    kept.write_text('{"points": 7', encoding="utf-8")  # a damaged file is made again
    assert ask(4) == first
