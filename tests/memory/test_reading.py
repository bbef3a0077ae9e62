from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowboat.engine.engine import Engine
from narrowboat.memory.reading import Reading
from narrowboat.owner.meter import Meter
from narrowboat.plan import MemoryPlan
from tests.memory.families import FAMILIES, adapted, token_ids

NUM_TOKENS, NUM_FURTHER = 37, 4
PLANS: list[dict[str, Any]] = [
    {"layers": "keep"},
    {"layers": "recompute", "weights": "host"},
    {"layers": "stream", "tile_tokens": 8},
    {"layers": "stream", "tile_tokens": 8, "inputs": "host", "weights": "disk"},
    {"layers": "stream", "tile_tokens": 16, "inputs": "disk"},
]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama, dynamic rope"])
def test_what_is_read_on_is_what_the_model_says_of_the_whole_row(family: str) -> None:
    # dynamic frequencies follow from the length so far, and keys that were read stay as they were turned then
    model, ids = adapted(family).eval(), token_ids(1, NUM_TOKENS + NUM_FURTHER)
    with torch.no_grad():
        truth = [
            model(input_ids=ids[:, :n], use_cache=False).logits[0, -1] for n in range(NUM_TOKENS, ids.shape[1] + 1)
        ]
    for plan in PLANS if family == "llama" else PLANS[2:4]:
        with Engine(model, None, MemoryPlan(**plan), 0) as engine:
            reading = engine.reading(ids.shape[1])
            found = [engine.read_on(reading, ids[:, :NUM_TOKENS])[0]]
            found += [engine.read_on(reading, ids[:, n : n + 1])[0] for n in range(NUM_TOKENS, ids.shape[1])]
            reading.release()
        for mine, own in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama, dynamic rope"])
def test_documents_of_any_lengths_are_read_on_together(family: str) -> None:
    model, lengths = adapted(family).eval(), (9, NUM_TOKENS, 23)
    ids = token_ids(len(lengths), NUM_TOKENS + NUM_FURTHER)
    with torch.no_grad():
        truth = [
            [model(input_ids=row[None, : num + i], use_cache=False).logits[0, -1] for i in range(1, NUM_FURTHER + 1)]
            for row, num in zip(ids, lengths, strict=True)
        ]
    for plan in PLANS if family == "llama" else PLANS[2:3]:
        with Engine(model, None, MemoryPlan(**plan), 0) as engine:
            readings = [engine.reading(ids.shape[1]) for _ in lengths]
            for reading, row, num in zip(readings, ids, lengths, strict=True):
                engine.read_on(reading, row[None, :num])
            for i in range(NUM_FURTHER):
                now = torch.stack([row[num + i : num + i + 1] for row, num in zip(ids, lengths, strict=True)])
                found = engine.read_on(Reading.together(readings), now, [num + i for num in lengths])
                torch.testing.assert_close(found, torch.stack([each[i] for each in truth]), rtol=1e-4, atol=1e-4)


def test_only_one_layers_keys_and_values_are_on_the_device_where_inputs_rest_elsewhere() -> None:
    model, ids = adapted("llama", num_hidden_layers=8).eval(), token_ids(1, 60)
    token_bytes = 2 * 2 * 8 * 4  # keys and values, heads, size, bytes
    peaks = {}
    for place in ("device", "disk"):
        plan = MemoryPlan(layers="stream", tile_tokens=8, inputs=place)  # type: ignore[arg-type]
        with Meter() as meter, Engine(model, None, plan, 0) as engine:
            meter.watch_model(model)
            resting = meter.live.device_bytes
            engine.read_on(engine.reading(64), ids)
            peaks[place] = meter.peak.device_bytes - resting
    assert peaks["device"] - peaks["disk"] >= 7 * 64 * token_bytes
