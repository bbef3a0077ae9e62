"""Which blocks a segment's queries want to see: attention to the blocks' summaries, some blocks at a time.

A block's score is the largest share of its attention that any query of a head's group would give to one of the block's
summaries, which are mean keys. What a share is of needs a sum over all blocks, for which a block's mean key is enough.
Summaries come up to the device ``SCORED_BLOCKS`` at a time, twice, so what scoring takes does not grow with the
document. Time: a little more than ``1 / SUMMED_TOKENS`` of attention's first product with the whole document.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

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
        means = summary.unflatten(1, (-1, reps)).mean(2)
        total = torch.logaddexp(total, (queries @ means.transpose(1, 2)).logsumexp(-1))
    queries = torch.cat((queries, -total[..., None]), -1)  # times a summary and 1: the logarithm of a share
    best = torch.full((num_heads, num_wanted), -torch.inf, device=q.device)
    blocks = torch.zeros(num_heads, num_wanted, dtype=torch.int64, device=q.device)
    for numbers, summary in _summaries(waiting, span, q.device, rotation, middle):
        shares = (queries @ F.pad(summary, (0, 1), value=1.0).transpose(1, 2)).amax(1)  # [kv heads, summaries]
        there = torch.arange(numbers.start, numbers.stop, device=q.device).expand(num_heads, -1)
        best, at = torch.cat((best, shares.unflatten(1, (-1, reps)).amax(2)), 1).topk(num_wanted, 1)
        blocks = torch.cat((blocks, there), 1).gather(1, at)
    return blocks.sort(1).values.cpu()


def _summaries(
    waiting: Waiting, span: range, device: torch.device, rotation: Rotation | None, middle: int
) -> Iterator[tuple[range, torch.Tensor]]:
    """Pieces of ``span`` with their ``[kv heads, summaries, size]`` in fp32, on the device."""
    for start in range(span.start, span.stop, SCORED_BLOCKS):
        numbers = range(start, min(start + SCORED_BLOCKS, span.stop))
        summary, angles = (part.to(device) for part in waiting.summary(numbers))
        summary = summary.float()
        if rotation is not None:
            summary = rotation.turn(summary[None], (middle - angles).expand(summary.shape[0], -1))[0]
        yield numbers, summary
