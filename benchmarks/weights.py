"""A model of four budgets: its weights stay in the file that it was loaded from, and it trains as fast as from memory.

    python -m benchmarks.weights --tokens 8192 --layers 30 --threads 2 --json

SmolLM2-135M's shape, random weights in fp32, LoRA of rank 8 on all linear layers, batch 1. The budget is a quarter of
the frozen weights' bytes; the meter refuses whatever would pass it, and the operating system says by how much the
process grew since before the model was loaded, pages of mapped files apart. A small model's step comes first, so that
what libraries take at their first use is not taken for the model's, and freed memory goes back to the system at once,
so that a reading is of what is live. Beside it the same plan with the weights resident. Each in a process of its own,
taking turns; a step is forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.systems import adapted, loop, smollm2
from benchmarks.trial import WARM_UP_TOKENS, Watch
from narrowboat.machine.hardware import process_memory
from narrowboat.memory.install import install
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from narrowboat.units import MIB

TOP = Path(__file__).parents[1]
RESIDENT, MAPPED = "weights resident", "weights in their file"
STREAM = MemoryPlan(layers="stream", tile_tokens=768, chunk_tokens=128, inputs="disk", keep_keys_values=True)
PLANS = {RESIDENT: STREAM, MAPPED: STREAM.model_copy(update={"weights": "disk"})}
PARTS = 4
SIZES = {"weights": "weight_bytes", "peak by the meter": "peak_bytes", "process grew by": "anonymous_bytes"}


def step(name: str, folder: Path, tokens: int) -> dict[str, float | str]:
    """One step in this process."""
    get_going(PLANS[name])
    gc.collect()
    resting = process_memory()
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight_bytes = sum(p.nbytes for p in base.parameters())
    if name == RESIDENT:
        for parameter in base.parameters():
            parameter.data = parameter.data.clone()
    model = adapted(base)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, base.config.vocab_size, (1, num), generator=generator) for num in (WARM_UP_TOKENS, tokens)]
    meter = Meter(None if name == RESIDENT else weight_bytes // PARTS)
    watch = Watch(meter, resting)
    with install(model, PLANS[name]), meter:
        meter.watch_model(model)
        loop(model, rows, watch, lambda row: model(input_ids=row, labels=row).loss)
    return {
        "name": name,
        "tokens": tokens,
        "weight_bytes": weight_bytes,
        "peak_bytes": (watch.held_bytes or 0) + (watch.peak_bytes or 0),
        "anonymous_bytes": watch.anonymous_bytes,
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
    }


def get_going(plan: MemoryPlan) -> None:
    """A step of one layer, of which nothing stays."""
    model = adapted(smollm2(1))
    rows = [torch.zeros(1, WARM_UP_TOKENS, dtype=torch.long)] * 2
    with install(model, plan), Meter() as meter:
        loop(model, rows, Watch(meter), lambda row: model(input_ids=row, labels=row).loss)


def measure(tokens: int, layers: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """The median step of each system, by seconds."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in PLANS}
    with tempfile.TemporaryDirectory() as folder:
        smollm2(layers).save_pretrained(folder)
        for name in list(PLANS) * rounds:
            command = [sys.executable, "-m", "benchmarks.weights", "--try", name, folder]
            command += [f"--tokens={tokens}", f"--threads={threads}"]
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}
            done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            steps[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(steps[name][-1], file=sys.stderr, flush=True)
    return [sorted(found, key=lambda step: step["seconds"])[len(found) // 2] for found in steps.values()]


def main() -> None:
    """The table, or with ``--try`` one step in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--try", nargs=2, dest="single", metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.single:
        name, folder = arguments.single
        print(json.dumps(step(name, Path(folder), arguments.tokens)))
        return
    rows = measure(arguments.tokens, arguments.layers, arguments.threads, arguments.rounds)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
               "threads": arguments.threads, "torch": torch.__version__}  # fmt: skip
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": machine}, indent=1))
        return
    for row in rows:
        sizes = (f"{what} {row[key] / MIB:,.0f} MiB" for what, key in SIZES.items())
        print(f"{row['name']:20} {row['seconds']:7.1f} s ({row['cpu_seconds']:.1f} of processors), {', '.join(sizes)}")


if __name__ == "__main__":
    main()
