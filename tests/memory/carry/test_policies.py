"""Every policy's choice against a slow, obvious one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowboat.memory.carry.policy import Candidates, Choice, Policy, Sinks, Window
from narrowboat.memory.carry.scored import Heavy, Lru, Snap, Turns
from tests.memory.carry import slow
from tests.memory.carry.slow import Chosen

NUM_HEADS = 2


def candidates_of(seed: int, num_old: int, num_new: int, now: int = 5, shuffled: bool = False) -> Candidates:
    draw = random.Random(seed)
    heads = []
    for _ in range(NUM_HEADS):
        old = sorted(draw.sample(range(200), num_old))
        if shuffled:
            draw.shuffle(old)
        heads.append(old)
    if not shuffled:
        heads = [heads[0]] * NUM_HEADS
    positions = torch.tensor([head + list(range(200, 200 + num_new)) for head in heads])
    segments = torch.clamp(positions // 40, max=now)
    random_numbers = torch.Generator().manual_seed(seed)
    return Candidates(
        positions=positions,
        segments=segments,
        marks=torch.cat((torch.rand(NUM_HEADS, num_old, generator=random_numbers), torch.zeros(NUM_HEADS, num_new)), 1),
        mass=torch.rand(NUM_HEADS, num_old + num_new, generator=random_numbers),
        num_queries=num_new,
        num_new=num_new,
    )


def chosen_by(policy: Policy, candidates: Candidates, num_tokens: int) -> tuple[Chosen, Choice]:
    choice = policy.choose(candidates, num_tokens)
    index = choice.index if choice.index.dim() == 2 else choice.index.expand(NUM_HEADS, -1)
    assert (index.diff(dim=1) > 0).all(), "rising"
    return [set(head) for head in index.tolist()], choice


ALIKE: dict[str, tuple[Policy, Callable[[Candidates, int], Chosen]]] = {
    "window": (Window(), slow.window),
    "sinks": (Sinks(head_share=0.25), partial(slow.sinks, head_share=0.25)),
    "lru": (Lru(block_tokens=8, threshold=0.2), partial(slow.lru, block_tokens=8, threshold=0.2)),
    "turns": (Turns(), slow.turns),
}


@pytest.mark.parametrize("name", ALIKE)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(1, 70))
def test_a_policy_for_all_heads_chooses_as_the_slow_one(
    name: str, seed: int, num_old: int, num_new: int, budget: int
) -> None:
    policy, slowly = ALIKE[name]
    candidates = candidates_of(seed, num_old, num_new)
    assert chosen_by(policy, candidates, budget)[0] == slowly(candidates, budget)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(2, 70))
def test_heavy_chooses_as_the_slow_one_for_each_head(seed: int, num_old: int, num_new: int, budget: int) -> None:
    candidates = candidates_of(seed, num_old, num_new, shuffled=True)
    chosen, choice = chosen_by(Heavy(), candidates, budget)
    assert chosen == slow.heavy(candidates, budget)
    torch.testing.assert_close(choice.marks, candidates.marks + candidates.mass)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(2, 70))
def test_snap_chooses_as_the_slow_one_for_each_head(seed: int, num_old: int, num_new: int, budget: int) -> None:
    """Pooling makes ties; those beside the last place are anyone's."""
    candidates = candidates_of(seed, num_old, num_new, shuffled=True)
    chosen, _ = chosen_by(Snap(num_observed=4, pool_tokens=3), candidates, budget)
    for mine, sure in zip(chosen, slow.snap(candidates, budget, 4, 3), strict=True):
        assert sure <= mine
        assert len(mine) == min(budget, candidates.num_tokens)


def test_an_unused_block_goes_and_a_used_one_stays() -> None:
    positions = torch.arange(24).expand(NUM_HEADS, -1)
    mass = torch.zeros(NUM_HEADS, 24)
    mass[:, 0:8] = 1.0  # the queries look at the oldest block
    candidates = Candidates(positions, positions // 8, torch.zeros(NUM_HEADS, 24), mass, num_queries=8, num_new=8)
    kept, choice = chosen_by(Lru(block_tokens=8, threshold=0.2), candidates, 16)
    assert kept[0] == {*range(8), *range(16, 24)}
    assert choice.marks[0, 0] == 2 and choice.marks[0, 8] == 0 and choice.marks[0, 16] == 2
