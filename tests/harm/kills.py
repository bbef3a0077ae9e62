"""Kills aimed at the moments that hurt, over plans, formats, optimizers, carries and accumulation; and the run goes on.

A session ends itself by SIGKILL at the n-th call of the kind that it is told (``POINTS``). The run is resumed until it
is done, and then adapter, states and every loss must be those of the run that was let alone, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowboat import api, running
from narrowboat.engine.engine import Engine
from narrowboat.machine import drafts
from narrowboat.monitor.recorders import JsonLines
from narrowboat.optimizers import driving
from narrowboat.owner.owner import Owner
from tests.harm.place import PLANS, Place, differences, drafts_in, losses, session, under

CARRY = {
    "carry.policy": "sinks", "carry.budget": "64", "carry.block_tokens": "16", "segments.max_tokens": "64",
    "data": "documents",
}  # fmt: skip
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("keep", {"optimizer.name": "adamw"}),
    ("recompute", {"optimizer.name": "adamw8bit", "lora.rank": 64, "train.batch_tokens": 800}),
    ("stream", {"optimizer.name": "schedule_free", "lora.dropout": 0.1}),
    ("inputs on host", {"optimizer.name": "adalomo", "lora.variants": "rslora"}),
    ("inputs on disk", {"optimizer.name": "adamw4bit", "lora.rank": 64, "lora.variants": "dora"}),
    ("weights on disk", {"optimizer.name": "lion", "train.batch_tokens": 600}),
    ("weights on host", {"optimizer.name": "adafactor", "lora.init": "pissa"}),
    ("stream", {"optimizer.name": "adamw", **CARRY, "carry.gradients": "cut"}),
    ("keep", {"optimizer.name": "came", **CARRY, "carry.gradients": "exact"}),
    ("recompute", {"optimizer.name": "adamw", "model.quantize": "nf4", "optimizer.states": "rebuilt"}),
    ("weights on disk", {"optimizer.name": "adamw", "model.quantize": "nf4"}),
    ("weights on host", {"optimizer.name": "adamw", "model.quantize": "int8", "optimizer.states": "host"}),
    ("weights on disk", {"optimizer.name": "adamw", "model.quantize": "int4_weight"}),
    ("weights on host", {"optimizer.name": "adamw_fp8", "model.quantize": "int8_weight", "lora.rank": 64}),
    ("weights on disk", {"optimizer.name": "adamw", **CARRY, "carry.gradients": "cut"}),
]
POINTS: dict[str, tuple[Any, str]] = {
    "write": (drafts.HashedFile, "write"),
    "flush": (os, "fsync"),
    "rename": (os, "replace"),
    "load": (torch.nn.Module, "register_parameter"),
    "step": (Engine, "step"),
    "update": (driving, "step"),
    "evaluation": (Engine, "evaluate"),
    "event": (JsonLines, "record"),
    "last adapter": (running, "save_adapter"),
    "leaving": (Owner, "end"),
}


@dataclass
class Result:
    """What came of the kills; ``wrong`` are runs that could not be read or are not the same."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS, 0))
    runs: int = 0
    sessions: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Kills of all kinds."""
        return sum(self.kills.values())


def kills(place: Place, num_kills: int, seed: int, say: Callable[[str], None]) -> Result:
    """Run after run, each under the next of ``SETTINGS`` (first the ``seed``-th), until ``num_kills`` are made."""
    rng, result = random.Random(seed), Result()
    wholes: dict[int, tuple[Path, dict[str, int]]] = {}
    while result.total < num_kills:
        number = (seed + result.runs) % len(SETTINGS)
        plan, changes = SETTINGS[number]
        if number not in wholes:
            wholes[number] = _whole(place, number)
        whole, calls = wholes[number]
        run = place.folder / f"run {result.runs}"
        result.runs += 1
        if _resumed_until_done(place, run, number, calls, num_kills, rng, result):
            wrong = differences(whole, run, place.steps) + drafts_in(run)
            wrong += [kind for kind, values in losses(whole).items() if values != losses(run)[kind]]
            result.wrong += [f"{run.name} ({plan}, {changes}): {', '.join(wrong)}"] if wrong else []
        shutil.rmtree(run, ignore_errors=True)
        say(f"{result.total} kills, {result.runs} runs, {len(result.wrong)} wrong; the last: {plan}, {changes}")
    return result


def _resumed_until_done(
    place: Place, run: Path, number: int, calls: dict[str, int], num_kills: int, rng: random.Random, result: Result
) -> bool:
    while True:
        kind = rng.choice([*POINTS]) if result.total < num_kills else None
        at = rng.randint(1, calls[kind]) if kind else 0
        code, said = session(lambda: _train(place, run.name, number, run.exists(), {kind: at}))  # noqa: B023
        result.sessions += 1
        if code == -signal.SIGKILL and kind:
            result.kills[kind] += 1
        elif code:
            result.wrong.append(f"{run.name} ({SETTINGS[number]}), {kind} {at}: ends with {code}: {said[-2000:]}")
            return False
        else:
            return True


def _whole(place: Place, number: int) -> tuple[Path, dict[str, int]]:
    """A run that is let alone, and how many calls of each kind it takes."""
    whole, calls = place.folder / f"whole {number}", place.folder / f"calls {number}.json"

    def counted() -> None:
        made = _train(place, whole.name, number, False, {})
        calls.write_text(json.dumps(made))

    code, said = session(counted)
    if code:
        raise SystemExit(f"{SETTINGS[number]}: the run that is let alone ends with {code}: {said[-2000:]}")
    return whole, json.loads(calls.read_text())


def _train(place: Place, name: str, number: int, resume: bool, deadly: dict[str | None, int]) -> dict[str, int]:
    """Train in this process, which ends at the n-th call of a ``deadly`` kind; calls of each kind."""
    made = dict.fromkeys(POINTS, 0)
    for kind, (owner, attribute) in POINTS.items():
        setattr(owner, attribute, _counted(getattr(owner, attribute), kind, made, deadly.get(kind, 0)))
    plan, changes = SETTINGS[number]
    with under(PLANS[plan]):
        api.train(place.options(name, changes), resume=resume, quiet=True)
    return made


def _counted(own: Callable[..., Any], kind: str, made: dict[str, int], deadly: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        made[kind] += 1
        if made[kind] == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    return call
