"""The promise for every kind of state, adapter and format: the forecast is what the meter reads in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.machine.extras import quiet
from narrowboat.model.adapters import adapt
from narrowboat.model.quantize import quantization_config
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from narrowboat.planner.forecast import Forecaster, Workload
from tests.memory.families import SIZES, tiny

STREAM = MemoryPlan(layers="stream", tile_tokens=32, chunk_tokens=16)
RECOMPUTE = MemoryPlan(layers="recompute", chunk_tokens=16)
CASES: list[dict[str, Any]] = [
    {"optimizer": {"name": "adamw8bit"}, "lora": {"rank": 64}},
    {"optimizer": {"name": "adalomo"}, "lora": {"rank": 64, "rank_by_layer": ("0-1=4", "3=32", "v_proj=8")}},
    {"optimizer": {"name": "came"}, "lora": {"variants": ("dora", "rslora")}},
    {"optimizer": {"states": "rebuilt"}, "lora": {"rank": 64, "modules_to_save": ("lm_head", "norm")}},
    {"model": {"quantize": "nf4"}, "lora": {"variants": ("dora",), "init": "loftq"}},
    {"lora": {"targets": (r"re:.*layers\.[13]\..*_proj",)}},
    {"model": {"quantize": "int8"}},
    {"model": {"quantize": "int4_weight"}, "lora": {"variants": ("dora",)}},
    {"model": {"quantize": "int8_weight"}, "lora": {"variants": ("fa",)}},
]


def peak_bytes(base: Any, options: Options, plan: MemoryPlan, num_tokens: int) -> int:
    """Of the third step, by when the optimizer has its states and what would take them back."""
    adapted = adapt(base, options.lora, lambda event: None, None).model
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], num_tokens, dtype=np.int32)
    with Meter(one_memory=True) as meter:
        meter.watch_model(adapted)
        optimizer = build_optimizer(options.optimizer, adapted.named_parameters())
        with Engine(adapted, optimizer, plan, pad_id=0, clip_norm=1.0) as engine:
            for seed in range(3):
                meter.reset_peak()
                engine.step([Row(ids, ids, (num_tokens,))], 1e-4, seed)
        return meter.peak.device_bytes


@pytest.mark.parametrize("plan", [STREAM, RECOMPUTE], ids=["stream", "recompute"])
@pytest.mark.parametrize("given", CASES, ids=str)
def test_the_forecast_is_what_the_meter_reads(given: dict[str, Any], plan: MemoryPlan, tmp_path: Path) -> None:
    options = Options(**given)
    dtype = torch.float32 if options.model.quantize == "none" else torch.bfloat16
    base = tiny("llama", num_hidden_layers=5, hidden_size=128, intermediate_size=192, max_position_embeddings=512)
    base.to(dtype).save_pretrained(tmp_path)
    quantization = quantization_config(options.model.quantize, dtype)
    with quiet():
        config = AutoConfig.from_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, quantization_config=quantization, device_map={"": "cpu"}
        )
    forecast = Forecaster(Workload(config, options, dtype)).forecast(plan, 250)
    assert forecast.device_bytes == pytest.approx(peak_bytes(loaded, options, plan, 250), rel=0.02)
