"""Does what matters survive a carry? SmolLM2-135M on real long text, and on facts at known depths.

    python -m benchmarks.recall --json                     perplexity of the last segment, by policy and budget
    python -m benchmarks.recall --part recall --json       exact answers after adapting with each policy

perplexity: modules of Python's standard library, of which the last segment is predicted with what the policy kept of
all before it; against nothing kept, and everything. recall: documents in which one line of many names a code, asked for
at the end; the model adapts to such documents under the policy that it is then asked under. Small by default, to end
within minutes on two cores: the rows say how many documents they stand on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.evaluate.answers import answer, question_of
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.meter import Meter
from narrowboat.model.adapters import adapt
from narrowboat.model.embedded import fetch
from narrowboat.options.schema import CarryOptions, LoraOptions
from narrowboat.plan import MemoryPlan

MODULES = ("argparse", "tarfile", "pickle", "ast", "zipfile", "inspect", "doctest", "optparse")
POLICIES = ("window", "sinks", "lru", "heavy", "snap", "turns")
DEPTHS = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Reading:
    """One policy and budget."""

    name: str
    tokens: int
    budget: int
    documents: int
    carried_bytes: int
    peak_bytes: int
    seconds: float
    perplexity: float | None = None
    exact: float | None = None
    by_depth: dict[str, float] = field(default_factory=dict)


def load() -> tuple[PeftModel, Any]:
    """The embedded model in fp32 with a rank-8 adapter that does nothing yet."""
    folder = fetch(lambda event: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    return adapt(model, LoraOptions(rank=8, alpha=16), lambda event: None).model, AutoTokenizer.from_pretrained(folder)


def train_of(ids: Sequence[int], labels: Sequence[int], segment_tokens: int) -> Train:
    """A document in equal segments; the last is what is left."""
    lengths = [segment_tokens] * (len(ids) // segment_tokens)
    if rest := len(ids) % segment_tokens:
        lengths.append(rest)
    return Train(np.array(ids, np.int32), np.array(labels, np.int32), tuple(lengths))


def settings(num_tokens: int, budgets: Sequence[float], policies: Sequence[str]) -> Iterator[tuple[str, CarryOptions]]:
    """Everything kept, next to nothing kept, and each policy with each share of the document."""
    yield "full context", CarryOptions(policy="window", budget=str(2 * num_tokens), block_tokens=16)
    yield "no carry", CarryOptions(policy="window", budget="1", block_tokens=1)
    for policy in policies:
        for share in budgets:
            given = {"policy": policy, "budget": str(round(share * num_tokens)), "block_tokens": 16}
            yield policy, CarryOptions.model_validate(given)


def last_segment_perplexity(arguments: argparse.Namespace) -> Iterator[Reading]:
    """Of the base model, over the last segment of each document."""
    model, tokenizer = load()
    library = Path(sysconfig.get_paths()["stdlib"])
    trains = []
    for module in MODULES[: arguments.documents]:
        ids = tokenizer((library / f"{module}.py").read_text(encoding="utf-8"))["input_ids"][: arguments.tokens]
        silent = arguments.tokens - arguments.segment
        trains.append(train_of(ids, [-100] * silent + ids[silent:], arguments.segment))
    for name, carry in settings(arguments.tokens - arguments.segment, arguments.budgets, arguments.policies):
        carrier = Carrier(model, carry, 2**34)
        engine = Engine(model, None, MemoryPlan(layers="keep"), 0, carrier=carrier)
        began, total = time.monotonic(), 0.0
        with Meter() as meter, engine:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            found = [engine.evaluate([train]) for train in trains]
        total = sum(loss for loss, _ in found) / sum(num for _, num in found)
        held = min(carrier.num_tokens, arguments.tokens - arguments.segment)
        yield Reading(
            name, arguments.tokens, held, len(trains), held * carrier.num_bytes // carrier.num_tokens,
            meter.peak.device_bytes - weights, time.monotonic() - began, perplexity=math.exp(total),
        )  # fmt: skip


def document(tokenizer: Any, depth: float, num_tokens: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Lines about orders, one of which is asked for at the end; only the answer is learnt."""
    people = ["Ada", "Bao", "Carl", "Dora", "Emil", "Fatma", "Goro", "Hana", "Ivan", "Jada", "Kofi", "Lena"]
    towns = ["Basel", "Cairo", "Delhi", "Essen", "Genoa", "Leeds", "Lyon", "Malmo", "Osaka", "Turin"]
    who, code = draw.choice(people), str(draw.randrange(100, 1000))
    others = [person for person in people if person != who]
    fact = tokenizer(f"The secret code of {who} is {code}.\n")["input_ids"]
    question = tokenizer(f"Question: What is the secret code of {who}?\nAnswer:")["input_ids"]
    reply = [*tokenizer(f" {code}")["input_ids"], tokenizer.eos_token_id]
    filler: list[int] = []
    room = num_tokens - len(fact) - len(question) - len(reply)
    place = None
    while len(filler) < room:
        if place is None and len(filler) >= depth * room:
            place = len(filler)
        line = f"{draw.choice(others)} sent {draw.randrange(2, 99)} boxes to {draw.choice(towns)}.\n"
        filler += tokenizer(line)["input_ids"]
    place = len(filler) if place is None else place
    context = [*filler[:place], *fact, *filler[place:], *question]
    return [*context, *reply], [-100] * len(context) + reply


def recall(arguments: argparse.Namespace) -> Iterator[Reading]:
    """Adapt under each policy, then ask under it."""
    for name, carry in settings(arguments.tokens, arguments.budgets, arguments.policies):
        model, tokenizer = load()
        carrier = Carrier(model, carry, 2**34)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        engine = Engine(model, optimizer, MemoryPlan(layers="keep"), 0, clip_norm=1.0, carrier=carrier)
        draw, began = random.Random(1), time.monotonic()
        exact: dict[str, list[bool]] = {}
        with Meter() as meter, engine:
            meter.watch_model(model)
            weights = meter.live.device_bytes
            for step in range(arguments.steps):
                rows = [
                    train_of(*document(tokenizer, draw.random(), arguments.tokens, draw), arguments.segment)
                    for _ in range(arguments.rows)
                ]
                engine.step(rows, 2e-3 * min(1.0, (step + 1) / 3), seed=step)
            peak = meter.peak.device_bytes - weights
        asked = random.Random(2)
        with engine:
            for depth in DEPTHS:
                for _ in range(arguments.documents):
                    train = train_of(*document(tokenizer, depth, arguments.tokens, asked), arguments.segment)
                    question = question_of(train)
                    assert question is not None
                    exact.setdefault(str(depth), []).append(answer(engine, question, tokenizer, 8).is_exact)
        held = min(carrier.num_tokens, arguments.tokens)
        everything = [one for found in exact.values() for one in found]
        yield Reading(
            name, arguments.tokens, held, len(everything), held * carrier.num_bytes // carrier.num_tokens, peak,
            time.monotonic() - began, exact=sum(everything) / len(everything),
            by_depth={depth: sum(found) / len(found) for depth, found in exact.items()},
        )  # fmt: skip


def main() -> None:
    """Measure, print, plot."""
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["perplexity", "recall"], default="perplexity")
    parser.add_argument("--tokens", type=int, default=1536, help="of a document")
    parser.add_argument("--segment", type=int, default=256, help="tokens of a segment")
    parser.add_argument("--documents", type=int, default=4, help="documents; with recall: questions at each depth")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5], help="shares of the document")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--steps", type=int, default=20, help="recall: optimizer steps")
    parser.add_argument("--rows", type=int, default=2, help="recall: documents a step")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for reading in {"perplexity": last_segment_perplexity, "recall": recall}[arguments.part](arguments):
        rows.append(reading)
        print(reading, file=sys.stderr, flush=True)
    if arguments.plot:
        from benchmarks.plot import Line, chart

        value = "perplexity" if arguments.part == "perplexity" else "exact"
        lines = [Line(row.name, [(row.carried_bytes / 2**20, max(0.01, getattr(row, value)))]) for row in rows]
        arguments.plot.write_text(chart([(value, lines)], "carried keys and values, MiB"), encoding="utf-8")
    if arguments.json:
        machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                   "cores": os.cpu_count(), "torch": torch.__version__}  # fmt: skip
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}, indent=1))


if __name__ == "__main__":
    main()
