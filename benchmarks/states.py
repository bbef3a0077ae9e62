"""Optimizers, adapters and formats on SmolLM2-135M and real long text: bytes of states, peak, time, held-out loss.

    python -m benchmarks.states                           every line, into benchmarks/results/states.{md,json,svg}
    python -m benchmarks.states --only adamw,nf4          some of them anew, the others as they stand there
    python -m benchmarks.states --only adamw,nf4 --json   some of them, to the screen

Every line trains rank 16 on all linear layers, streamed, over the same rows of Python's own reference text, and differs
from the first in what it names. Learning rates are adamw's, times ``RATES`` for what takes steps of another size.
Peaks are the meter's, over the first two steps; times are the median CPU seconds of the others, which nothing meters,
for wall time says more about what else the machine does. A few steps rank no optimizers: the losses show that what is
cheap learns too.
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
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers, load_base, load_tokenizer, weight_reader
from narrowboat.model.embedded import NAME
from narrowboat.optimizers.account import account
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions
from narrowboat.owner.causes import OPTIMIZER_STATES
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from narrowboat.units import format_bytes

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"
PLAN = MemoryPlan(layers="stream", tile_tokens=256, chunk_tokens=32)
METERED_STEPS, HELDOUT_ROWS = 2, 2
WIDTH, HEIGHT = 520, 380
AIMS = [
    ("adamw", "float32", 0.60, "peak_bytes"),
    ("adamw8bit", "adamw", 0.30, "state_bytes"),
    ("bnb_adamw8bit", "adamw", 0.30, "state_bytes"),
    ("adamw_fp8", "adamw", 0.30, "state_bytes"),
    ("adamw4bit", "adamw", 0.17, "state_bytes"),
]
"""Which line, against which, at most what share of which bytes, at a loss within 1 %."""
RATE = 1e-3
RATES = {"lion": 0.2, "bnb_lion": 0.2, "bnb_lion8bit": 0.2, "sophia_h": 0.5, "schedule_free": 2.0, "pissa": 0.2}
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
    "adamw8bit", "adamw4bit", "adamw_fp8", "bnb_adamw", "bnb_adamw8bit", "lion", "bnb_lion", "bnb_lion8bit",
    "sophia_h", "adafactor", "came", "adalomo", "schedule_free",
]  # fmt: skip
SETTINGS = [
    Setting("adamw", "optimizer"),
    *(Setting(name, "optimizer", {"name": name}) for name in OPTIMIZERS),
    Setting("adamw rebuilt", "optimizer", {"states": "rebuilt"}),
    Setting("LoRA+ (B 4 times as fast)", "adapter", {"b_rate": 4.0}),
    Setting("rslora", "adapter", lora={"variants": ("rslora",)}),
    Setting("dora", "adapter", lora={"variants": ("dora",)}),
    Setting("fa", "adapter", lora={"variants": ("fa",)}),
    Setting("pissa", "adapter", lora={"init": "pissa"}),
    Setting("float32", "format", dtype="float32"),
    Setting("float16 scaled", "format", dtype="float16"),
    Setting("nf4", "format", quantize="nf4"),
    Setting("nf4 loftq", "format", lora={"init": "loftq"}, quantize="nf4"),
    Setting("int4_weight", "format", quantize="int4_weight"),
    Setting("int8", "format", quantize="int8"),
    Setting("int8_weight", "format", quantize="int8_weight"),
]


@dataclass
class Reading:
    """What a setting came to."""

    name: str
    kind: str
    tokens: int
    steps: int
    state_bytes: int
    state_bytes_per_weight: float
    states: str
    peak_bytes: int
    seconds: float
    first_loss: float
    heldout_loss: float


def measure(setting: Setting, train: list[Row], heldout: list[Row], num_steps: int) -> Reading:
    """Train by ``setting`` for ``num_steps`` steps of a row each."""
    adapted, engine = prepared(setting)
    rates = OptimizerOptions(lr=RATE * RATES.get(setting.name, 1.0), **setting.optimizer)

    def step(number: int) -> float:
        began = time.process_time()
        engine.step([train[number % len(train)]], learning_rate(rates, number + 1, num_steps), seed=number)
        return time.process_time() - began

    with engine:
        first = _heldout(engine, heldout)
        with Meter() as meter:
            meter.watch_model(adapted)
            for number in range(METERED_STEPS):
                step(number)
            peak, live = meter.peak.device_bytes, meter.live.by_cause.get(OPTIMIZER_STATES, 0)
        seconds = [step(number) for number in range(METERED_STEPS, num_steps)]
        last = _heldout(engine, heldout)
    assert engine.optimizer is not None
    shares = account(engine.optimizer)
    num_weights = sum(share.num_weights for share in shares)
    kinds = [f"{s.kind} {s.num_bytes / s.num_weights:.2f} B for {s.num_weights / num_weights:.0%}" for s in shares]
    return Reading(
        setting.name, setting.kind, train[0].num_tokens, num_steps, live, live / num_weights, "; ".join(kinds), peak,
        statistics.median(seconds), first, last,
    )  # fmt: skip


def prepared(setting: Setting) -> tuple[Any, Engine]:
    """SmolLM2 with its adapter, and the engine that trains it."""
    options = OptimizerOptions(lr=RATE, **setting.optimizer)
    precision = choose_precision(setting.dtype, CPU, setting.quantize)
    base, _ = load_base(ModelOptions(name=NAME, quantize=setting.quantize), precision, CPU, lambda event: None)
    torch.manual_seed(0)
    read = weight_reader(NAME, lambda event: None)
    adapted = adapt(base, LoraOptions(**setting.lora), lambda event: None, read).model
    optimizer = build_optimizer(options, adapted.named_parameters())
    scale = loss_scale(options, precision.compute.dtype)
    return adapted, Engine(adapted, optimizer, PLAN, 0, options.clip_norm, scale=scale)


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


def aims(readings: list[Reading]) -> list[str]:
    """What was aimed at, beside what came out, a line each."""
    of = {reading.name: reading for reading in readings}
    lines = []
    for name, whole, share, what in AIMS:
        if name not in of or whole not in of:
            continue
        small, large = of[name], of[whole]
        ratio = getattr(small, what) / getattr(large, what)
        away = abs(small.heldout_loss - large.heldout_loss)
        loss, gained = away / large.heldout_loss, away / (large.first_loss - large.heldout_loss)
        verdict = "reached" if ratio <= share and loss <= 0.01 else "missed"
        lines.append(
            f"- {name} against {whole}: {ratio:.1%} of its {what.replace('_', ' ')} (aim: at most {share:.0%}), "
            f"held-out loss {loss:.2%} apart (aim: 1 %), {gained:.0%} of what training gained: {verdict}"
        )
    return lines


def plot(readings: list[Reading]) -> str:
    """Held-out loss against bytes of states for optimizers, against the peak for the others, as SVG."""
    optimizers = [reading for reading in readings if reading.kind == "optimizer"]
    others = [readings[0], *(reading for reading in readings if reading.kind != "optimizer")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_panel("Optimizers: bytes of states", 0, [(r.name, r.state_bytes, r.heldout_loss) for r in optimizers]),
        *_panel("Adapters and formats: peak", WIDTH, [(r.name, r.peak_bytes, r.heldout_loss) for r in others]),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, left: int, points: list[tuple[str, int, float]]) -> list[str]:
    """Names stand in a column on the right, in the order of their losses, with a line to their point."""
    (high_x, low_y, high_y) = (
        max(x for _, x, _ in points), min(y for *_, y in points), max(y for *_, y in points),
    )  # fmt: skip
    x0, y0, width, height = left + 60, 40, WIDTH - 60 - 170, HEIGHT - 90
    bottom, names_x = y0 + height, x0 + width + 25
    spread = (high_y - low_y) or 1.0
    parts = [
        f'<text x="{x0}" y="22" font-weight="bold">{title}</text>',
        f'<path d="M{x0},{y0}V{bottom}H{x0 + width}" fill="none" stroke="#888"/>',
        f'<text x="{x0}" y="{bottom + 16}" text-anchor="middle">0</text>',
        f'<text x="{x0 + width}" y="{bottom + 16}" text-anchor="middle">{format_bytes(high_x)}</text>',
        f'<text x="{x0 - 6}" y="{bottom}" text-anchor="end">{low_y:.3f}</text>',
        f'<text x="{x0 - 6}" y="{y0 + 10}" text-anchor="end">{high_y:.3f}</text>',
        f'<text x="{x0 - 6}" y="{y0 + height / 2}" text-anchor="end">loss</text>',
    ]
    step = height / max(1, len(points) - 1)
    for i, (name, x, y) in enumerate(sorted(points, key=lambda point: -point[2])):
        at_x, at_y, name_y = x0 + width * x / high_x, bottom - height * (y - low_y) / spread, y0 + step * i
        parts += [
            f'<path d="M{at_x:.0f},{at_y:.0f}L{names_x - 4},{name_y:.0f}" stroke="#ccc"/>',
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="#2f6f8f"/>',
            f'<text x="{names_x}" y="{name_y + 4:.0f}">{name}</text>',
        ]
    return parts


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", default="", help="names of lines, separated by commas")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    hush_transformers()
    wanted = [s for s in SETTINGS if not given.only or s.name in given.only.split(",")]
    rows = list(real_rows(given.tokens, given.steps + HELDOUT_ROWS))
    readings = []
    for setting in wanted:
        readings.append(measure(setting, rows[:-HELDOUT_ROWS], rows[-HELDOUT_ROWS:], given.steps))
        if not given.json:
            print(table([readings[0], readings[-1]]).splitlines()[-1], flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if given.json:
        print(json.dumps({"rows": [asdict(r) for r in readings], "machine": machine}))
    else:
        write(with_earlier(readings), machine)


def with_earlier(readings: list[Reading]) -> list[Reading]:
    """In the order of ``SETTINGS``, with what earlier runs of the same length found for other settings."""
    path = RESULTS / "states.json"
    earlier = [Reading(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []
    length = (readings[0].tokens, readings[0].steps)
    found = {r.name: r for r in earlier if (r.tokens, r.steps) == length} | {r.name: r for r in readings}
    return [found[setting.name] for setting in SETTINGS if setting.name in found]


def write(readings: list[Reading], machine: dict[str, Any]) -> None:
    """The three files of the results."""
    first = readings[0]
    command = f"python -m benchmarks.states --steps {first.steps} --tokens {first.tokens}"
    about = (
        f"`{command}`: SmolLM2-135M, rank 16 on all linear layers, {first.steps} steps of {first.tokens} tokens, "
        f"{torch.get_num_threads()} CPU thread(s), torch {torch.__version__}. Held-out loss before: "
        f"{first.first_loss:.4f}. Rates, times adamw's {RATE:g}: {', '.join(f'{n} {r:g}' for n, r in RATES.items())}."
    )
    text = "\n\n".join(["# States, adapters and formats", about, table(readings), "\n".join(aims(readings))])
    RESULTS.mkdir(exist_ok=True)
    result = {"rows": [asdict(r) for r in readings], "machine": machine}
    (RESULTS / "states.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "states.md").write_text(f"{text}\n\n![held-out loss against bytes](states.svg)\n", encoding="utf-8")
    (RESULTS / "states.svg").write_text(plot(readings), encoding="utf-8")


if __name__ == "__main__":
    main()
