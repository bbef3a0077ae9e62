"""Every policy once more, slow and obvious: Python lists, one token at a time.

Each gives, for each head, the tokens that stay, by their place among the candidates.
"""

from __future__ import annotations

import math

from narrowboat.memory.carry.policy import Candidates

Chosen = list[set[int]]


def window(candidates: Candidates, num_tokens: int) -> Chosen:
    return [set(range(candidates.num_tokens)[-num_tokens:])] * len(candidates.positions)


def sinks(candidates: Candidates, num_tokens: int, head_share: float) -> Chosen:
    everyone = list(range(candidates.num_tokens))
    if len(everyone) <= num_tokens:
        return [set(everyone)] * len(candidates.positions)
    num_first = max(1, round(head_share * num_tokens))
    return [set(everyone[:num_first]) | set(everyone[len(everyone) - num_tokens + num_first :])] * len(
        candidates.positions
    )


def lru(candidates: Candidates, num_tokens: int, block_tokens: int, threshold: float) -> Chosen:
    now = int(candidates.segments[0, -1])
    blocks: dict[int, list[int]] = {}
    for i, position in enumerate(candidates.positions[0].tolist()):
        blocks.setdefault(position // block_tokens, []).append(i)
    last_use = {}
    for block, tokens in blocks.items():
        share = sum(float(candidates.mass[:, i].mean()) for i in tokens) / candidates.num_queries
        is_new = any(i >= candidates.num_tokens - candidates.num_new for i in tokens)
        last_use[block] = now if share > threshold or is_new else max(float(candidates.marks[0, i]) for i in tokens)
    kept: set[int] = set()
    for block in sorted(blocks, key=lambda block: (-last_use[block], -block)):
        if len(kept) + len(blocks[block]) > num_tokens:
            break
        kept |= {*blocks[block]}
    return [kept or set(range(candidates.num_tokens)[-num_tokens:])] * len(candidates.positions)


def heavy(candidates: Candidates, num_tokens: int) -> Chosen:
    found = []
    for head in range(len(candidates.positions)):
        by_age = sorted(range(candidates.num_tokens), key=lambda i: -int(candidates.positions[head, i]))
        recent = by_age[: round(0.5 * num_tokens)]
        others = by_age[len(recent) :]
        others.sort(key=lambda i: -float(candidates.marks[head, i] + candidates.mass[head, i]))
        found.append({*recent, *others[: num_tokens - len(recent)]})
    return (
        found if candidates.num_tokens > num_tokens else [set(range(candidates.num_tokens))] * len(candidates.positions)
    )


def snap(candidates: Candidates, num_tokens: int, num_observed: int, pool_tokens: int) -> Chosen:
    """Pooling makes ties: those that tie with the last one are left out, as any of them may stay."""
    found = []
    for head in range(len(candidates.positions)):
        in_order = sorted(range(candidates.num_tokens), key=lambda i: int(candidates.positions[head, i]))
        mass = [float(candidates.mass[head, i]) for i in in_order]
        reach = pool_tokens // 2
        pooled = {i: max(mass[max(0, place - reach) : place + reach + 1]) for place, i in enumerate(in_order)}
        recent = in_order[::-1][: min(num_observed, num_tokens, candidates.num_new)]
        others = sorted((i for i in in_order if i not in recent), key=lambda i: -pooled[i])
        num_others = num_tokens - len(recent)
        least = math.inf if not num_others else pooled[others[num_others - 1]] if num_others <= len(others) else 0.0
        found.append({*recent, *(i for i in others if pooled[i] > least)})
    return (
        found if candidates.num_tokens > num_tokens else [set(range(candidates.num_tokens))] * len(candidates.positions)
    )


def turns(candidates: Candidates, num_tokens: int) -> Chosen:
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
    return [kept] * len(candidates.positions)
