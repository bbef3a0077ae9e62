"""The catalogue's models as curves that come with the package: a plan for one of them needs no rehearsal and no torch.

One file a shape (models of one shape share it), written by ``python -m narrowboat.planner.write_curves``: bfloat16 or
NF4 weights, adapters of any rank on all linear layers, AdamW with its states in 32 or 8 bits, on a card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner import catalog
from narrowboat.planner.curves import ENDS, STEP, About, Curves, Facts, Point, between, key_of, knots_of

FORMATS = ("none", "nf4")
RANKS = (16, 64)
"""Values that are rehearsed; others are interpolated."""

LIGHT = "adamw8bit"
STATES, LOADING = "optimizer states", "loading"
_MOVES_NO_BYTE = {"lr", "b_rate", "weight_decay", "beta1", "beta2", "eps", "schedule", "warmup_steps"}


class Shipped:
    """The points of one model's file, for one number format, rank and optimizer."""

    def __init__(self, content: dict[str, Any], options: Options) -> None:
        quantize = options.model.quantize
        self.facts = Facts(content["num_layers"], content["layer_bytes"][quantize], content["refused"])
        self._plans, self._per_rank = content["plans"][quantize], content["per_rank"]
        self._further = int(options.lora.rank) - RANKS[0]
        light = _at_rank(content["light_states"], int(options.lora.rank))
        self._light = light if options.optimizer.name == LIGHT else 1.0

    def has(self, num_tokens: int) -> bool:
        """Nothing but knots is there."""
        return False

    def at(self, kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
        """The amounts of ``plan`` at the knot ``num_tokens``."""
        point = _read(self._plans[kind][key_of(plan)], knots_of(kind, plan).index(num_tokens))
        columns = self._per_rank[kind][key_of(plan.model_copy(update={"input_stride": 1}))]
        slope = between(ENDS, num_tokens, lambda end: _read(columns, ENDS.index(end)))
        moved = {name: point.get(name, 0) + self._further * slope.get(name, 0) for name in {**point, **slope}}
        return moved if self._light == 1.0 else self._lighter(kind, plan, moved)

    def _lighter(self, kind: str, plan: MemoryPlan, point: Point) -> Point:
        """The same with lighter states, which are there from the first step on."""
        states = f"cause {STATES}"
        if kind == STEP:
            saved = (1 - self._light) * point.get(states, 0)  # and as much of their copies in host memory
            return {**point, states: point.get(states, 0) - saved, "host": max(0, point.get("host", 0) - saved)}
        saved = (1 - self._light) * self.at(STEP, plan, ENDS[0]).get(states, 0) / self._light
        return {name: size - (saved if name != LOADING else 0) for name, size in point.items()}


def shipped(options: Options) -> Curves | None:
    """The curves for a run with ``options`` on a card, or None where the package has none."""
    if not _covers(options):
        return None
    fields = catalog.fields_of(options.model.name)
    content = _content(catalog.name_of_shape(fields)) if fields else None
    if fields is None or content is None:
        return None
    return Curves(About(options, fields.get("max_position_embeddings")), Shipped(content, options))


def _covers(options: Options) -> bool:
    usual = Options()
    lora, optimizer, model = options.lora, options.optimizer, options.model
    return (
        isinstance(lora.rank, int)
        and lora.model_copy(update={"rank": usual.lora.rank}) == usual.lora.model_copy(update={"alpha": lora.alpha})
        and optimizer.model_dump(exclude=_MOVES_NO_BYTE | {"name"})
        == usual.optimizer.model_dump(exclude=_MOVES_NO_BYTE | {"name"})
        and optimizer.name in (usual.optimizer.name, LIGHT)
        and model.quantize in FORMATS
        and model.dtype in ("auto", "bfloat16")
    )


@cache
def _content(shape: str) -> dict[str, Any] | None:
    file = files("narrowboat.planner").joinpath("curves", f"{shape}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _read(columns: dict[str, Any], place: int) -> Point:
    """One point of columns; a column that is one number is the same everywhere."""
    return {name: column[place] if isinstance(column, list) else column for name, column in columns.items()}


def _at_rank(shares: Sequence[float], rank: int) -> float:
    """A share of bytes that grow with the rank, where both are known at ``RANKS``: the bytes lie on a line."""
    (first, last), (at_first, at_last) = RANKS, (share * known for share, known in zip(shares, RANKS, strict=True))
    return (at_first + (at_last - at_first) * (rank - first) / (last - first)) / rank
