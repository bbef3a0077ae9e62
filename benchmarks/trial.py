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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass

import psutil
import torch

from benchmarks.systems import SYSTEMS, adapted, smollm2
from narrowboat.machine.hardware import ProcessMemory, process_memory
from narrowboat.owner.meter import Meter

WARM_UP_TOKENS = 256
SAMPLE_SECONDS = 0.005


@dataclass
class Reading:
    """What one step of one system took.

    Attributes:
        held_bytes: weights and optimizer states on the device at the step's start, by the meter.
        peak_bytes: the most that was held above them.
        seconds, cpu_seconds: by the wall clock, and by the processor's of all threads, the meter's own included.
        others_seconds: what other processes took of the processors meanwhile; the less, the more the clock is worth.
        resident_bytes, anonymous_bytes: by how much the process grew, by the operating system; without the pages of
            mapped files.
        loss: the step's.
    """

    name: str
    tokens: int
    layers: int
    threads: int
    held_bytes: int | None
    peak_bytes: int | None
    seconds: float | None
    cpu_seconds: float | None
    resident_bytes: int
    anonymous_bytes: int
    loss: float
    others_seconds: float = 0.0


class Watch:
    """Reads memory and clock while a step runs; ``begin`` and ``end`` may be called by a trainer's callbacks.

    Args:
        meter: reads the tensors' bytes, if any does.
        resting: what the process held before it grew; by default what it holds when a step begins.
    """

    def __init__(self, meter: Meter | None, resting: ProcessMemory | None = None) -> None:
        self._meter, self._resting_before = meter, resting
        self.seconds = self.cpu_seconds = self.others_seconds = 0.0
        self.held_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.resident_bytes = self.anonymous_bytes = 0

    def begin(self) -> None:
        self._running = True
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._resting = self._resting_before or process_memory()
        self._anonymous = self._resident = 0
        self._sampler.start()
        if self._meter is not None:
            self._meter.reset_peak()
            self.held_bytes = self._meter.live.device_bytes
        self._begun, self._cpu_begun, self._busy_begun = time.perf_counter(), time.process_time(), _busy_seconds()

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._begun
        self.cpu_seconds = time.process_time() - self._cpu_begun
        self.others_seconds = max(0.0, _busy_seconds() - self._busy_begun - self.cpu_seconds)
        if self._meter is not None and self.held_bytes is not None:
            self.peak_bytes = self._meter.peak.device_bytes - self.held_bytes
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


def _busy_seconds() -> float:
    """What all processes together have had of all processors."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def run_here(name: str, tokens: int, layers: int, metered: bool) -> Reading:
    """Build the model, warm up, take the step."""
    model = adapted(smollm2(layers))
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
    return Reading(
        name=name,
        tokens=tokens,
        layers=layers,
        threads=torch.get_num_threads(),
        held_bytes=watch.held_bytes,
        peak_bytes=watch.peak_bytes,
        seconds=None if metered else watch.seconds,
        cpu_seconds=watch.cpu_seconds,
        resident_bytes=watch.resident_bytes,
        anonymous_bytes=watch.anonymous_bytes,
        loss=loss,
        others_seconds=watch.others_seconds,
    )


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
