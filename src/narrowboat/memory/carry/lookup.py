"""Which blocks a segment's queries want to see: attention to the blocks' summaries, some blocks at a time.

A block's score is the largest share of its attention that any query of a head's group would give it, were a summary's
mean key each of the tokens that it stands for. Summaries come up to the device ``SCORED_BLOCKS`` at a time, twice: once
for the sum that shares are of, once for the shares; so what scoring takes does not grow with the document. Time: twice
``1 / SUMMED_TOKENS`` of attention's first product with the whole document.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowboat.memory.carry.rotation import Rotation
from narrowboat.memory.carry.waiting import Waiting, summed_tokens

SCORED_BLOCKS = 32


@torch.no_grad()
def best_blocks(
    q: torch.Tensor,
    waiting: Waiting,
    span: range,
    num_wanted: int,
    scale: float,
    rotation: Rotation | None = None,
    middle: int = 0,
) -> torch.Tensor:
    """``[kv heads, num_wanted]``, rising, in host memory: numbers of the blocks of ``span`` that are looked at most.

    Args:
        q: ``[1, heads, queries, size]``.
        waiting: the layer's document.
        span: blocks to choose from.
        num_wanted: at most ``len(span)``.
        scale: of attention's scores.
        rotation: where positions are re-based: summaries are turned to position ``middle`` before they are compared.
        middle: there.
    """
    num_heads = waiting.tail.keys[0].shape[0]
    queries = (q[0].float() * scale).unflatten(0, (num_heads, -1)).flatten(1, 2)  # [kv heads, group x queries, size]
    reps = waiting.block_tokens // summed_tokens(waiting.block_tokens)
    total = torch.full(queries.shape[:2], -torch.inf, device=q.device)
    for _, summary in _summaries(waiting, span, q.device, rotation, middle):
        total = torch.logaddexp(total, (queries @ summary.transpose(1, 2)).logsumexp(-1))
    best = torch.full((num_heads, num_wanted), -torch.inf, device=q.device)
    blocks = torch.zeros(num_heads, num_wanted, dtype=torch.int64, device=q.device)
    for numbers, summary in _summaries(waiting, span, q.device, rotation, middle):
        shares = (queries @ summary.transpose(1, 2)).sub_(total[..., None]).exp_()
        shares = shares.unflatten(-1, (-1, reps)).sum(-1).amax(1)  # [kv heads, blocks]
        there = torch.arange(numbers.start, numbers.stop, device=q.device).expand(num_heads, -1)
        best, at = torch.cat((best, shares), 1).topk(num_wanted, 1)
        blocks = torch.cat((blocks, there), 1).gather(1, at)
    return blocks.sort(1).values.cpu()


def _summaries(
    waiting: Waiting, span: range, device: torch.device, rotation: Rotation | None, middle: int
) -> Iterator[tuple[range, torch.Tensor]]:
    """Pieces of ``span`` with their ``[kv heads, summaries, size]`` in fp32, on the device."""
    summed = summed_tokens(waiting.block_tokens)
    reps, first = waiting.block_tokens // summed, 0
    for chunk in waiting.chunks:
        last = first + chunk.num_tokens // waiting.block_tokens
        for start in range(max(first, span.start), min(last, span.stop), SCORED_BLOCKS):
            stop = min(start + SCORED_BLOCKS, last, span.stop)
            where = slice((start - first) * reps, (stop - first) * reps)
            summary = chunk.summary[:, where].to(device, torch.float32)
            if rotation is not None:
                by = middle - chunk.angles[::summed][where].to(device)
                summary = rotation.turn(summary[None], by.expand(summary.shape[0], -1))[0]
            yield range(start, stop), summary
        first = last
