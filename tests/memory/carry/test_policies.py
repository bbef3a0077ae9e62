"""Every policy against a slow, obvious one: Python lists, one token at a time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowboat.memory.carry.policy import Candidates, Choice, Policy, Sinks, Window
from narrowboat.memory.carry.scored import Heavy, Lru, Snap, Turns

NUM_HEADS = 2
Chosen = list[set[int]]
"""Of each head, the tokens that stay, by their place among the candidates."""


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


def slow_window(candidates: Candidates, num_tokens: int) -> Chosen:
    return [set(range(candidates.num_tokens)[-num_tokens:])] * NUM_HEADS


def slow_sinks(candidates: Candidates, num_tokens: int) -> Chosen:
    everyone = list(range(candidates.num_tokens))
    if len(everyone) <= num_tokens:
        return [set(everyone)] * NUM_HEADS
    num_first = max(1, round(0.25 * num_tokens))
    return [set(everyone[:num_first]) | set(everyone[len(everyone) - num_tokens + num_first :])] * NUM_HEADS


def slow_lru(candidates: Candidates, num_tokens: int) -> Chosen:
    now = int(candidates.segments[0, -1])
    blocks: dict[int, list[int]] = {}
    for i, position in enumerate(candidates.positions[0].tolist()):
        blocks.setdefault(position // 8, []).append(i)
    last_use = {}
    for block, tokens in blocks.items():
        share = sum(float(candidates.mass[:, i].mean()) for i in tokens) / candidates.num_queries
        is_new = any(i >= candidates.num_tokens - candidates.num_new for i in tokens)
        last_use[block] = now if share > 0.2 or is_new else max(float(candidates.marks[0, i]) for i in tokens)
    kept: set[int] = set()
    for block in sorted(blocks, key=lambda block: (-last_use[block], -block)):
        if len(kept) + len(blocks[block]) > num_tokens:
            break
        kept |= {*blocks[block]}
    return [kept or set(range(candidates.num_tokens)[-num_tokens:])] * NUM_HEADS


def slow_heavy(candidates: Candidates, num_tokens: int) -> Chosen:
    found = []
    for head in range(NUM_HEADS):
        by_age = sorted(range(candidates.num_tokens), key=lambda i: -int(candidates.positions[head, i]))
        recent = by_age[: round(0.5 * num_tokens)]
        others = by_age[len(recent) :]
        others.sort(key=lambda i: -float(candidates.marks[head, i] + candidates.mass[head, i]))
        found.append({*recent, *others[: num_tokens - len(recent)]})
    return found if candidates.num_tokens > num_tokens else [set(range(candidates.num_tokens))] * NUM_HEADS


def slow_snap(candidates: Candidates, num_tokens: int) -> Chosen:
    found = []
    for head in range(NUM_HEADS):
        in_order = sorted(range(candidates.num_tokens), key=lambda i: int(candidates.positions[head, i]))
        mass = [float(candidates.mass[head, i]) for i in in_order]
        pooled = {i: max(mass[max(0, place - 1) : place + 2]) for place, i in enumerate(in_order)}
        recent = in_order[::-1][: min(4, num_tokens, candidates.num_new)]
        others = sorted((i for i in in_order if i not in recent), key=lambda i: -pooled[i])
        num_others = num_tokens - len(recent)
        least = 2.0 if not num_others else pooled[others[num_others - 1]] if num_others <= len(others) else 0.0
        found.append({*recent, *(i for i in others if pooled[i] > least)})  # without those that tie with the last
    return found if candidates.num_tokens > num_tokens else [set(range(candidates.num_tokens))] * NUM_HEADS


def slow_turns(candidates: Candidates, num_tokens: int) -> Chosen:
    turns: dict[int, list[int]] = {}
    for i, segment in enumerate(candidates.segments[0].tolist()):
        turns.setdefault(segment, []).append(i)
    numbers = sorted(turns)
    scores = {n: sum(float(candidates.mass[:, i].mean()) for i in turns[n]) / len(turns[n]) for n in numbers}
    wanted = [numbers[-1], *numbers[-2:-1], numbers[0], *sorted(numbers, key=lambda n: -scores[n])]
    kept: set[int] = set()
    for number in dict.fromkeys(wanted):
        if len(kept) + len(turns[number]) <= num_tokens:
            kept |= {*turns[number]}
    if not {*turns[numbers[-1]]} <= kept:
        kept = set(range(candidates.num_tokens)[-num_tokens:])
    return [kept] * NUM_HEADS


ALIKE: dict[str, tuple[Policy, Callable[[Candidates, int], Chosen]]] = {
    "window": (Window(), slow_window),
    "sinks": (Sinks(head_share=0.25), slow_sinks),
    "lru": (Lru(block_tokens=8, threshold=0.2), slow_lru),
    "turns": (Turns(), slow_turns),
}


@pytest.mark.parametrize("name", ALIKE)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(1, 70))
def test_a_policy_for_all_heads_chooses_as_the_slow_one(
    name: str, seed: int, num_old: int, num_new: int, budget: int
) -> None:
    policy, slow = ALIKE[name]
    candidates = candidates_of(seed, num_old, num_new)
    assert chosen_by(policy, candidates, budget)[0] == slow(candidates, budget)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(2, 70))
def test_heavy_chooses_as_the_slow_one_for_each_head(seed: int, num_old: int, num_new: int, budget: int) -> None:
    candidates = candidates_of(seed, num_old, num_new, shuffled=True)
    chosen, choice = chosen_by(Heavy(), candidates, budget)
    assert chosen == slow_heavy(candidates, budget)
    torch.testing.assert_close(choice.marks, candidates.marks + candidates.mass)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_old=st.integers(0, 60), num_new=st.integers(1, 30), budget=st.integers(2, 70))
def test_snap_chooses_as_the_slow_one_for_each_head(seed: int, num_old: int, num_new: int, budget: int) -> None:
    """Pooling makes ties; those beside the last place are anyone's."""
    candidates = candidates_of(seed, num_old, num_new, shuffled=True)
    chosen, _ = chosen_by(Snap(num_observed=4, pool_tokens=3), candidates, budget)
    for mine, slow in zip(chosen, slow_snap(candidates, budget), strict=True):
        assert slow <= mine
        assert len(mine) == min(budget, candidates.num_tokens)


def test_an_unused_block_goes_and_a_used_one_stays() -> None:
    positions = torch.arange(24).expand(NUM_HEADS, -1)
    mass = torch.zeros(NUM_HEADS, 24)
    mass[:, 0:8] = 1.0  # the queries look at the oldest block
    candidates = Candidates(positions, positions // 8, torch.zeros(NUM_HEADS, 24), mass, num_queries=8, num_new=8)
    kept, choice = chosen_by(Lru(block_tokens=8, threshold=0.2), candidates, 16)
    assert kept[0] == {*range(8), *range(16, 24)}
    assert choice.marks[0, 0] == 2 and choice.marks[0, 8] == 0 and choice.marks[0, 16] == 2
