"""Optimizers, adapters and formats on SmolLM2-135M and real long text: bytes of states, peak, time, held-out loss.

    python -m benchmarks.states                           every line, into benchmarks/results/states.{md,json,svg}
    python -m benchmarks.states --only adamw,nf4 --json   some of them, to the screen

Every line trains rank 16 on all linear layers, streamed, over the same rows of Python's own reference text, and differs
from the first in what it names. Learning rates are adamw's, times what its paper gives an optimizer of another kind.
Times are the median step's CPU seconds, for wall time says more about what else the machine does; peaks are the
meter's. A few steps rank no optimizers: the losses show that what is cheap learns too.
"""

from __future__ import annotations

import argparse
import json
import platform
import pydoc_data.topics
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowboat.data.examples import IGNORED, Row
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import loss_scale
from narrowboat.machine.precision import choose_precision
from narrowboat.memory.meter import OPTIMIZER_STATES, Meter
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers, load_base, load_tokenizer, weight_reader
from narrowboat.model.embedded import NAME
from narrowboat.optimizers.account import account
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions
from narrowboat.plan import MemoryPlan
from narrowboat.units import format_bytes

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
RATE = 1e-3
RATES = {"lion": 0.2, "bnb_lion": 0.2, "bnb_lion8bit": 0.2, "sophia_h": 0.5, "schedule_free": 2.0}
"""Times adamw's."""


@dataclass(frozen=True)
class Setting:
    """A line of the table: what differs from adamw, LoRA and bfloat16."""

    name: str
    kind: str
    optimizer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    dtype: Any = "bfloat16"
    quantize: Any = "none"


OPTIMIZERS = [
    "adamw8bit", "adamw4bit", "adamw_fp8", "bnb_adamw8bit", "lion", "bnb_lion8bit", "sophia_h", "adafactor", "came",
    "adalomo", "schedule_free",
]  # fmt: skip
SETTINGS = [
    Setting("adamw", "optimizer"),
    *(Setting(name, "optimizer", {"name": name}) for name in OPTIMIZERS),
    Setting("adamw, rebuilt", "optimizer", {"states": "rebuilt"}),
    Setting("LoRA+ (B 4 times as fast)", "adapter", {"b_rate": 4.0}),
    Setting("rslora", "adapter", lora={"variants": ("rslora",)}),
    Setting("dora", "adapter", lora={"variants": ("dora",)}),
    Setting("fa", "adapter", lora={"variants": ("fa",)}),
    Setting("pissa", "adapter", lora={"init": "pissa"}),
    Setting("float32", "format", dtype="float32"),
    Setting("float16, scaled", "format", dtype="float16"),
    Setting("nf4", "format", quantize="nf4"),
    Setting("nf4, loftq", "format", lora={"init": "loftq"}, quantize="nf4"),
    Setting("int8", "format", quantize="int8"),
    Setting("int8_weight", "format", quantize="int8_weight"),
]


@dataclass
class Reading:
    """What a setting came to."""

    name: str
    kind: str
    tokens: int
    state_bytes: int
    state_bytes_per_weight: float
    states: str
    peak_bytes: int
    seconds: float
    first_loss: float
    heldout_loss: float


def measure(setting: Setting, train: list[Row], heldout: list[Row], num_steps: int) -> Reading:
    """Train by ``setting`` for ``num_steps`` steps of a row each."""
    model = ModelOptions(name=NAME, quantize=setting.quantize)
    precision = choose_precision(setting.dtype, CPU, setting.quantize)
    base, _ = load_base(model, precision, CPU, lambda event: None)
    torch.manual_seed(0)
    read = weight_reader(NAME, lambda event: None)
    adapted = adapt(base, LoraOptions(**setting.lora), lambda event: None, read).model
    options = OptimizerOptions(lr=RATE * RATES.get(setting.optimizer.get("name", ""), 1.0), **setting.optimizer)
    plan = MemoryPlan(layers="stream", tile_tokens=256, chunk_tokens=128)
    seconds = []
    with Meter() as meter:
        meter.watch_model(adapted)
        optimizer = build_optimizer(options, adapted.named_parameters())
        scale = loss_scale(options, precision.compute.dtype)
        with Engine(adapted, optimizer, plan, 0, options.clip_norm, scale=scale) as engine:
            first = _heldout(engine, heldout)
            for step in range(num_steps):
                meter.reset_peak()
                began = time.process_time()
                engine.step([train[step % len(train)]], learning_rate(options, step + 1, num_steps), seed=step)
                seconds.append(time.process_time() - began)
            last = _heldout(engine, heldout)
        peak, live = meter.peak.device_bytes, meter.live.by_cause.get(OPTIMIZER_STATES, 0)
    shares = account(optimizer)
    num_weights = sum(share.num_weights for share in shares)
    kinds = [f"{s.kind} {s.num_bytes / s.num_weights:.2f} B for {s.num_weights / num_weights:.0%}" for s in shares]
    return Reading(
        setting.name, setting.kind, train[0].num_tokens, live, live / num_weights, "; ".join(kinds), peak,
        statistics.median(seconds), first, last,
    )  # fmt: skip


def _heldout(engine: Engine, rows: list[Row]) -> float:
    total, num = engine.evaluate(rows)
    return total / num


def real_rows(num_tokens: int, num_rows: int) -> Iterator[Row]:
    """Rows of Python's reference, in its own order."""
    tokenizer = load_tokenizer(NAME, lambda event: None)
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = np.array(tokenizer(text[: 6 * num_tokens * num_rows], verbose=False)["input_ids"], dtype=np.int32)
    for start in range(0, num_rows * num_tokens, num_tokens):
        row = ids[start : start + num_tokens]
        yield Row(row, np.concatenate([[IGNORED], row[1:]]).astype(np.int32), (len(row),))


def table(readings: list[Reading]) -> str:
    """As Markdown; the first line is what the others are compared with."""
    first = readings[0]
    lines = [
        "| kind | setting | states | a weight | of adamw's | peak | of adamw's | CPU s a step | held-out loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in readings:
        lines.append(
            f"| {r.kind} | {r.name} | {format_bytes(r.state_bytes)} | {r.state_bytes_per_weight:.2f} B | "
            f"{r.state_bytes / first.state_bytes:.0%} | {format_bytes(r.peak_bytes)} | "
            f"{r.peak_bytes / first.peak_bytes:.0%} | {r.seconds:.1f} | {r.heldout_loss:.4f} |"
        )
    return "\n".join(lines)


def plot(readings: list[Reading]) -> str:
    """Held-out loss against peak bytes, as SVG."""
    width, height, left, bottom = 760, 460, 70, 50
    low_x, high_x = (f(r.peak_bytes for r in readings) for f in (min, max))
    low_y, high_y = (f(r.heldout_loss for r in readings) for f in (min, max))
    colours = {"optimizer": "#2f6f8f", "adapter": "#b3611d", "format": "#4d7c3a"}

    def at(reading: Reading) -> tuple[float, float]:
        x = left + (width - left - 150) * (reading.peak_bytes - low_x) / max(1, high_x - low_x)
        y = height - bottom - (height - bottom - 30) * (reading.heldout_loss - low_y) / max(1e-9, high_y - low_y)
        return x, y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} 20V{height - bottom}H{width - 20}" fill="none" stroke="#888"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">peak of a step, {format_bytes(low_x)} to '
        f"{format_bytes(high_x)}</text>",
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">held-out loss</text>',
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">{low_y:.3f}</text>',
        f'<text x="{left - 6}" y="30" text-anchor="end">{high_y:.3f}</text>',
    ]
    for reading in readings:
        x, y = at(reading)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[reading.kind]}"/>')
        parts.append(f'<text x="{x + 7:.1f}" y="{y + 4:.1f}">{reading.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", default="", help="names of lines, separated by commas")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    hush_transformers()
    wanted = [s for s in SETTINGS if not given.only or s.name in given.only.split(",")]
    rows = list(real_rows(given.tokens, given.steps + 2))
    readings = []
    for setting in wanted:
        readings.append(measure(setting, rows[:-2], rows[-2:], given.steps))
        if not given.json:
            print(table(readings).splitlines()[-1], flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    result = {"rows": [asdict(r) for r in readings], "machine": machine, "steps": given.steps}
    if given.json:
        print(json.dumps(result))
    elif not given.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "states.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        command = f"python -m benchmarks.states --steps {given.steps} --tokens {given.tokens}"
        about = f"`{command}`: {given.steps} steps of {given.tokens} tokens, {torch.get_num_threads()} CPU thread(s)."
        (RESULTS / "states.md").write_text(f"# States\n\n{about}\n\n{table(readings)}\n", encoding="utf-8")
        (RESULTS / "states.svg").write_text(plot(readings), encoding="utf-8")


if __name__ == "__main__":
    main()
