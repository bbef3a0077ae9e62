"""How much faster answers come when questions are answered together: tokens a second, one by one and several at once.

    python -m benchmarks.answers
    python -m benchmarks.answers --tokens 512 --answer-tokens 48 --together 1 4 16

SmolLM2-135M in bfloat16, questions of real text, each answer as long as it may be; numbers of questions take turns, and
medians count. Reading the questions is part of the seconds: it is done one by one however many are written together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks import tables
from benchmarks.states import CPU, real_rows
from narrowboat.engine.engine import Engine
from narrowboat.evaluation.answers import write_all
from narrowboat.machine.precision import choose_precision
from narrowboat.model.base import hush_transformers, load_base
from narrowboat.model.embedded import NAME
from narrowboat.options.schema import ModelOptions
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan


def measure(tokens: int, answer_tokens: int, together: list[int], turns: int) -> list[tables.Row]:
    """A row for each number of questions at once; all answer the same ones."""
    hush_transformers()
    model, _ = load_base(ModelOptions(name=NAME), choose_precision("bfloat16", CPU), CPU, lambda event: None)
    questions = list(real_rows(tokens, max(together)))
    seconds: dict[int, list[float]] = {num: [] for num in together}
    peaks: dict[int, int] = {}
    with Engine(model, None, MemoryPlan(layers="recompute"), 0) as engine:
        for turn in range(turns + 1):
            for num in together:
                groups = [questions[start : start + num] for start in range(0, len(questions), num)]
                began = time.monotonic()
                if turn:
                    for group in groups:
                        write_all(engine, group, answer_tokens, set())
                    seconds[num].append(time.monotonic() - began)
                    continue
                with Meter() as meter:
                    meter.watch_model(model)
                    held = meter.live.device_bytes
                    write_all(engine, groups[0], answer_tokens, set())
                    peaks[num] = meter.peak.device_bytes - held
    written = len(questions) * answer_tokens
    return [
        {"name": f"{num} together", "tokens": tokens, "peak_bytes": peaks[num],
         "seconds": statistics.median(seconds[num]), "tokens_per_second": written / statistics.median(seconds[num])}
        for num in together
    ]  # fmt: skip


def main() -> None:
    """The rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of a question")
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 16], help="each divides the largest")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    rows = measure(given.tokens, given.answer_tokens, given.together, given.turns)
    print(json.dumps({"rows": rows, "machine": tables.machine()}, indent=1))


if __name__ == "__main__":
    main()
