"""What the live view costs a run: CPU time of the display's thread, and of noting where the step is, by wall time.

    python -m benchmarks.overhead --seconds 30

Steps of a model of SmolLM2-135M's shape with random weights, streamed in small tiles, which note most; the display
draws its foot into a terminal of 120 columns. CPU time of a thread is exact where wall time on a shared machine is not.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.machine.vitals import Pulse
from narrowboat.model.adapters import adapt
from narrowboat.monitor.progress import Progress
from narrowboat.monitor.view import View
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, OptimizerOptions
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan

RESULT = Path(__file__).parent / "results" / "overhead.json"
SHAPE = {
    "vocab_size": 4096, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096,
}  # fmt: skip
NUM_TOKENS, TILE_TOKENS = 1024, 64


class Terminal(io.StringIO):
    """A text file that says that it is a terminal, and forgets."""

    def isatty(self) -> bool:
        """It says so."""
        return True

    def write(self, text: str) -> int:
        """Nothing is kept."""
        return len(text)


class TimedProgress(Progress):
    """A display that adds up the CPU time of its looks."""

    seconds, num_looks = 0.0, 0

    def look(self) -> None:
        """One look, timed."""
        began = time.thread_time()
        super().look()
        self.seconds += time.thread_time() - began
        self.num_looks += 1


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    found = measure(parser.parse_args().seconds)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def measure(seconds: float) -> dict[str, object]:
    """Steps for so many seconds under a display."""
    torch.manual_seed(0)
    lora = LoraOptions(rank=8)
    model = adapt(LlamaForCausalLM(LlamaConfig(**SHAPE)), lora, lambda event: None).model
    optimizer = build_optimizer(OptimizerOptions(), model.named_parameters())
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], NUM_TOKENS, np.int32)
    plan = MemoryPlan(layers="stream", tile_tokens=TILE_TOKENS)
    progress = TimedProgress(Console(file=Terminal(), force_terminal=True, width=120))
    with Gauge(torch.device("cpu"), 2**40) as gauge, Engine(model, optimizer, plan, 0) as engine:
        gauge.watch_model(model)
        engine.step([Row(ids, ids, (NUM_TOKENS,))], 1e-4, 0)
        num_notes = count_notes(engine)
        progress.watch(View(engine.underway, gauge.now, Pulse(gauge.device), lambda: 0, 30.0))
        began, num_steps = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            engine.step([Row(ids, ids, (NUM_TOKENS,))], 1e-4, num_steps)
            num_steps += 1
        wall = time.monotonic() - began
        noting = time_a_note(engine) * num_notes[0] * num_steps
        progress.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m benchmarks.overhead --seconds {seconds:g}",
        "wall_seconds": round(wall, 1),
        "steps": num_steps,
        "looks": progress.num_looks,
        "milliseconds_a_look": round(1e3 * progress.seconds / max(1, progress.num_looks), 3),
        "display_percent": round(100 * progress.seconds / wall, 3),
        "notes_a_step": num_notes[0],
        "noting_percent": round(100 * noting / wall, 4),
    }


def count_notes(engine: Engine) -> list[int]:
    """Filled with the notes of a step, which is taken here."""
    counted, at = [0], type(engine.underway).at

    def count(*place: int) -> None:
        counted[0] += 1
        at(engine.underway, *place)

    vars(engine.underway)["at"] = count
    ids = np.zeros(NUM_TOKENS, np.int32)
    engine.step([Row(ids, ids, (NUM_TOKENS,))], 1e-4, 0)
    del vars(engine.underway)["at"]
    return counted


def time_a_note(engine: Engine) -> float:
    """Seconds of one note."""
    began = time.thread_time()
    for _ in range(100_000):
        engine.underway.at(3, 0, 64, 1024)
    return (time.thread_time() - began) / 100_000


if __name__ == "__main__":
    main()
