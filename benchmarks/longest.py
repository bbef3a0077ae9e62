"""The longest sequence that a card is forecast to train, beside published figures, and how long the answer took.

    python -m benchmarks.longest --json > benchmarks/results/longest.json

Llama-3.1-8B with an NF4 base, LoRA of rank 32 on all linear layers, one sequence, exact gradients, 128 GiB of host
memory; scratch files may be larger. Published: Unsloth's figures of 2026-02 for the same model on such cards, which are
measured; ours are forecasts, with the margin for what a card holds beside tensors. ``seconds`` and ``cpu_seconds`` are
those of the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass

import torch

from narrowboat import planning
from narrowboat.options.load import load
from narrowboat.units import GIB, format_bytes

PUBLISHED = {8: (None, 2_972), 12: (932, 21_848), 16: (2_551, 40_724), 24: (5_789, 78_475), 80: (28_454, 342_733)}
"""By GiB of the card: transformers with FlashAttention-2, and Unsloth."""


@dataclass(frozen=True)
class Outcome:
    """One card's answer."""

    name: str
    tokens: int
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    plan: str
    seconds: float
    cpu_seconds: float


def ask(card_gib: int) -> Outcome:
    """The longest row for a card of ``card_gib``."""
    wall, cpu = time.perf_counter(), time.process_time()
    options = load(
        None,
        {
            "model.name": "llama-3.1-8b", "model.quantize": "nf4", "lora.rank": "32",
            "memory.budget": f"{card_gib}GiB", "memory.host_budget": "128GiB",
        },
    )  # fmt: skip
    found = planning.plan_for(planning.Question(options, None, here=False)).best.forecast
    return Outcome(
        f"{card_gib} GiB", found.num_tokens, found.device_bytes, found.host_bytes, found.disk_bytes,
        found.plan.describe(), time.perf_counter() - wall, time.process_time() - cpu,
    )  # fmt: skip


def table(rows: list[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| card | transformers + FlashAttention-2 | Unsloth | Narrowboat | host | disk | plan | answered in |",
        "|--:|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        plain, unsloth = PUBLISHED[int(row.name.split()[0])]
        lines.append(
            f"| {row.name} | {'out of memory' if plain is None else f'{plain:,}'} | {unsloth:,} | {row.tokens:,} | "
            f"{format_bytes(row.host_bytes)} | {format_bytes(row.disk_bytes)} | {row.plan} | "
            f"{row.cpu_seconds:.0f} CPU seconds |"
        )
    return "\n".join(lines)


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [ask(gib) for gib in arguments.gib]
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB, "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}, indent=1))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
