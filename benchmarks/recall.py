"""Does what matters survive a carry? SmolLM2-135M on real long text, and on facts at known depths.

    python -m benchmarks.recall --part perplexity
    python -m benchmarks.recall --part recall
    python -m benchmarks.recall --part recall --policies snap --budgets 0.25    # a row more, or once more
    python -m benchmarks.recall --part recall --tokens 1024 --segment 128 --steps 12 --pairs 3    # longer documents

perplexity: modules of Python's standard library and licences, of which the last segment is predicted with what the
policy kept of all before it; against nothing kept, and everything. recall: documents and dialogues (``facts.py``) with
order numbers, names and clauses at known depths, asked for at the end; the model adapts to such documents under the
policy that it is then asked under. Rows, tables and plot: ``benchmarks/results/recall.{json,md,svg}``.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import tables
from benchmarks.facts import DEPTHS, Case, dialogue, document
from benchmarks.plot import Line, chart
from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.evaluation.answers import answer
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.model.adapters import adapt
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import CarryOptions, LoraOptions
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan

MODULES, LICENCES = ("argparse", "tarfile"), ("numpy", "pyarrow")
POLICIES = ("window", "sinks", "lru", "heavy", "snap", "turns", "fetch")
KEYS = ("part", "name", "budget", "tokens")
SHORT_TOKENS = 384
LONGER = " --tokens 1024 --segment 128 --steps 12 --pairs 3"
ENDS = ("full context", "no carry")
LEARNING_RATE, WARM_STEPS = 1e-3, 2


@dataclass(frozen=True)
class Reading:
    """One policy and budget."""

    part: str
    name: str
    budget: float
    tokens: int
    segment: int
    documents: int
    carried_bytes: int
    peak_bytes: int
    cpu_seconds: float
    perplexity: float | None = None
    exact: float | None = None
    by_depth: dict[str, float] = field(default_factory=dict)


def load() -> tuple[PeftModel, Any]:
    """The embedded model in fp32 with a rank-8 adapter that does nothing yet."""
    folder = fetch(lambda event: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    return adapt(model, LoraOptions(rank=8, alpha=16), lambda event: None).model, AutoTokenizer.from_pretrained(folder)


def settings(num_tokens: int, arguments: argparse.Namespace) -> Iterator[tuple[str, float, CarryOptions]]:
    """Everything kept, next to nothing kept, and each policy with each share of the document."""
    if "full context" in arguments.policies:
        yield "full context", 1.0, CarryOptions(policy="window", budget=str(2 * num_tokens), block_tokens=16)
    if "no carry" in arguments.policies:
        yield "no carry", 0.0, CarryOptions(policy="window", budget="1", block_tokens=1)
    for policy in (name for name in arguments.policies if name not in ENDS):
        for share in arguments.budgets:
            given = {"policy": policy, "budget": str(round(share * num_tokens)), "block_tokens": 16}
            yield policy, share, CarryOptions.model_validate(given)


def texts(tokenizer: Any, num_tokens: int) -> list[list[int]]:
    """The beginnings of real long texts."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / f"{module}.py" for module in MODULES]
    for name in LICENCES:
        found = [path for path in distribution(name).files or () if path.name == "LICENSE.txt"]
        paths.append(Path(str(min(found, key=lambda path: len(str(path))).locate())))
    return [tokenizer(path.read_text(encoding="utf-8"))["input_ids"][:num_tokens] for path in paths]


def last_segment_perplexity(arguments: argparse.Namespace) -> Iterator[Reading]:
    """Of the base model, over the last segment of each text."""
    model, tokenizer = load()
    silent = arguments.tokens - arguments.segment
    trains = []
    for ids in texts(tokenizer, arguments.tokens):
        labels = np.array([-100] * silent + ids[silent:], np.int32)
        lengths = (arguments.segment,) * (arguments.tokens // arguments.segment)
        trains.append(Train(np.array(ids, np.int32), labels, lengths))
    for name, share, carry in settings(silent, arguments):
        carrier = Carrier(model, carry, 2**34)
        engine = Engine(model, None, MemoryPlan(layers="keep"), 0, carrier=carrier)
        began = time.process_time()
        with Meter() as meter, engine:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            found = [engine.evaluate([train]) for train in trains]
        loss = sum(loss for loss, _ in found) / sum(num for _, num in found)
        yield Reading(
            "perplexity", name, share, arguments.tokens, arguments.segment, len(trains), _carried(carrier, silent),
            meter.peak.device_bytes - weights, time.process_time() - began, perplexity=math.exp(loss),
        )  # fmt: skip


def recall(arguments: argparse.Namespace) -> Iterator[Reading]:
    """Adapt under each policy, then ask under it."""
    for name, share, carry in settings(arguments.tokens, arguments):
        model, tokenizer = load()
        carrier, began = Carrier(model, carry, 2**34), time.process_time()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        engine = Engine(model, optimizer, MemoryPlan(layers="keep"), 0, clip_norm=1.0, carrier=carrier)
        lessons, asked = random.Random(1), random.Random(2)
        with Meter() as meter, engine:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            for step in range(arguments.steps):
                rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_STEPS)
                found = engine.step([case.lesson() for case in _pair(tokenizer, arguments, lessons)], rate, seed=step)
                print(f"{name} {share:g}: step {step + 1}, loss {float(found.loss):.3f}", file=sys.stderr, flush=True)
            peak = meter.peak.device_bytes - weights
        with engine:
            cases = [case for _ in range(arguments.pairs) for case in _pair(tokenizer, arguments, asked)]
            answers = [found for case in cases for found in _asked(engine, tokenizer, case)]
        yield Reading(
            "recall", name, share, arguments.tokens, arguments.segment, len(cases), _carried(carrier, arguments.tokens),
            peak, time.process_time() - began, exact=sum(right for _, right in answers) / len(answers),
            by_depth={
                str(depth): sum(right for at, right in answers if at == depth) / len(cases) for depth in DEPTHS
            },
        )  # fmt: skip


def _pair(tokenizer: Any, arguments: argparse.Namespace, draw: random.Random) -> list[Case]:
    """A document and a dialogue."""
    return [make(tokenizer, arguments.tokens, arguments.segment, draw) for make in (document, dialogue)]


def _asked(engine: Engine, tokenizer: Any, case: Case) -> Iterator[tuple[float, bool]]:
    """The text once, then each question behind it; depths and whether the answer was exact."""
    engine.evaluate([case.reading()])
    for depth, question in case.questions():
        yield depth, answer(engine, question, tokenizer, 8).is_exact


def _carried(carrier: Carrier, num_tokens: int) -> int:
    """Bytes that are carried at the end of so many tokens."""
    return min(carrier.num_tokens, num_tokens) * carrier.num_bytes // carrier.num_tokens


def report(rows: Sequence[tables.Row]) -> None:
    """Tables and plot of all rows that there are."""
    order = [*ENDS, *POLICIES]
    rows = sorted(rows, key=lambda row: (order.index(row["name"]), row["budget"]))
    parts = {part: [row for row in rows if row["part"] == part] for part in ("perplexity", "recall")}
    text = "# Does what matters survive a carry?\n"
    if some := parts["perplexity"]:
        text += (
            f"\nPerplexity of the last {some[0]['segment']} of {some[0]['tokens']:,} tokens, SmolLM2-135M not trained, "
            f"{some[0]['documents']} texts (the modules {' and '.join(MODULES)}, the licences of "
            f"{' and '.join(LICENCES)}). `python -m benchmarks.recall --part perplexity`\n\n"
        )
        text += tables.table(
            ["policy", "budget", "carried", "peak above weights", "perplexity"],
            [[*_common(row), f"{row['perplexity']:.2f}"] for row in some],
        )
    for tokens in sorted({row["tokens"] for row in parts["recall"]}):
        some = [row for row in parts["recall"] if row["tokens"] == tokens]
        how = "" if tokens == SHORT_TOKENS else LONGER
        text += (
            f"\nExact answers after adapting, by depth of the fact (0 is the beginning), {some[0]['documents']} "
            f"documents and dialogues of {tokens:,} tokens, segments of {some[0]['segment']}, a question at "
            f"each depth of each. `python -m benchmarks.recall --part recall{how}`\n\n"
        )
        text += tables.table(
            ["policy", "budget", "carried", "peak of a step above weights", *map(str, DEPTHS), "all"],
            [[*_common(row), *(f"{row['by_depth'][str(d)]:.0%}" for d in DEPTHS), f"{row['exact']:.0%}"]
             for row in some],
        )  # fmt: skip
    parts["recall"] = [row for row in parts["recall"] if row["tokens"] == SHORT_TOKENS]
    tables.write("recall", "md", text)
    charts = []
    for title, value, scale in (
        ("perplexity of the last segment", "perplexity", 1),
        ("exact answers, %", "exact", 100),
    ):
        some = parts["perplexity" if value == "perplexity" else "recall"]
        lines = [
            Line(name, [(row["carried_bytes"] / 2**20, scale * row[value]) for row in some if row["name"] == name])
            for name in dict.fromkeys(row["name"] for row in some)
        ]
        if lines:
            charts.append((title, lines))
    tables.write("recall", "svg", chart(charts, "carried keys and values, MiB", linear=["exact answers, %"]))


def _common(row: tables.Row) -> list[str]:
    budget = {0.0: "1 token", 1.0: "all"}.get(row["budget"], f"{row['budget']:.0%}")
    return [row["name"], budget, f"{row['carried_bytes'] / 2**20:.1f} MiB", f"{row['peak_bytes'] / 2**20:.0f} MiB"]


def main() -> None:
    """Measure, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["perplexity", "recall"], required=True)
    parser.add_argument("--tokens", type=int, help="of a document [perplexity: 1536, recall: 384]")
    parser.add_argument("--segment", type=int, help="tokens of a segment [perplexity: 256, recall: 64]")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5], help="shares of the document")
    parser.add_argument("--policies", nargs="*", default=[*ENDS, *POLICIES], choices=[*ENDS, *POLICIES])
    parser.add_argument("--steps", type=int, default=8, help="recall: optimizer steps, of a document and a dialogue")
    parser.add_argument("--pairs", type=int, default=6, help="recall: documents and dialogues that are asked about")
    arguments = parser.parse_args()
    usual_tokens, usual_segment, measure = {
        "perplexity": (1536, 256, last_segment_perplexity),
        "recall": (SHORT_TOKENS, 64, recall),
    }[arguments.part]
    arguments.tokens, arguments.segment = arguments.tokens or usual_tokens, arguments.segment or usual_segment
    for reading in measure(arguments):
        print(reading, file=sys.stderr, flush=True)
        report(tables.merge("recall", [asdict(reading)], KEYS))
    report(tables.merge("recall", [], KEYS))


if __name__ == "__main__":
    main()
