"""Write the curves of the catalogue's models: ``python -m narrowboat.planner.write_curves [model ...]``.

About two minutes a shape on one core; a shape that is written already is left as it is unless it is named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from narrowboat.model.base import hush_transformers
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions, Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner import catalog
from narrowboat.planner.curves import ENDS, PHASES, STEP, Point, key_of, knots_of, point_of
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.ladder import ladder
from narrowboat.planner.shipped import FORMATS, LIGHT, RANKS, STATES
from narrowboat.planner.target import SOME_CARD

FOLDER = Path(__file__).with_name("curves")


def main(names: list[str]) -> None:
    """Write those of ``names``, or all that are missing."""
    hush_transformers()
    FOLDER.mkdir(exist_ok=True)
    for name in names or catalog.model_names():
        shape = catalog.name_of_shape(catalog.fields_of(name) or {})
        path = FOLDER / f"{shape}.json"
        if names or not path.exists():
            path.write_text(json.dumps(content_of(name), separators=(",", ":")) + "\n", encoding="utf-8")
            print(f"{name}: {path.name}, {path.stat().st_size:,} bytes", flush=True)


def content_of(name: str) -> dict[str, Any]:
    """Everything that is kept of the model ``name``."""
    forecasters = {quantize: forecaster_for(name, quantize) for quantize in FORMATS}
    plain = forecasters[FORMATS[0]]
    plans = list(ladder(on_card=True, refused=plain.refused))
    return {
        "num_layers": plain.num_layers,
        "refused": dict(plain.refused),
        "layer_bytes": {quantize: forecaster.layer_bytes for quantize, forecaster in forecasters.items()},
        "plans": {
            quantize: {
                kind: {key_of(plan): columns(forecaster, kind, plan) for plan in plans} for kind in (STEP, PHASES)
            }
            for quantize, forecaster in forecasters.items()
        },
        "per_rank": _per_rank(name, plain, [plan for plan in plans if plan.input_stride == 1]),
        "light_states": _light_states(name),
    }


def forecaster_for(name: str, quantize: Any, rank: int = RANKS[0], optimizer: Any = "adamw") -> Forecaster:
    """For the model ``name`` of the catalogue on a card."""
    options = Options(
        model=ModelOptions(name=name, quantize=quantize),
        lora=LoraOptions(rank=rank),
        optimizer=OptimizerOptions(name=optimizer),
    )
    return Forecaster(Workload(catalog.model_config(name), options, torch.bfloat16, SOME_CARD))


def point(forecaster: Forecaster, kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
    """The amounts of ``plan``, rehearsed."""
    return point_of(forecaster.forecast(plan, num_tokens)) if kind == STEP else forecaster.phases(plan, num_tokens)


def columns(forecaster: Forecaster, kind: str, plan: MemoryPlan) -> dict[str, Any]:
    """For each amount its values at the knots; one number where they are all the same."""
    return _columns([point(forecaster, kind, plan, knot) for knot in knots_of(kind, plan)])


def _columns(points: list[Point]) -> dict[str, Any]:
    names = {name: None for point in points for name in point}
    found = {name: [_short(name, point.get(name, 0)) for point in points] for name in names}
    return {name: values[0] if len(set(values)) == 1 else values for name, values in found.items() if any(values)}


def _short(name: str, amount: float) -> float:
    """Bytes to the byte; operations, and what a rank adds, to six digits."""
    if isinstance(amount, int) and not name.startswith("work "):
        return amount
    short = float(f"{amount:.6g}")
    return int(short) if short.is_integer() else short


def _per_rank(name: str, plain: Forecaster, plans: list[MemoryPlan]) -> dict[str, Any]:
    low, high = RANKS
    higher = forecaster_for(name, FORMATS[0], high)

    def slope(kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
        one, other = (point(forecaster, kind, plan, num_tokens) for forecaster in (plain, higher))
        return {name: (other.get(name, 0) - one.get(name, 0)) / (high - low) for name in one.keys() | other.keys()}

    return {
        kind: {key_of(plan): _columns([slope(kind, plan, end) for end in ENDS]) for plan in plans}
        for kind in (STEP, PHASES)
    }


def _light_states(name: str) -> list[float]:
    """At each of ``RANKS``, what is left of AdamW's states: small tensors stay as they are."""
    plan = MemoryPlan(layers="recompute", chunk_tokens=512)

    def states(rank: int, **optimizer: str) -> int:
        return forecaster_for(name, FORMATS[0], rank, **optimizer).forecast(plan, ENDS[0]).by_cause[STATES]

    return [round(states(rank, optimizer=LIGHT) / states(rank), 6) for rank in RANKS]


if __name__ == "__main__":
    main(sys.argv[1:])
