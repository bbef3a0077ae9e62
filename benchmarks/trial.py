"""One system, one training step, one process: bytes above the weights and seconds, measured alone.

    python -m benchmarks.trial stream --tokens 4096 --layers 10 --threads 2

A process is warmed up with a short row, then takes the row that counts. With ``--metered`` the step runs under
Narrowboat's meter, which sees every system's tensors alike and costs some time; without it the clock is read. In both
cases the operating system says how far the process grew: the peak of its resident pages, and of those that are no
mapped file's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.systems import SYSTEMS, smollm2
from narrowboat.machine.hardware import process_memory
from narrowboat.memory.meter import Meter

WARM_UP_TOKENS = 256
SAMPLE_SECONDS = 0.005


@dataclass
class Reading:
    """What one step of one system took. Bytes are above those of weights and process at the step's start."""

    name: str
    tokens: int
    layers: int
    peak_bytes: int | None
    seconds: float | None
    cpu_seconds: float | None
    resident_bytes: int
    anonymous_bytes: int
    loss: float


class Watch:
    """Reads memory and clock while a step runs; ``begin`` and ``end`` may be called by a trainer's callbacks."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self.seconds = self.cpu_seconds = 0.0
        self.peak_bytes: int | None = None
        self.resident_bytes = self.anonymous_bytes = 0

    def begin(self) -> None:
        self._running = True
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._resting = process_memory()
        self._anonymous = self._resident = 0
        self._sampler.start()
        if self._meter is not None:
            self._meter.reset_peak()
            self._before = self._meter.live.device_bytes
        self._begun, self._cpu_begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._begun
        self.cpu_seconds = time.process_time() - self._cpu_begun
        if self._meter is not None:
            self.peak_bytes = self._meter.peak.device_bytes - self._before
        self._running = False
        self._sampler.join()
        self.anonymous_bytes = self._anonymous - self._resting.anonymous_bytes
        self.resident_bytes = self._resident - self._resting.resident_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _sample(self) -> None:
        while self._running:
            now = process_memory()
            self._anonymous = max(self._anonymous, now.anonymous_bytes)
            self._resident = max(self._resident, now.resident_bytes)
            time.sleep(SAMPLE_SECONDS)


def run_here(name: str, tokens: int, layers: int, metered: bool) -> Reading:
    """Build the model, warm up, take the step."""
    model = smollm2(layers)
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(0, model.config.vocab_size, (1, num), generator=generator)
        for num in (min(WARM_UP_TOKENS, tokens), tokens)
    ]
    meter = Meter() if metered else None
    if meter is not None:
        meter.watch_model(model)
    watch = Watch(meter)
    with meter or nullcontext():
        loss = SYSTEMS[name](model, rows, watch)
    seconds, cpu_seconds = (None, None) if metered else (watch.seconds, watch.cpu_seconds)
    return Reading(
        name, tokens, layers, watch.peak_bytes, seconds, cpu_seconds, watch.resident_bytes, watch.anonymous_bytes, loss
    )


def run_apart(name: str, tokens: int, layers: int, threads: int, metered: bool) -> Reading | str:
    """The same in a process of its own; the last line of what it said when it fails."""
    command = [sys.executable, "-m", "benchmarks.trial", name, f"--tokens={tokens}", f"--layers={layers}"]
    command += [f"--threads={threads}", *(["--metered"] if metered else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"exit {done.returncode}: {lines[-1] if lines else 'killed'}"
    return Reading(**json.loads(done.stdout.strip().splitlines()[-1]))


def compare(
    names: Sequence[str], tokens: int, layers: int, threads: int, rounds: int, say: Callable[[str], None]
) -> list[Reading]:
    """Bytes of every system once, then seconds: the median of ``rounds``, systems taking turns."""
    rows: dict[str, Reading] = {}
    for name in names:
        reading = run_apart(name, tokens, layers, threads, metered=True)
        if isinstance(reading, str):
            say(f"{name}, {tokens:,} tokens: {reading}")
            continue
        rows[name] = reading
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            reading = run_apart(name, tokens, layers, threads, metered=False)
            if isinstance(reading, str):
                say(f"{name}, {tokens:,} tokens: {reading}")
                continue
            assert reading.seconds is not None
            seconds[name].append(reading.seconds)
            row.resident_bytes, row.anonymous_bytes = reading.resident_bytes, reading.anonymous_bytes
    for name, row in rows.items():
        row.seconds = median(seconds[name]) if seconds[name] else None
        peak = f"{row.peak_bytes / 2**20:,.0f} MiB" if row.peak_bytes is not None else "-"
        say(
            f"{name:28} {tokens:7,} tokens  peak {peak:>12}  resident {row.resident_bytes / 2**20:8,.0f} MiB  "
            f"{row.seconds or 0:7.2f} s  loss {row.loss:.6f}"
        )
    return list(rows.values())


def main() -> None:
    """One system in this process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1] if __doc__ else None)
    parser.add_argument("system", choices=sorted(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--metered", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(asdict(run_here(args.system, args.tokens, args.layers, args.metered))))


if __name__ == "__main__":
    main()
