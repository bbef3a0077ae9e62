"""Memory-efficient attention as PyTorch carries it: for cards that flash refuses, for float32 and for wide heads.

It never holds the scores either, but knows no grouped heads: the kv heads go into the batch, and each group sees its
head's keys through a stride of 0, so that nothing is copied forwards. Backwards the gradients of keys and values come
for every head and are summed over the group. Sliding windows go in as a mask, since its own are aligned otherwise
backwards than forwards. Held while backward runs: the query gradient in float32. Exact.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); torch's ``mem_eff_attention`` headers.
"""

from __future__ import annotations

import torch

from narrowboat.machine.rates import Capability
from narrowboat.memory.layout import Sight
from narrowboat.memory.scores import Gradients, Scores, visible

FORWARD = torch.ops.aten._efficient_attention_forward
BACKWARD = torch.ops.aten._efficient_attention_backward

EVERYTHING, FROM_BOTTOM_RIGHT = 0, 2
"""What its masks are called."""

LSE_TOKENS, MASK_TOKENS, BLOCK_TOKENS = 32, 16, 64
"""Log-sum-exps and masks are padded to a multiple of these; queries and keys are worked on in blocks of that many."""

MOST_SPLITS = 200
"""Blocks of keys that work at once, over all heads, where each needs room for its gradients."""


def suits(q: torch.Tensor, v: torch.Tensor, card: Capability) -> bool:
    """Whether its kernels for ``card`` can do it: 16 bytes of a head at a time."""
    formats = [torch.float32, torch.float16] + [torch.bfloat16] * (card >= (8, 0))
    return q.dtype in formats and all(t.shape[-1] * t.element_size() % 16 == 0 for t in (q, v))


class Efficient:
    """A kernel like the others of ``kernels.py``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        num_rows, num_queries, parts = q.shape[0], q.shape[2], _parts(q, k)
        folded = _folded(q, k, v)
        mask, kind = _mask(q, k, folded[0], sight, scores)
        out, lse, *_ = FORWARD(
            *folded, mask, None, None, None, None, 0.0, kind, compute_log_sumexp=True, scale=scores.scale
        )
        lse = lse[..., :num_queries].unflatten(0, (num_rows, parts)).flatten(1, 2)
        return _unfold(out, num_rows), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sight: Sight,
        scores: Scores,
    ) -> Gradients:
        """See ``Kernel``."""
        num_rows, parts = q.shape[0], _parts(q, k)
        folded = _folded(q, k, v)
        mask, kind = _mask(q, k, folded[0], sight, scores)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_TOKENS), value=torch.inf)
        nothing = torch.zeros((), dtype=torch.long)  # dropout is 0, so its seed and offset are not read
        dq, dk, dv, _ = BACKWARD(
            _fold(grad, parts), *folded, mask, _fold(out, parts), None, None, q.shape[2], k.shape[2],
            padded.reshape(num_rows * parts, -1, padded.shape[2]).contiguous(), 0.0, nothing, nothing, kind, False,
            scale=scores.scale,
        )  # fmt: skip
        if parts > 1:
            dk, dv = (t.sum(2, keepdim=True) for t in (dk, dv))
        return _unfold(dq, num_rows), _unfold(dk, num_rows), _unfold(dv, num_rows)


def inside_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes that the forward kernel takes for itself: outputs of wide heads in 16 bits are summed in float32."""
    return 4 * q.shape[:3].numel() * v.shape[3] if q.element_size() == 2 and v.shape[3] > 128 else 0


def inside_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes that the backward kernel takes for itself; tensors are ``[batch, tokens, heads, size]``."""
    num_heads, is_wide = q.shape[0] * q.shape[2], q.element_size() == 4
    rows = BLOCK_TOKENS if q.shape[3] <= BLOCK_TOKENS else 2 * BLOCK_TOKENS
    per_head = _blocks(q.shape[1], rows) * _blocks(q.shape[3]) * (16 + 4 * rows * BLOCK_TOKENS)  # the query gradient
    if not is_wide and v.shape[3] > 2 * BLOCK_TOKENS:  # gradients of a block of keys do not fit into registers
        splits = max(1, min(_blocks(k.shape[1]), MOST_SPLITS // num_heads))
        per_head += splits * BLOCK_TOKENS * 4 * sum(_blocks(t.shape[3]) * BLOCK_TOKENS for t in (k, v))
    deltas = 4 * q.shape[:3].numel() * (2 if is_wide else 1)
    product = grad.nbytes if is_wide else 0  # of the output and its gradient, gone when the rest is taken
    copied = 0 if grad.is_contiguous() else grad.nbytes
    return copied + deltas + max(num_heads * per_head, product)


def _blocks(length: int, size: int = BLOCK_TOKENS) -> int:
    return -(-length // size)


def _parts(q: torch.Tensor, k: torch.Tensor) -> int:
    """How many of the batch a row makes: its kv heads, where several heads share one."""
    return 1 if q.shape[1] == k.shape[1] else k.shape[1]


def _fold(t: torch.Tensor, parts: int) -> torch.Tensor:
    """``[batch, heads, tokens, size]`` as ``[batch x parts, tokens, heads / parts, size]``; of one row a view."""
    return t.unflatten(1, (parts, -1)).transpose(2, 3).flatten(0, 1)


def _folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = _parts(q, k)
    group = q.shape[1] // parts
    return _fold(q, parts), *(_fold(t, parts).expand(-1, -1, group, -1) for t in (k, v))  # type: ignore[return-value]


def _unfold(t: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The way back; in memory as the layer wants it next, tokens before heads."""
    return t.unflatten(0, (num_rows, -1)).transpose(1, 2).flatten(2, 3).transpose(1, 2)


def _mask(
    q: torch.Tensor, k: torch.Tensor, folded: torch.Tensor, sight: Sight, scores: Scores
) -> tuple[torch.Tensor | None, int]:
    """A mask ``[batch x parts, heads / parts, queries, keys]``, one for all heads, and the kind of the built-in one."""
    if sight is not Sight.WINDOW:
        return None, EVERYTHING if sight is Sight.ALL else FROM_BOTTOM_RIGHT
    num_queries, num_keys = q.shape[2], k.shape[2]
    room = q.new_zeros(num_queries, -(-num_keys // MASK_TOKENS) * MASK_TOKENS)[:, :num_keys]
    seen = visible(num_queries, num_keys, sight, scores.window, q.device)
    return room.masked_fill_(~seen, -torch.inf).expand(folded.shape[0], folded.shape[2], -1, -1), EVERYTHING
