"""How bytes and seconds grow with the tokens: full attention, a window, shifted sparse attention, and a carry.

    python -m benchmarks.growth --json
    python -m benchmarks.growth --tokens 1024 4096 16384 65536 --plot docs/images/growth.svg

One training step (AdamW on a rank-8 adapter) of a small random Llama on random tokens, layers recomputed unless a carry
keeps a segment's activations; peak bytes by the meter without the weights, CPU seconds of one core.

A growth order is the slope of log(bytes) or log(seconds) over log(tokens) between the last two lengths that were
measured: 1 is linear, 2 quadratic, 0 no growth. A scheme whose step took longer than ``--seconds`` is not tried on
longer rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.data.examples import Row
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.meter import Meter
from narrowboat.memory.schemes import Scheme
from narrowboat.options.schema import CarryOptions
from narrowboat.plan import MemoryPlan

SEGMENT_TOKENS = WINDOW = 512
RECOMPUTE, KEEP = MemoryPlan(layers="recompute"), MemoryPlan(layers="keep")


@dataclass(frozen=True)
class Reading:
    """One scheme at one length."""

    name: str
    tokens: int
    peak_bytes: int
    seconds: float


def small_llama() -> PeftModel:
    """Two layers of 4 heads of 32 over 2 key/value heads."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=2**17, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def plain(scheme: Scheme | None) -> Callable[[PeftModel, int], tuple[Engine, Row]]:
    """A whole row under ``scheme``."""

    def make(model: PeftModel, num_tokens: int) -> tuple[Engine, Row]:
        ids = _ids(num_tokens)
        return Engine(model, _optimizer(model), RECOMPUTE, 0, scheme=scheme), Row(ids, ids, (num_tokens,))

    return make


def carried(plan: MemoryPlan, **options: str) -> Callable[[PeftModel, int], tuple[Engine, Row]]:
    """Segments of a document that carry ``WINDOW`` tokens, unless ``options`` say otherwise."""

    def make(model: PeftModel, num_tokens: int) -> tuple[Engine, Row]:
        carry = CarryOptions.model_validate({"policy": "sinks", "budget": str(WINDOW)} | options)
        ids, lengths = _ids(num_tokens), (SEGMENT_TOKENS,) * (num_tokens // SEGMENT_TOKENS)
        return Engine(model, _optimizer(model), plan, 0, carrier=Carrier(model, carry, 2**30)), Train(ids, ids, lengths)

    return make


SCHEMES: dict[str, Callable[[PeftModel, int], tuple[Engine, Row]]] = {
    "carry, cut": carried(KEEP),
    "carry, cut, recompute": carried(RECOMPUTE),
    "full": plain(None),
    "sliding window": plain(Scheme(WINDOW)),
    "shifted sparse": plain(Scheme(WINDOW, is_shifted=True)),
    "carry, within 4 segments": carried(KEEP, gradients="4"),
}


def measure(name: str, num_tokens: int) -> Reading:
    """One step for seconds, the next under the meter for bytes."""
    model = small_llama()
    engine, row = SCHEMES[name](model, num_tokens)
    with engine:
        began = time.process_time()
        engine.step([row], 1e-4, seed=0)
        seconds = time.process_time() - began
        with Meter() as meter:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            engine.step([row], 1e-4, seed=1)
    return Reading(name, num_tokens, meter.peak.device_bytes - weights, seconds)


def growth_order(readings: list[Reading], what: str) -> float:
    """Slope between the last two lengths in a log-log plot."""
    if len(readings) < 2:
        return math.nan
    (x0, y0), (x1, y1) = [(r.tokens, getattr(r, what)) for r in readings[-2:]]
    return math.log(y1 / y0) / math.log(x1 / x0)


def plot(rows: list[Reading], path: Path) -> None:
    """Peak bytes, and seconds, over tokens, as one SVG with logarithmic axes."""
    from benchmarks.plot import Line, chart

    names = dict.fromkeys(row.name for row in rows)
    charts = []
    for title, what, unit in (
        ("Peak memory above the weights", "peak_bytes", 2**20),
        ("CPU seconds a step", "seconds", 1),
    ):
        lines = [Line(n, [(r.tokens, getattr(r, what) / unit) for r in rows if r.name == n]) for n in names]
        charts.append((title + (", MiB" if unit > 1 else ""), lines))
    path.write_text(chart(charts, "tokens of the document"), encoding="utf-8")


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--seconds", type=float, default=60, help="longest step after which longer rows are tried")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Reading] = []
    for name in arguments.schemes:
        for num_tokens in arguments.tokens:
            rows.append(measure(name, num_tokens))
            print(rows[-1], file=sys.stderr, flush=True)
            if rows[-1].seconds > arguments.seconds:
                break
    orders = {
        name: {what: growth_order([r for r in rows if r.name == name], what) for what in ("peak_bytes", "seconds")}
        for name in arguments.schemes
    }
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                   "cores": os.cpu_count(), "torch": torch.__version__}  # fmt: skip
        print(json.dumps({"rows": [asdict(row) for row in rows], "orders": orders, "machine": machine}, indent=1))
        return
    for row in rows:
        print(f"{row.name:26} {row.tokens:>8,} tokens {row.peak_bytes / 2**20:>9.1f} MiB {row.seconds:>8.2f} s")
    for name, order in orders.items():
        print(f"{name:26} bytes ~ tokens^{order['peak_bytes']:.2f}, seconds ~ tokens^{order['seconds']:.2f}")


def _optimizer(model: PeftModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def _ids(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 512, num_tokens).astype(np.int32)


if __name__ == "__main__":
    main()
