"""Systems side by side: readings, each from a process of its own, put together to a table and a plot.

Bytes by the meter are the same on a busy machine and on a quiet one, seconds are not: ``--measure bytes`` and
``--measure seconds`` may be run apart. With ``--results FOLDER`` each reading is added to ``FOLDER/readings.jsonl``,
all that is there counts, and the rows, the table and the plot are written beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.plot import Line, chart
from benchmarks.trial import Reading

TOP = Path(__file__).parents[1]
READINGS = "readings.jsonl"
LOUD = 0.1


@dataclass(frozen=True)
class Row:
    """One system at one length and depth; what was not measured is None."""

    name: str
    tokens: int
    layers: int
    peak_bytes: int | None
    resident_bytes: int
    anonymous_bytes: int
    seconds: float | None
    cpu_seconds: float | None
    rounds: int


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


def measure(arguments: argparse.Namespace) -> list[Reading]:
    """What the command line asks for, systems taking turns; each reading is kept as soon as it is there."""
    turns = ["bytes", *["seconds"] * arguments.rounds]
    readings: list[Reading] = []
    for layers, tokens, turn, name in product(arguments.layers, arguments.tokens, turns, arguments.systems):
        if turn not in arguments.measure:
            continue
        reading = run_apart(name, tokens, layers, arguments.threads, metered=turn == "bytes")
        if reading is not None:
            readings.append(reading)
            line = json.dumps(asdict(reading))
            print(line, file=sys.stderr, flush=True)
            if arguments.results:
                with (arguments.results / READINGS).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return readings


def put_together(readings: Sequence[Reading], threads: int) -> list[Row]:
    """One row a system, length and depth: the meter's last reading, and medians of the steps that were timed.

    Seconds are of steps with ``threads`` threads during which other processes took less than a tenth of the time.
    Processor seconds are of steps with one thread: those of several count the time in which they wait for each other.
    """
    groups: dict[tuple[int, int, str], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.layers, reading.tokens, reading.name), []).append(reading)
    rows = []
    for (layers, tokens, name), group in groups.items():
        peaks = [r.peak_bytes for r in group if r.peak_bytes is not None]
        timed = [r for r in group if r.seconds is not None and r.threads == threads and _is_quiet(r)]
        alone = [r.cpu_seconds for r in group if r.cpu_seconds is not None and r.threads == 1]
        row = Row(
            name,
            tokens,
            layers,
            peak_bytes=peaks[-1] if peaks else None,
            resident_bytes=max(r.resident_bytes for r in timed or group),
            anonymous_bytes=max(r.anonymous_bytes for r in timed or group),
            seconds=median(r.seconds or 0 for r in timed) if timed else None,
            cpu_seconds=median(alone) if alone else None,
            rounds=len(timed),
        )
        rows.append(row)
    return rows


def _is_quiet(reading: Reading) -> bool:
    return reading.others_seconds < LOUD * (reading.seconds or 0)


def table(rows: Sequence[Row], baseline: str) -> str:
    """Markdown: bytes and seconds, each with its share of the baseline's at the same length and depth."""
    lines = [
        "| layers | tokens | system | peak above weights | | process grew by | | seconds | | CPU seconds, 1 thread | |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        base = next((r for r in rows if (r.name, r.tokens, r.layers) == (baseline, row.tokens, row.layers)), None)
        cells = [str(row.layers), f"{row.tokens:,}", row.name]
        for what, unit in (("peak_bytes", 2**20), ("resident_bytes", 2**20), ("seconds", 1), ("cpu_seconds", 1)):
            value, of = getattr(row, what), getattr(base, what, None)
            written = f"{value / unit:,.0f} MiB" if value and unit > 1 else f"{value:,.1f}" if value else "-"
            cells += [written, f"{value / of:.2f}" if value and of else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(rows: Sequence[Row]) -> str:
    """Markdown: peak bytes a further token, between the shortest and the longest row of each system and depth."""
    lines = ["| layers | system | tokens | bytes a further token |", "|--:|---|---|--:|"]
    for layers, name in dict.fromkeys((row.layers, row.name) for row in rows):
        peaks = {r.tokens: r.peak_bytes for r in rows if (r.layers, r.name) == (layers, name) and r.peak_bytes}
        short, long = min(peaks, default=0), max(peaks, default=0)
        if short < long:
            slope = (peaks[long] - peaks[short]) / (long - short)
            lines.append(f"| {layers} | {name} | {short:,} to {long:,} | {slope:,.0f} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> str:
    """Bytes and seconds over tokens, as an SVG."""
    charts = []
    for title, what, unit in (
        ("Peak above the weights, MiB", "peak_bytes", 2**20),
        ("Seconds of a step", "seconds", 1),
    ):
        lines = [
            Line(name, [(r.tokens, getattr(r, what) / unit) for r in rows if r.name == name and getattr(r, what)])
            for name in dict.fromkeys(row.name for row in rows)
        ]
        if drawn := [line for line in lines if line.points]:
            charts.append((title, drawn))
    return chart(charts, "tokens")


def write(folder: Path, benchmark: str, rows: Sequence[Row], machine: dict[str, object], baseline: str) -> None:
    """The rows, the table and the plot of the first depth, each in a file of its own."""
    stem = folder / benchmark
    stem.with_suffix(".json").write_text(_as_json(rows, machine) + "\n", encoding="utf-8")
    tokens, layers = (sorted({getattr(row, what) for row in rows}) for what in ("tokens", "layers"))
    command = f"python -m benchmarks.{benchmark} --tokens {_words(tokens)} --layers {_words(layers)} --results {folder}"
    said = f"`{command}`, on {machine['cores']} cores with PyTorch {machine['torch']}; shares are of {baseline}'s. "
    said += "Seconds by the clock are there where the machine was quiet; processor seconds are from `--threads 1`."
    page = [
        said,
        table(rows, baseline),
        growth(rows),
        f"![Bytes and seconds over tokens]({benchmark}.svg)",
    ]
    stem.with_suffix(".md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    stem.with_suffix(".svg").write_text(plot([r for r in rows if r.layers == rows[0].layers]), encoding="utf-8")


def run(benchmark: str, description: str | None, names: Sequence[str], baseline: str) -> None:
    """The command line of ``benchmarks.memory`` and ``benchmarks.peers``."""
    arguments = _parser(description, names).parse_args()
    if arguments.results:
        arguments.results.mkdir(parents=True, exist_ok=True)
    readings = measure(arguments)
    if arguments.results and (arguments.results / READINGS).exists():
        lines = (arguments.results / READINGS).read_text(encoding="utf-8").splitlines()
        readings = [Reading(**json.loads(line)) for line in lines]
    rows = put_together([r for r in readings if r.name in names], arguments.threads)
    rows.sort(key=lambda row: (row.layers, row.tokens, names.index(row.name)))
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    if arguments.results and rows:
        write(arguments.results, benchmark, rows, machine, baseline)
    print(_as_json(rows, machine) if arguments.json else table(rows, baseline))


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _as_json(rows: Sequence[Row], machine: dict[str, object]) -> str:
    return json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}, indent=1)


def _parser(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--layers", type=int, nargs="+", default=[10])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs="*", choices=["bytes", "seconds"], default=["bytes", "seconds"])
    parser.add_argument("--rounds", type=int, default=3, help="steps whose median is taken")
    parser.add_argument("--systems", nargs="+", choices=list(names), default=list(names))
    parser.add_argument("--results", type=Path, help="folder of all readings so far, for rows, table and plot")
    parser.add_argument("--json", action="store_true")
    return parser
