"""What the processes of the tests do: runs, some of which fail on one rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from narrowboat import api
from narrowboat.engine.engine import Engine
from narrowboat.errors import NarrowboatError
from narrowboat.options.load import load
from tests.distributed.together import new_port

RANK = int(os.environ.get("RANK", "0"))


def runs(flags_of_runs: Sequence[dict[str, Any]]) -> list[str]:
    """Run after run; how each ended."""
    return [ended(flags) for flags in flags_of_runs]


def ended(flags: dict[str, Any], resume: bool = False) -> str:
    new_port()
    try:
        return api.train(load(None, flags), resume=resume, quiet=True).outcome
    except NarrowboatError as error:
        return f"{type(error).__name__}: {error}"


def failing(flags: dict[str, Any], failing_rank: int, step: int, kind: str) -> tuple[str, float]:
    """A run in which ``failing_rank`` fails in the second micro-batch of ``step``: how it ended, and seconds from the
    failure on.
    """
    begun = [time.monotonic()]
    plain, steps = Engine.step, [0]

    def step_of(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine.ranks.num == 1:  # a forecast
            return plain(engine, *args, **kwargs)
        rows, rate, seed, after = args
        steps[0] += 1
        calls = [0]

        def watched() -> None:
            after()
            calls[0] += 1
            if steps[0] == step and calls[0] == 1:
                begun[0] = time.monotonic()
                if failing_rank == RANK:
                    _fail(kind, engine)

        return plain(engine, rows, rate, seed, watched)

    Engine.step = step_of  # type: ignore[method-assign]
    try:
        return ended(flags), time.monotonic() - begun[0]
    finally:
        Engine.step = plain  # type: ignore[method-assign]


def _fail(kind: str, engine: Engine) -> None:
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory: a test")
    if kind == "error":
        raise TypeError("a test's")
    if kind == "nan":
        weight = next(p for p in engine.model.parameters() if p.requires_grad)
        assert weight.grad is not None
        weight.grad.fill_(float("nan"))
    if kind == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def several(flags: dict[str, Any], failures: Sequence[tuple[str, int, int]]) -> list[tuple[str, float]]:
    """A run for each failure, in a folder of its own."""
    return [
        failing(flags | {"train.folder": f"{flags['train.folder']}-{kind}"}, rank, step, kind)
        for kind, rank, step in failures
    ]
