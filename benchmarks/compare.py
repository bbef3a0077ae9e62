"""Systems side by side: bytes of each once, then seconds, taking turns, and how all of them stand to one of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from benchmarks.plot import Line, chart
from benchmarks.trial import Reading

TOP = Path(__file__).parents[1]


def run_apart(name: str, tokens: int, layers: int, threads: int, metered: bool) -> Reading | None:
    """One system in a process of its own; None, with the reason on stderr, when it fails."""
    command = [sys.executable, "-m", "benchmarks.trial", name, f"--tokens={tokens}", f"--layers={layers}"]
    command += [f"--threads={threads}", *(["--metered"] if metered else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, check=False)
    if done.returncode == 0:
        return Reading(**json.loads(done.stdout.strip().splitlines()[-1]))
    reason = done.stderr.strip().splitlines() or ["killed"]
    print(f"{name} at {tokens:,} tokens ended with {done.returncode}: {reason[-1]}", file=sys.stderr, flush=True)
    return None


def measure(names: Sequence[str], tokens: int, layers: int, threads: int, rounds: int) -> list[Reading]:
    """Bytes of every system, and the median of ``rounds`` steps' seconds, systems taking turns."""
    rows = {n: r for n in names if (r := run_apart(n, tokens, layers, threads, metered=True)) is not None}
    timed: dict[str, list[Reading]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name in rows:
            if (reading := run_apart(name, tokens, layers, threads, metered=False)) is not None:
                timed[name].append(reading)
                print(f"{name}: {reading.seconds:.1f} s", file=sys.stderr, flush=True)
    for name, row in rows.items():
        if timed[name]:
            row.seconds = median(r.seconds or 0 for r in timed[name])
            row.cpu_seconds = median(r.cpu_seconds or 0 for r in timed[name])
            row.resident_bytes = max(r.resident_bytes for r in timed[name])
            row.anonymous_bytes = max(r.anonymous_bytes for r in timed[name])
    return list(rows.values())


def table(rows: Sequence[Reading], baseline: str) -> str:
    """Markdown: bytes and seconds, each with its share of the baseline's at the same length."""
    lines = [
        "| tokens | system | peak above weights | | process grew by | | seconds | | CPU seconds | |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        base = next((r for r in rows if (r.name, r.tokens) == (baseline, row.tokens)), None)
        cells = [f"{row.tokens:,}", row.name]
        for what, unit, digits in (
            ("peak_bytes", 2**20, 0),
            ("resident_bytes", 2**20, 0),
            ("seconds", 1, 1),
            ("cpu_seconds", 1, 1),
        ):
            value, of = getattr(row, what), getattr(base, what, None)
            cells.append("-" if value is None else f"{value / unit:,.{digits}f}{' MiB' if unit > 1 else ''}")
            cells.append(f"{value / of:.2f}" if value is not None and of else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Reading], path: Path) -> None:
    """Bytes and seconds over tokens, as an SVG."""
    names = dict.fromkeys(row.name for row in rows)
    charts = []
    for title, what, unit in (("Peak above the weights, MiB", "peak_bytes", 2**20), ("Seconds a step", "seconds", 1)):
        lines = [
            Line(name, [(r.tokens, getattr(r, what) / unit) for r in rows if r.name == name and getattr(r, what)])
            for name in names
        ]
        charts.append((title, [line for line in lines if line.points]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart(charts, "tokens"), encoding="utf-8")


def run(description: str | None, names: Sequence[str], baseline: str) -> None:
    """The command line of ``benchmarks.memory`` and ``benchmarks.peers``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="steps whose median is taken; 0 measures bytes alone")
    parser.add_argument("--systems", nargs="+", choices=list(names), default=list(names))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Reading] = []
    for tokens in arguments.tokens:
        rows += measure(arguments.systems, tokens, arguments.layers, arguments.threads, arguments.rounds)
        print(table(rows, baseline), file=sys.stderr, flush=True)
    if arguments.plot:
        plot(rows, arguments.plot)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}, indent=1))
    else:
        print(table(rows, baseline))
