"""Forecast against reading: signed errors over families, plans, lengths, ranks, formats and optimizers.

    python -m benchmarks.forecast
    python -m benchmarks.forecast --only gemma
    python -m benchmarks.forecast --json > benchmarks/results/forecast.json

Tiny random models of the real classes take three real steps on the CPU; the third one's peak, read by the meter, stands
beside the forecast, which was made from fake tensors alone. ``peak_bytes`` is the reading and ``seconds`` what the
forecast took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, OptimizerOptions, Options
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from narrowboat.planner.forecast import Forecaster, Workload

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS: dict[str, Any] = {"head_dim": 16}
WINDOW: dict[str, Any] = HEADS | {"sliding_window": 40}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", WINDOW),
    "mixtral": ("MixtralConfig", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gemma2": ("Gemma2Config", WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", WINDOW | {"query_pre_attn_scalar": 16}),
    "phi-3": ("Phi3Config", {}),
    "gpt-oss": (
        "GptOssConfig",
        WINDOW
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
}
STREAM: dict[str, Any] = {"layers": "stream", "tile_tokens": 32, "chunk_tokens": 16}
RECOMPUTE: dict[str, Any] = {"layers": "recompute", "chunk_tokens": 32}
PLANS: list[dict[str, Any]] = [
    {"layers": "keep"},
    RECOMPUTE | {"num_kept_layers": 2},
    RECOMPUTE | {"weights": "host"},
    STREAM | {"num_kept_layers": 2},
    STREAM | {"keep_keys_values": True},
    STREAM | {"inputs": "host", "weights": "host"},
    STREAM | {"inputs": "disk"},
    STREAM | {"inputs": "disk", "input_stride": 2},
    STREAM | {"input_stride": 3, "weights": "disk"},
]
OPTIMIZERS = ("adamw8bit", "lion", "adafactor", "came", "schedule_free", "adalomo")


@dataclass(frozen=True)
class Case:
    """One combination."""

    family: str
    plan: dict[str, Any]
    num_tokens: int = 260
    num_rows: int = 1
    rank: int = 4
    dtype: str = "float32"
    optimizer: Any = "adamw"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        shape = f"{self.num_rows} x {self.num_tokens}"
        plan = MemoryPlan(**self.plan).describe()
        return f"{self.family}, {plan}, {shape}, rank {self.rank}, {self.dtype}, {self.optimizer}"

    @property
    def config(self) -> Any:
        """The model's."""
        kind, differs = FAMILIES[self.family]
        sizes = {key: value for key, value in (SIZES | differs | self.changes).items() if value is not None}
        return getattr(transformers, kind)(**sizes)

    @property
    def options(self) -> Options:
        """The run's."""
        optimizer = OptimizerOptions(name=self.optimizer)
        return Options(lora=LoraOptions(rank=self.rank), optimizer=optimizer)


@dataclass(frozen=True)
class Outcome:
    """What was forecast and what was read."""

    name: str
    tokens: int
    forecast_bytes: int
    peak_bytes: int
    error: float
    seconds: float


def cases() -> Iterator[Case]:
    """Every family streamed and recomputed; every plan, some lengths, batches, ranks, formats, optimizers on Llama."""
    for family in FAMILIES:
        yield Case(family, STREAM)
        yield Case(family, RECOMPUTE)
    for plan in PLANS:
        yield Case("llama", plan)
    for num_tokens in (7, 32, 100, 513):
        yield Case("llama", STREAM, num_tokens=num_tokens)
    for plan in (STREAM, {"layers": "keep"}):
        yield Case("llama", plan, num_rows=3)
    for rank in (1, 64):
        yield Case("llama", STREAM, rank=rank)
    for family in ("llama", "qwen3", "mixtral"):
        yield Case(family, STREAM, dtype="bfloat16")
    for optimizer in OPTIMIZERS:
        yield Case("llama", RECOMPUTE, optimizer=optimizer)


def measure(case: Case) -> Outcome:
    """Forecast first, then read."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    plan = MemoryPlan(**case.plan)
    began = time.perf_counter()
    forecast = Forecaster(Workload(case.config, case.options, dtype)).forecast(plan, case.num_tokens, case.num_rows)
    seconds = time.perf_counter() - began
    peak_bytes = read(case, plan, dtype)
    return Outcome(
        case.name,
        case.num_tokens,
        forecast.device_bytes,
        peak_bytes,
        forecast.device_bytes / peak_bytes - 1,
        seconds,
    )


def read(case: Case, plan: MemoryPlan, dtype: torch.dtype) -> int:
    """The peak of a real step, the third one: optimizer states are there, and copies that could take an update back."""
    torch.manual_seed(0)
    options = case.options
    base = transformers.AutoModelForCausalLM.from_config(case.config, dtype=dtype)
    model = adapt(base, options.lora, lambda event: None).model
    optimizer = build_optimizer(options.optimizer, model.named_parameters())
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], case.num_tokens, dtype=np.int32)
    rows = [Row(ids, ids, (case.num_tokens,))] * case.num_rows
    plan = plan.model_copy(update={"micro_batch_tokens": case.num_rows * case.num_tokens})
    with Meter(one_memory=True) as meter:
        meter.watch_model(model)
        with Engine(model, optimizer, plan, pad_id=0, clip_norm=1.0) as engine:
            for _ in range(3):
                meter.reset_peak()
                engine.step(rows, learning_rate=1e-4, seed=0)
            return meter.peak.device_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    hush_transformers()
    rows = []
    for case in cases():
        if arguments.only in case.name:
            rows.append(measure(case))
            if not arguments.json:
                print(f"{rows[-1].error:+8.3%} {rows[-1].peak_bytes:>12,} bytes  {case.name}", flush=True)
    errors = [abs(row.error) for row in rows]
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        summary = {"worst": max(errors), "median": median(errors)}
        print(json.dumps({"rows": [asdict(row) for row in rows], "summary": summary, "machine": machine}, indent=1))
    else:
        print(f"{len(rows)} combinations: worst {max(errors):.3%}, median {median(errors):.3%}")


if __name__ == "__main__":
    main()
