"""What each policy carries through a model, against attention weights of transformers and slow, obvious choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from narrowboat.memory.carry.policy import Candidates
from narrowboat.plan import MemoryPlan
from tests.memory.carry import slow
from tests.memory.carry.trains import CACHE, engine_of, train_of
from tests.memory.families import adapted

LENGTHS, BUDGET = (9, 14, 8, 12, 40, 10, 7), 20
NUM_OBSERVED = {"window": 0, "sinks": 0, "lru": 99, "heavy": 99, "snap": 32, "turns": 99}
SLOWLY: dict[str, Callable[[Candidates, int], slow.Chosen]] = {
    "window": slow.window,
    "sinks": partial(slow.sinks, head_share=0.1),
    "lru": partial(slow.lru, block_tokens=4, threshold=0.01),
    "heavy": slow.heavy,
    "snap": partial(slow.snap, num_observed=32, pool_tokens=7),
    "turns": slow.turns,
}


class Layer:
    """One layer's keys and values of the whole document, token by token, and what is carried of them."""

    def __init__(self) -> None:
        self.keys = self.values = torch.zeros(2, 0, 8)
        self.marks = torch.zeros(2, 0)
        self.carried: list[list[int]] = [[], []]  # places in the document, rising

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor(self.carried, dtype=torch.int64)[..., None].expand(-1, -1, 8)
        return self.keys.gather(1, index)[None], self.values.gather(1, index)[None]

    def candidates(self, weights: torch.Tensor, start: int, number: int, segment_of: list[int]) -> Candidates:
        """``weights``: ``[heads, queries, carried and own]`` of the observed queries."""
        length = len(segment_of) - start
        positions = torch.tensor([head + list(range(start, start + length)) for head in self.carried])
        segments = torch.tensor([[segment_of[place] for place in head] for head in positions.tolist()])
        mass = weights.unflatten(0, (2, -1)).sum(2).mean(1)
        return Candidates(positions, segments, self.marks.gather(1, positions), mass, weights.shape[1], length)


@pytest.mark.parametrize("policy", SLOWLY)
@torch.no_grad()
def test_a_policy_carries_what_the_slow_one_would(policy: str) -> None:
    train, engine = train_of(LENGTHS), engine_of(MemoryPlan(layers="keep"), policy=policy, budget=str(BUDGET))
    slowly = adapted("llama", max_position_embeddings=4096)
    slowly.set_attn_implementation("eager")
    assert engine.carrying is not None
    carrier, layers, segment_of = engine.carrying.carrier, [Layer() for _ in range(3)], list[int]()
    carry = carrier.start()
    for number, length in enumerate(LENGTHS):
        start = len(segment_of)
        segment_of += [number] * length
        ids = torch.from_numpy(train.input_ids[start : start + length].astype(np.int64))[None]
        handover = carrier.handover(carry, length, hands_on=True)
        with engine:
            silent = {"shift_labels": torch.full_like(ids, -100), "num_items_in_batch": 1}
            engine.model(input_ids=ids, position_ids=handover.positions(ids.device), carry=handover, **silent)
        carry = handover.after
        weights = attend(slowly, ids, start, layers)
        for layer, of_layer, kept in zip(layers, weights, carry.layers, strict=True):
            assert kept is not None
            observed = of_layer[:, max(0, length - NUM_OBSERVED[policy]) :]
            candidates = layer.candidates(observed, start, number, segment_of)
            sure = SLOWLY[policy](candidates, BUDGET)
            mine = [sorted(head) for head in kept.positions.tolist()]
            for head, places in enumerate(candidates.positions.tolist()):
                missing = {places[i] for i in sure[head]} - {*mine[head]}
                assert not missing and len(mine[head]) <= BUDGET
                if policy != "snap":  # in which ties are anyone's
                    assert len(mine[head]) == len(sure[head])
            carrier_policy = carrier.rules[0].policy
            marks = carrier_policy.choose(candidates, BUDGET).marks
            layer.marks = layer.marks.scatter(1, candidates.positions, marks)
            layer.carried = mine


def attend(model: Any, ids: torch.Tensor, start: int, layers: list[Layer]) -> list[torch.Tensor]:
    """Each layer's attention weights ``[heads, queries, carried and own]``; ``layers`` learn its keys and values."""
    cache = DynamicCache()
    for i, layer in enumerate(layers):
        if layer.carried[0]:
            cache.update(*layer.seen(), i)
    length = ids.shape[1]
    positions = torch.arange(start, start + length)[None]
    given = {CACHE: cache, "use_cache": True, "output_attentions": True}
    out = model(input_ids=ids, position_ids=positions, **given)
    for layer, of_layer in zip(layers, cache.layers, strict=True):
        layer.keys = torch.cat((layer.keys, of_layer.keys[0, :, -length:]), 1)
        layer.values = torch.cat((layer.values, of_layer.values[0, :, -length:]), 1)
        layer.marks = torch.cat((layer.marks, torch.zeros(2, length)), 1)
    return [weights[0] for weights in out.attentions]
