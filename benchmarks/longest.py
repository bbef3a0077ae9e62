"""What fits on cards of 8 to 80 GiB: rows that people use, and the longest row, with what each takes beside the card.

    python -m benchmarks.longest                 the two tables that README.md shows
    python -m benchmarks.longest --json > benchmarks/results/longest.json

Llama-3.1-8B with an NF4 base, LoRA of rank 32 on all linear layers, one row a step, exact gradients, at most 128 GiB of
host memory; scratch files may be larger. All figures of ours are forecasts: bytes with the margin for what a card holds
beside tensors, seconds at half of the published peaks, from the fastest to the slowest card of that size in the
catalogue. Published: Unsloth's figures of 2026-02 for the same model on such cards, which are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from narrowboat import planning
from narrowboat.options.load import load
from narrowboat.units import GIB, format_bytes, format_seconds

PUBLISHED = {8: (None, 2_972), 12: (932, 21_848), 16: (2_551, 40_724), 24: (5_789, 78_475), 80: (28_454, 342_733)}
"""By GiB of the card: the longest row of transformers with FlashAttention-2, and of Unsloth."""

USUAL = (32_768, 131_072)
POSITIONS = 131_072
"""Those that the model was made for."""


@dataclass(frozen=True)
class Outcome:
    """One answer."""

    card_gib: int
    tokens: int
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    plan: str
    seconds_per_step: tuple[float, float]
    answered_seconds: float


def ask(card_gib: int, tokens: int | None) -> Outcome:
    """The plan for a row of ``tokens`` on a card of ``card_gib``, or for the longest row that fits."""
    began = time.perf_counter()
    options = load(
        None,
        {
            "model.name": "llama-3.1-8b", "model.quantize": "nf4", "lora.rank": "32",
            "memory.budget": f"{card_gib}GiB", "memory.host_budget": "128GiB",
        },
    )  # fmt: skip
    found = planning.plan_for(planning.Question(options, tokens, here=False)).best.forecast
    return Outcome(
        card_gib, found.num_tokens, found.device_bytes, found.host_bytes, found.disk_bytes, found.plan.describe(),
        found.seconds_range or (0.0, 0.0), time.perf_counter() - began,
    )  # fmt: skip


def usual_table(rows: Sequence[Outcome]) -> list[str]:
    """Markdown: rows that people use."""
    lines = [
        "| card | tokens | seconds a step | tokens a second | beside the card | plan |",
        "|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        fast, slow = row.seconds_per_step
        lines.append(
            f"| {row.card_gib} GiB | {row.tokens:,} | {_range(fast, slow)} | {row.tokens / slow:,.0f} to "
            f"{row.tokens / fast:,.0f} | {_beside(row)} | {row.plan} |"
        )
    return lines


def longest_table(rows: Sequence[Outcome]) -> list[str]:
    """Markdown: the longest row, beside published ones."""
    lines = [
        "| card | transformers + FlashAttention-2 | Unsloth | Narrowboat, forecast | a step | beside the card |"
        " positions scaled by |",
        "|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        plain, unsloth = PUBLISHED[row.card_gib]
        lines.append(
            f"| {row.card_gib} GiB | {'out of memory' if plain is None else f'{plain:,}'} | {unsloth:,} | "
            f"{row.tokens:,} | {_range(*row.seconds_per_step)} | {_beside(row)} | {-(-row.tokens // POSITIONS)} |"
        )
    return lines


def _range(fast: float, slow: float) -> str:
    fastest, slowest = format_seconds(fast), format_seconds(slow)
    return fastest if fastest == slowest else f"{fastest} to {slowest}"


def _beside(row: Outcome) -> str:
    disk = f", {format_bytes(row.disk_bytes)} of disk" if row.disk_bytes else ""
    return f"{format_bytes(row.host_bytes)} of host memory{disk}"


def usual() -> list[Outcome]:
    """Answers for the rows that people use."""
    return [ask(gib, tokens) for tokens in USUAL for gib in PUBLISHED if gib <= 24]


def longest() -> list[Outcome]:
    """Answers for the longest row."""
    return [ask(gib, None) for gib in PUBLISHED]


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    answers = {"usual": usual(), "longest": longest()}
    if not arguments.json:
        print("\n".join([*usual_table(answers["usual"]), "", *longest_table(answers["longest"])]))
        return
    machine = {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB,
    }  # fmt: skip
    print(json.dumps({name: [asdict(row) for row in rows] for name, rows in answers.items()} | machine, indent=1))


if __name__ == "__main__":
    main()
