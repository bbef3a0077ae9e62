"""How bytes and seconds grow with the tokens: full attention, a window, shifted sparse attention, segments, a carry.

    python -m benchmarks.growth                                        # 1,024 to 65,536 tokens
    python -m benchmarks.growth --schemes full --tokens 1024 4096      # some rows measured again
    python -m benchmarks.growth --tokens                               # table and plot of the rows that are there

One training step (AdamW on a rank-8 adapter) of a small random Llama on random tokens, layers recomputed unless
they are streamed or a segment's activations are kept; peak bytes by the meter without the weights, CPU seconds of one
core.

A growth order is the slope of log(bytes) or log(seconds) over log(tokens), fitted from 4,096 tokens on: 0 is no growth,
1 linear, 2 quadratic. How seconds grow with the window is measured in the same way, at 16,384 tokens. A scheme whose
step took longer than ``--seconds`` is not tried on longer rows. Rows, table and plot:
``benchmarks/results/growth.{json,md,svg}``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import tables
from benchmarks.plot import Line, chart
from narrowboat.data.examples import IGNORED, Row
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.schemes import Scheme
from narrowboat.options.schema import CarryOptions
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan

KEYS = ("name", "tokens", "window")
SEGMENT_TOKENS = WINDOW = 512
OVERLAP_TOKENS = 64
WINDOWS, WINDOW_AT, FIT_FROM = (256, 1024, 2048), 16384, 4096
RECOMPUTE, KEEP = MemoryPlan(layers="recompute"), MemoryPlan(layers="keep")
STREAM = MemoryPlan(layers="stream", tile_tokens=SEGMENT_TOKENS, chunk_tokens=SEGMENT_TOKENS, inputs="disk")


@dataclass(frozen=True)
class Reading:
    """One scheme at one length."""

    name: str
    tokens: int
    window: int
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


Make = Callable[[PeftModel, int, int], tuple[Engine, list[Row]]]
"""From a model, tokens and a window to what a step is made by, and of."""


def whole(plan: MemoryPlan) -> Make:
    """A whole row, each token of which sees all before it."""

    def make(model: PeftModel, num_tokens: int, window: int) -> tuple[Engine, list[Row]]:
        ids = _ids(num_tokens)
        return Engine(model, _optimizer(model), plan, 0), [Row(ids, ids, (num_tokens,))]

    return make


def sparse(is_shifted: bool) -> Make:
    """A whole row under a scheme."""

    def make(model: PeftModel, num_tokens: int, window: int) -> tuple[Engine, list[Row]]:
        ids = _ids(num_tokens)
        engine = Engine(model, _optimizer(model), RECOMPUTE, 0, scheme=Scheme(window, is_shifted))
        return engine, [Row(ids, ids, (num_tokens,))]

    return make


def overlapping(model: PeftModel, num_tokens: int, window: int) -> tuple[Engine, list[Row]]:
    """Segments, each a row by itself that begins with the end of the one before, which is not learnt again."""
    ids, rows = _ids(num_tokens), []
    for start in range(0, num_tokens - OVERLAP_TOKENS, SEGMENT_TOKENS - OVERLAP_TOKENS):
        part = ids[start : start + SEGMENT_TOKENS]
        labels = part.copy()
        labels[: OVERLAP_TOKENS if start else 0] = IGNORED
        rows.append(Row(part, labels, (len(part),)))
    return Engine(model, _optimizer(model), KEEP, 0), rows


def carried(plan: MemoryPlan, **options: str) -> Make:
    """Segments of a document that carry ``window`` tokens."""

    def make(model: PeftModel, num_tokens: int, window: int) -> tuple[Engine, list[Row]]:
        carry = CarryOptions.model_validate({"policy": "sinks", "budget": str(window)} | options)
        ids, lengths = _ids(num_tokens), (SEGMENT_TOKENS,) * (num_tokens // SEGMENT_TOKENS)
        engine = Engine(model, _optimizer(model), plan, 0, carrier=Carrier(model, carry, 2**30))
        return engine, [Train(ids, ids, lengths)]

    return make


SCHEMES: dict[str, Make] = {
    "full": whole(RECOMPUTE),
    "full, streamed, inputs on disk": whole(STREAM),
    "sliding window": sparse(is_shifted=False),
    "shifted sparse": sparse(is_shifted=True),
    "segments with overlap": overlapping,
    "carry, cut": carried(KEEP),
    "carry, cut, recompute": carried(RECOMPUTE),
    "carry, fetch": carried(KEEP, policy="fetch"),
    "carry, within 4 segments": carried(KEEP, gradients="4"),
}


def measure(name: str, num_tokens: int, window: int = WINDOW) -> Reading:
    """A step to get going, the median of up to five for seconds, and one under the meter for bytes."""
    model = small_llama()
    engine, rows = SCHEMES[name](model, num_tokens, window)
    seconds: list[float] = []
    with engine:
        for seed in range(6):
            began = time.process_time()
            engine.step(rows, 1e-4, seed=seed)
            seconds.append(time.process_time() - began)
            if sum(seconds) > 4:
                break
        with Meter() as meter:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            engine.step(rows, 1e-4, seed=6)
    return Reading(name, num_tokens, window, meter.peak.device_bytes - weights, median(seconds[1:] or seconds))


def growth_order(rows: Sequence[tables.Row], what: str, along: str = "tokens") -> float:
    """Slope of the straight line that fits a log-log plot best, from ``FIT_FROM`` tokens on."""
    long = [row for row in rows if row["tokens"] >= FIT_FROM]
    x, y = (np.log([row[which] for row in long]) for which in (along, what))
    return float(np.polyfit(x, y, 1)[0]) if len(long) > 1 else math.nan


def report(rows: Sequence[tables.Row]) -> None:
    """Table and plot of all rows that there are."""
    names = [name for name in SCHEMES if any(row["name"] == name for row in rows)]
    lengths = sorted({row["tokens"] for row in rows if row["window"] == WINDOW})
    usual = {(row["name"], row["tokens"]): row for row in rows if row["window"] == WINDOW}
    text = (
        "# How bytes and seconds grow\n\nOne training step of a small Llama (two layers of 4 heads of 32), window, "
        f"segments and budget of {WINDOW} tokens, overlap of {OVERLAP_TOKENS}, one core. "
        "`python -m benchmarks.growth`; a scheme whose step took more than 20 seconds was not tried on longer rows. "
        f"Fitted from {FIT_FROM:,} tokens on.\n"
    )
    for title, what, form in (
        ("Peak above the weights, MiB", "peak_bytes", lambda value: f"{value / 2**20:.1f}"),
        ("CPU seconds a step", "seconds", lambda value: f"{value:.2f}"),
    ):
        body = []
        for name in names:
            mine = [usual[name, length] for length in lengths if (name, length) in usual]
            cells = [form(usual[name, n][what]) if (name, n) in usual else "" for n in lengths]
            body.append([name, *cells, f"tokens^{_plain(growth_order(mine, what))}"])
        text += f"\n{title}:\n\n" + tables.table(["", *(f"{n:,}" for n in lengths), "grows as"], body)
    text += (
        f"\nThe same at {WINDOW_AT:,} tokens over windows (budgets) of {WINDOWS[0]:,} to {WINDOWS[-1]:,} tokens:\n\n"
    )
    body = []
    for name in names:
        mine = [row for row in rows if row["name"] == name and row["tokens"] == WINDOW_AT]
        if len(mine) > 1:
            orders = [growth_order(mine, what, "window") for what in ("peak_bytes", "seconds")]
            body.append([name, *(f"window^{_plain(order)}" for order in orders)])
    text += tables.table(["", "peak grows as", "seconds grow as"], body)
    tables.write("growth", "md", text)
    charts = [
        (title, [Line(n, [(x, usual[n, x][what] / unit) for x in lengths if (n, x) in usual]) for n in names])
        for title, what, unit in (
            ("Peak memory above the weights, MiB", "peak_bytes", 2**20),
            ("CPU seconds a step", "seconds", 1),
        )
    ]
    tables.write("growth", "svg", chart(charts, "tokens of the document"))


def _plain(order: float) -> str:
    return f"{round(order, 2) + 0.0:.2f}"  # -0.00 is 0.00


def main() -> None:
    """Measure, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2**n for n in range(10, 17)])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--seconds", type=float, default=20, help="longest step after which longer rows are tried")
    arguments = parser.parse_args()
    if arguments.tokens:
        measure("carry, cut", 1024)  # to get going
    for name in arguments.schemes:
        sizes = [(tokens, WINDOW) for tokens in arguments.tokens]
        if name in ("sliding window", "carry, cut") and WINDOW_AT in arguments.tokens:
            sizes += [(WINDOW_AT, window) for window in WINDOWS]
        for tokens, window in sizes:
            reading = measure(name, tokens, window)
            print(reading, file=sys.stderr, flush=True)
            report(tables.merge("growth", [asdict(reading)], KEYS))
            if reading.seconds > arguments.seconds:
                break
    report(tables.merge("growth", [], KEYS))


def _optimizer(model: PeftModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def _ids(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 512, num_tokens).astype(np.int32)


if __name__ == "__main__":
    main()
