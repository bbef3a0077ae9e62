"""The published tables for LoRA on long text, reproduced: what strategies cost, and whether the answers stay as good.

    python -m benchmarks.long_text_tables --scale 0.25 --steps 4 --answers 0
    python -m benchmarks.long_text_tables --scale 0.0625 --steps 12 --answers 10 --seeds 0 1 2
    python -m benchmarks.long_text_tables --scale 1 --forecast     # bytes of whole rows, without a step
    python -m benchmarks.long_text_tables --report                 # tables and plot of all that was run

Three tasks (``long_texts.py``), SmolLM2-135M, rank 16 on all linear layers. Each run is ``narrowboat.train`` and
``narrowboat.evaluate``, as a user has them, and leaves its folder in ``build/long_text``; what is there is not run
again. Strategies take turns. Those of whole rows have the budget that their plan is forecast to take, so that nothing
but that plan fits. Seconds are the processor's, of one thread (``OMP_NUM_THREADS=1``) and without the first step, which
also knows no optimizer states yet. ``original`` keeps all activations; even so its logits are never whole, as they are
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.long_text_report import (
    CPU_FILE,
    FOLDER,
    KEYFRAMES,
    KEYS,
    NAME,
    ORIGINAL,
    RECOMPUTE,
    STRATEGIES,
    STREAM,
    Run,
    report,
)
from benchmarks.long_texts import FULL_TOKENS, records
from narrowboat import api
from narrowboat.assembly import Setting
from narrowboat.choosing import search_in
from narrowboat.events import Event, StepDone
from narrowboat.options.load import load
from narrowboat.planner.amounts import Forecast
from narrowboat.preparing import prepared_data

CARRIED_SHARE, KEYFRAMES_SHARE, SEGMENTS = 0.75, 0.4, 4
CARRY = {"carry.policy": "sinks", "carry.block_tokens": 16}
ALL = {"carry.storage": "int8", "lora.rank": "auto", "optimizer.name": "adamw8bit", "memory.plan": "recompute"}
RATE, NUM_TRAIN = 1e-3, 24


def flags_of(run: Run) -> dict[str, Any]:
    """What the strategy sets."""
    segment = run.tokens // SEGMENTS
    in_segments: dict[str, Any] = {"segments.max_tokens": segment}
    carried = {"carry.budget": str(round(CARRIED_SHARE * run.tokens)), "segments.max_tokens": segment, **CARRY}
    alone = {"data.max_tokens": segment, "dialogues.policy": "split"} if run.task == "dialogues" else in_segments
    return {
        ORIGINAL: {"memory.plan": "keep"},
        "segments": {"memory.plan": "keep", **alone},
        "segments + carried cache": {"memory.plan": "keep", **carried},
        "all": {**carried, **ALL},
        RECOMPUTE: {"memory.plan": "recompute"},
        STREAM: {"memory.plan": "stream"},
        KEYFRAMES: {
            "memory.plan": "keep", "dialogues.policy": "keyframes",
            "data.max_tokens": round(KEYFRAMES_SHARE * run.tokens),
        },
    }[run.strategy]  # fmt: skip


def do(run: Run, steps: int, num_answers: int) -> None:
    """Train, and measure if answers are wanted."""
    flags = all_flags(run, steps, num_answers)
    if "carry.policy" not in flags and run.strategy != ORIGINAL:
        flags["memory.budget"] = just_enough(flags).device_bytes
    spent: list[float] = []

    def clock(event: Event) -> None:
        if isinstance(event, StepDone):
            spent.append(time.process_time())

    api.train(load(None, flags), quiet=True, callbacks=[clock])
    (run.folder / CPU_FILE).write_text(json.dumps(spent))
    if num_answers:
        api.evaluate(run.folder)


def all_flags(run: Run, steps: int, num_answers: int) -> dict[str, Any]:
    """The options of a run, whose data is there then."""
    data = written(run, num_answers)
    flags = {
        "data.train": str(data / "train.jsonl"), "data.cache": str(FOLDER / "prepared"), "data.heldout_share": 0,
        "model.device": "cpu", "optimizer.lr": RATE, "optimizer.warmup_steps": min(2, steps - 1),
        "train.folder": str(run.folder), "train.steps": steps, "train.seed": run.seed, "train.save_every": 0,
        "train.batch_tokens": run.tokens, "train.monitor": (), "memory.high": 1.0, "evaluate.answers": num_answers,
        "evaluate.answer_tokens": 96,
    }  # fmt: skip
    if num_answers:
        flags["data.heldout"] = str(data / "heldout.jsonl")
    return flags | flags_of(run)


def written(run: Run, num_heldout: int) -> Path:
    """The folder of the task's records, written if they are not there."""
    folder = FOLDER / f"{run.scale:g}" / run.task
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", NUM_TRAIN if num_heldout else 2), ("heldout", num_heldout)):
        made = records(run.task, run.tokens, number, name == "heldout")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made), encoding="utf-8")
    return folder


def just_enough(flags: Mapping[str, Any]) -> Forecast:
    """What the fastest plan of the wanted kind takes for the longest row; of streaming, with inputs on disk."""
    setting = Setting.of(load(None, dict(flags)), lambda event: None)
    data, search = prepared_data(setting, quiet=True), search_in(setting)
    plan = next(p for p in search.rungs if p.layers != "stream" or p.inputs != "device")
    longest = max(int(n) for rows in (data.train, data.heldout) for n in rows.lengths)
    return search.in_every_phase(search.forecast(plan, longest))


def foreseen(run: Run) -> tables.Row:
    """A row without a step."""
    found = just_enough(all_flags(run, 1, 0))
    return {
        "task": run.task, "strategy": run.strategy, "scale": run.scale, "date": date.today().isoformat(),
        "tokens": found.num_tokens, "row_tokens": found.num_tokens, "plan": found.plan.describe(), "seeds": 0,
        "forecast_bytes": found.device_bytes, "peak_bytes": None, "seconds": None, "scores": {},
    }  # fmt: skip


def main() -> None:
    """Run what is not there yet, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.0625, help="of 8,000, 5,000 and 6,000 tokens")
    parser.add_argument("--steps", type=int, default=12, help="of a record each")
    parser.add_argument(
        "--answers", type=int, default=10, help="held-out questions; 0 measures bytes and seconds alone"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tasks", nargs="+", choices=list(FULL_TOKENS), default=list(FULL_TOKENS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--minutes", type=float, default=25.0, help="after which nothing new is begun")
    parser.add_argument("--forecast", action="store_true", help="run nothing: what whole rows are forecast to take")
    parser.add_argument("--report", action="store_true", help="run nothing: tables and plot anew")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    if given.forecast:
        whole = product(given.tasks, (ORIGINAL, RECOMPUTE, STREAM))
        tables.merge(NAME, [foreseen(Run(task, strategy, given.scale, 0)) for task, strategy in whole], KEYS)
    elif not given.report:
        for seed, task, strategy in product(given.seeds, given.tasks, given.strategies):
            run = Run(task, strategy, given.scale, seed)
            if run.is_done or (strategy == KEYFRAMES and task != "dialogues"):
                continue
            if time.monotonic() > until:
                print(f"{given.minutes:g} minutes are over; the same command goes on.", file=sys.stderr)
                break
            shutil.rmtree(run.folder, ignore_errors=True)
            began = time.monotonic()
            do(run, given.steps, given.answers)
            print(f"{run.folder}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(report())


if __name__ == "__main__":
    main()
