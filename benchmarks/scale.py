"""What more processes give and cost: speed, bytes a rank, bytes over the wire, and the same losses.

    python -m benchmarks.scale --ranks 1 2 --json

Each run is ``narrowboat train --parallel.data N`` over the same step batches of SmolLM2-135M, one after the other. Each
process has one thread, so that as many processes as cores have as many threads as cores.
Bytes over the wire follow from the gradients' bytes and a ring's 2 (N - 1) / N; they are counted, not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from narrowboat.units import format_bytes

RESULT = Path(__file__).parent / "results" / "scale.json"
BATCH_TOKENS, LIMIT_TOKENS = 2048, 512


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        ranks: processes.
        seconds: of a step, the median without the first.
        peak_bytes: of rank 0, with the weights.
        state_bytes: of the optimizer, on each rank.
        wire_bytes: that each rank sends in a step.
        losses: of each step.
    """

    ranks: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int
    state_bytes: int
    wire_bytes: int
    losses: list[float]


def run(num: int, steps: int, folder: Path, plan: str) -> Row:
    """Train with ``num`` processes."""
    flags = {
        "model.name": "smollm2-135m", "model.dtype": "float32", "model.device": "cpu",
        "data.train": folder / "data/train", "data.heldout_share": 0, "data.max_tokens": LIMIT_TOKENS,
        "dialogues.oversized": "cut_prompt", "train.batch_tokens": BATCH_TOKENS, "train.steps": steps,
        "train.folder": folder / f"run{num}", "train.save_every": 0, "memory.budget": "3GiB", "memory.plan": plan,
        "parallel.data": num,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "narrowboat", "train", "--quiet", *words]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (folder / f"run{num}" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    done = [event for event in events if event["event"] == "StepDone"]
    (ready,) = (event for event in events if event["event"] == "ModelReady")
    gradient_bytes = 4 * ready["num_trainable"]
    seconds = median(event["seconds"] for event in done[1:])
    return Row(
        ranks=num,
        seconds=seconds,
        tokens_per_second=sum(event["num_tokens"] for event in done[1:]) / sum(event["seconds"] for event in done[1:]),
        peak_bytes=max(event["peak_bytes"] for event in done),
        state_bytes=2 * gradient_bytes,
        wire_bytes=round(2 * (num - 1) / num * gradient_bytes),
        losses=[event["loss"] for event in done],
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """In Markdown; what is compared is compared with the first."""
    first = rows[0]
    yield f"| processes | a step | tokens/s | speed of {first.ranks} | peak | states | sent a step | losses off by |"
    yield "|--:" * 8 + "|"
    for row in rows:
        off = max(abs(a / b - 1) for a, b in zip(row.losses, first.losses, strict=True))
        cells = [
            str(row.ranks), f"{row.seconds:.1f} s", f"{row.tokens_per_second:.0f}",
            f"{first.seconds / row.seconds:.2f}",
            *map(format_bytes, (row.peak_bytes, row.state_bytes, row.wire_bytes)), f"{off:.1e}",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Run them in turn, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plan", default="recompute", choices=["keep", "recompute", "stream"])
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/scale.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        demo = [sys.executable, "examples/demo_data.py", "--tokens", str(LIMIT_TOKENS), str(data)]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        rows = [run(num, args.steps, Path(folder), args.plan) for num in args.ranks]
    print("\n".join(table(rows)))
    if args.json:
        where = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": os.cpu_count()}
        RESULT.write_text(json.dumps(where | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
