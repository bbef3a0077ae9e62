"""The forecast of a card against what PyTorch's allocator for cards says, to the byte where it can be."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from narrowboat.machine.card import multiplies_bfloat16
from narrowboat.machine.rates import workspace_bytes
from narrowboat.plan import MemoryPlan
from narrowboat.planner.forecast import Forecaster, Workload
from tests.promises.test_forecast_equals_meter import Case, engine_of

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}
SHAPES: list[tuple[str, dict[str, Any], int, int]] = [  # family, what differs, rows, tokens
    ("llama", GROUPED, 1, 2048),
    ("llama", HEADS, 1, 1024),
    ("llama", GROUPED | {"hidden_size": 1024}, 2, 700),
    ("llama", GROUPED | {"head_dim": 128}, 1, 4096),
    ("llama", GROUPED | {"num_hidden_layers": 2}, 4, 333),
    ("qwen2", GROUPED, 1, 1536),
    ("qwen3", GROUPED | {"head_dim": 64}, 1, 2000),
    ("mistral", GROUPED | {"head_dim": 64, "sliding_window": 512}, 1, 2048),
    ("phi-3", GROUPED, 1, 1024),
    ("gemma3", GROUPED | {"head_dim": 256, "sliding_window": 256}, 1, 1024),
    ("gpt-oss", GROUPED | {"head_dim": 64, "num_local_experts": 4}, 1, 512),
    ("gpt-neox", GROUPED, 1, 900),
]
TILES = {"layers": "stream", "tile_tokens": 256, "chunk_tokens": 128}
RECOMPUTE = {"layers": "recompute", "chunk_tokens": 128}
PLANS: list[dict[str, Any]] = [
    {"layers": "keep", "chunk_tokens": 128},
    RECOMPUTE,
    RECOMPUTE | {"num_kept_layers": 2},
    RECOMPUTE | {"inputs": "host", "weights": "host"},
    TILES,
    TILES | {"keep_keys_values": True},
    TILES | {"inputs": "host"},
    TILES | {"inputs": "host", "weights": "host"},
    TILES | {"inputs": "disk", "input_stride": 2, "weights": "disk"},
]
FORMATS = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-{shape[2]}x{shape[3]}")
def test_it_is_what_the_allocator_says(shape: tuple[str, dict[str, Any], int, int], dtype: torch.dtype) -> None:
    family, differs, num_rows, num_tokens = shape
    capability = torch.cuda.get_device_capability()
    if (dtype is torch.bfloat16) != multiplies_bfloat16(capability):
        pytest.skip("no run takes this format on this card")
    plan = MemoryPlan(**PLANS[0], micro_batch_tokens=num_rows * num_tokens)
    case = Case(family, plan, num_tokens, num_rows, rank=8, dtype=dtype, changes=SIZES | differs)
    forecaster = Forecaster(Workload(case.config(), case.options(), dtype, capability))
    differences = {}
    gc.collect()  # another shape's model, whose parts know each other
    with engine_of(case, torch.device("cuda")) as (engine, rows):
        for given in PLANS:
            engine.replan(MemoryPlan(**given, micro_batch_tokens=num_rows * num_tokens))
            engine.step(rows, 1e-3, seed=0)
            torch.cuda.reset_peak_memory_stats()
            engine.step(rows, 1e-3, seed=0)
            read = torch.cuda.max_memory_allocated()
            found = forecaster.forecast(engine.plan, num_tokens, num_rows)
            differences[engine.plan.describe()] = (found.device_bytes + workspace_bytes(capability)) / read - 1
    assert {plan: f"{error:+.1%}" for plan, error in differences.items() if abs(error) > 0.02} == {}
