"""What an adapter's own arithmetic costs: a streamed step with each variant, with our products and with PEFT's own.

    python -m benchmarks.adapters --json
    python -m benchmarks.adapters --layers 30 --tokens 2048
    python -m benchmarks.adapters --orders          the adapter's products beside the base's, or in its weight, by shape

The layers are SmolLM2-135M's, over real text. The systems take their steps in turn, so that whatever else the machine
does hits all of them; the median CPU seconds count. Peaks are the meter's, above the weights, of one step more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.states import CPU, PLAN, RATE, real_rows
from narrowboat.engine.engine import Engine
from narrowboat.machine.precision import choose_precision
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers, load_base
from narrowboat.model.embedded import NAME
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions
from narrowboat.owner.meter import Meter

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"variants": ("rslora",)},
    "fa": {"variants": ("fa",)},
    "dora": {"variants": ("dora",)},
}
BY_PEFT = {"lora": "lora, PEFT's products", "dora": "dora, PEFT's products"}


def engine(variant: str, as_peft: bool, num_layers: int, dtype: Any) -> Engine:
    """A model of ``num_layers`` of SmolLM2's layers with its adapter, ready to be stepped."""
    base, _ = load_base(ModelOptions(name=NAME), choose_precision(dtype, CPU), CPU, lambda event: None)
    base.model.layers = base.model.layers[:num_layers]
    base.config.num_hidden_layers = num_layers
    torch.manual_seed(0)
    adapted = adapt(base, LoraOptions(**VARIANTS[variant]), lambda event: None).model
    if as_peft:
        for module in adapted.modules():
            if hasattr(module, "lora_A"):
                module.__dict__.pop("forward", None)
    options = OptimizerOptions(lr=RATE)
    return Engine(adapted, build_optimizer(options, adapted.named_parameters()), PLAN, 0, options.clip_norm)


def orders(turns: int) -> list[dict[str, Any]]:
    """Milliseconds of the ways of ``_ways`` for SmolLM2's shapes, in float32 and at rank 16; in turn, medians."""
    found = []
    for wide, high in ((576, 576), (576, 1536), (1536, 576)):
        for tokens in (256, 1024, 4096):
            ways = _ways(tokens, wide, high, rank=16)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(turns + 1):
                for name, way in ways.items():
                    began = time.process_time()
                    way()
                    times[name].append(1000 * (time.process_time() - began))
            medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
            found.append({"name": f"{wide} x {high}", "tokens": tokens, **medians})
    return found


def _ways(tokens: int, wide: int, high: int, rank: int) -> dict[str, Callable[[], Any]]:
    """``x W'``, ``x W' + s (x A') B'`` and ``x (W + s B A)'``; then the gradients of x, A and B by both orders."""
    x, grad, w = torch.randn(tokens, wide), torch.randn(tokens, high), torch.randn(high, wide)
    a, b = torch.randn(rank, wide), torch.randn(high, rank)
    return {
        "base": lambda: linear(x, w),
        "beside": lambda: linear(x, w).addmm_(linear(x, a), b.T, alpha=2.0),
        "in_weight": lambda: linear(x, torch.addmm(w, b, a, alpha=2.0)),
        "beside_backward": lambda: (torch.addmm(grad @ w, grad @ b, a, alpha=2.0), *_of_adapter(x, grad, a, b)),
        "in_weight_backward": lambda: (grad @ torch.addmm(w, b, a, alpha=2.0), *_of_adapter(x, grad, a, b)),
    }


def _of_adapter(x: Tensor, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (grad @ b).T @ x, grad.T @ linear(x, a)


def main() -> None:
    """All systems in one process, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--orders", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if given.orders:
        print(json.dumps({"rows": orders(given.turns), "machine": machine}, indent=1))
        return
    hush_transformers()
    named = {name: (name, False) for name in VARIANTS} | {name: (of, True) for of, name in BY_PEFT.items()}
    rows = list(real_rows(given.tokens, given.turns + 1))
    readings: list[dict[str, Any]] = []
    with ExitStack() as stack:
        systems = {name: stack.enter_context(engine(*of, given.layers, given.dtype)) for name, of in named.items()}
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for turn, row in enumerate(rows):
            for name, system in systems.items():
                began = time.process_time()
                system.step([row], RATE, seed=turn)
                seconds[name].append(time.process_time() - began)
        for name, system in systems.items():
            with Meter() as meter:
                meter.watch_model(system.model)
                held = meter.live.device_bytes
                system.step([rows[0]], RATE, seed=0)
                readings.append(
                    {"name": name, "tokens": given.tokens, "layers": given.layers, "dtype": given.dtype,
                     "peak_bytes": meter.peak.device_bytes - held, "seconds": statistics.median(seconds[name][1:])}
                )  # fmt: skip
    if given.json:
        print(json.dumps({"rows": readings, "machine": machine}))
        return
    for r in readings:
        ratio = r["seconds"] / readings[0]["seconds"]
        print(f"{r['name']:<24} {r['seconds']:6.2f} s  {ratio:5.2f} of lora's  {r['peak_bytes'] / 2**20:7.1f} MiB")


if __name__ == "__main__":
    main()
