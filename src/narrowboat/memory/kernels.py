"""Attention of some queries to one stretch of keys: output and log-sum-exp forwards, three gradients backwards.

Kernels with one signature. ``Flash`` is PyTorch's own, on CPU and CUDA; it takes grouped heads as they are and never
holds the scores. ``Efficient`` (``efficient.py``) is what older cards have instead, and newer ones for float32.
``Blocks`` is plain PyTorch for what neither has (soft-capped scores, dropped weights, odd sizes of heads), a block of
keys at a time: at most ``BLOCK_BYTES`` of scores.

Log-sum-exps make stretches independent: outputs of several stretches are merged by them, and backward, given the
merged output and log-sum-exp, is exact for each stretch alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from narrowboat.machine.rates import Capability
from narrowboat.memory.efficient import Efficient, suits
from narrowboat.memory.layout import Sight
from narrowboat.memory.scores import Gradients, Scores, visible
from narrowboat.owner.values import card_of

BLOCK_BYTES = 32 * 2**20

FLASH_CARDS: Capability = (8, 0)
"""From which compute capability on a card has flash."""


class Kernel(Protocol):
    """Attention to one stretch of keys."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp. CAUSAL and WINDOW: the last query sits on the last key."""

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
        """Gradients for q, k and v, given the output and log-sum-exp of all stretches together."""


def kernel_for(q: torch.Tensor, v: torch.Tensor, scores: Scores) -> Kernel:
    """The fastest kernel that can do it, on this device or on the card that a forecast is of."""
    card, same_size = card_of(q), q.shape[-1] == v.shape[-1]
    if scores.softcap is not None or scores.drops is not None:
        return Blocks()
    if card is None:
        return FlashCPU() if q.device.type == "cpu" and same_size else Blocks()
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    if card >= FLASH_CARDS and fits and same_size:
        return FlashCUDA()
    return Efficient() if suits(q, v, card) else Blocks()


class FlashCPU:
    """PyTorch's flash attention for CPUs; its causal mask is aligned top left, so a window goes in as a mask."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        mask = self._mask(q, k, sight, scores)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, sight is Sight.CAUSAL, attn_mask=mask, scale=scores.scale
        )

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
        mask = self._mask(q, k, sight, scores)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, sight is Sight.CAUSAL, attn_mask=mask, scale=scores.scale
        )

    @staticmethod
    def _mask(q: torch.Tensor, k: torch.Tensor, sight: Sight, scores: Scores) -> torch.Tensor | None:
        if sight is not Sight.WINDOW:
            return None
        seen = visible(q.shape[2], k.shape[2], sight, scores.window, q.device)
        return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)[None, None]


class FlashCUDA:
    """FlashAttention-2 as PyTorch carries it; causal masks are aligned bottom right and windows are its own."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, sight is not Sight.ALL, False,
            scale=scores.scale, **self._window(sight, scores),
        )  # fmt: skip
        return out.transpose(1, 2), lse

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
        grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        random = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout is 0, so it is not read
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, sight is not Sight.ALL,
            random, random[0], scale=scores.scale, **self._window(sight, scores),
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @staticmethod
    def _window(sight: Sight, scores: Scores) -> dict[str, int]:
        if sight is not Sight.WINDOW or scores.window is None:
            return {}
        return {"window_size_left": scores.window - 1, "window_size_right": 0}


class Blocks:
    """Plain PyTorch, a block of keys at a time, scores in fp32 or better."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        q5 = self._grouped(q, k)  # [batch, kv heads, group, queries, size]
        out = q5.new_zeros(*q5.shape[:-1], v.shape[-1])
        lse = q5.new_full(q5.shape[:-1], -torch.inf)
        for start, stop in self._blocks(q, k):
            s, _ = self._scores(q5, k, start, stop, sight, scores)
            block_lse = s.logsumexp(-1)
            total = torch.logaddexp(lse, block_lse)
            seen = torch.where(total == -torch.inf, 0.0, total)  # a query that sees nothing yet
            out.mul_(torch.exp(lse - seen)[..., None])
            p = torch.exp(s - seen[..., None])
            if scores.drops is not None:
                p *= self._kept(q5, start, stop, scores)
            out += p @ v[:, :, None, start:stop].to(s.dtype)
            lse = total
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

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
        q5, g5, lse5 = self._grouped(q, k), self._grouped(grad, k), self._grouped(lse[..., None], k)
        delta = (g5 * self._grouped(out, k)).sum(-1, keepdim=True)
        dq = torch.zeros_like(q5)
        dk = k.new_zeros(k.shape, dtype=q5.dtype)
        dv = v.new_zeros(v.shape, dtype=q5.dtype)
        for start, stop in self._blocks(q, k):
            s, slope = self._scores(q5, k, start, stop, sight, scores)
            p = torch.exp(s - lse5)
            dp = g5 @ v[:, :, None, start:stop].to(p.dtype).transpose(-1, -2)
            used = p
            if scores.drops is not None:
                kept = self._kept(q5, start, stop, scores)
                used, dp = p * kept, dp * kept
            dv[:, :, start:stop] = (used.transpose(-1, -2) @ g5).sum(2)
            ds = p * (dp - delta)
            if slope is not None:
                ds *= slope
            ds *= scores.scale
            dq += ds @ k[:, :, None, start:stop].to(p.dtype)
            dk[:, :, start:stop] = (ds.transpose(-1, -2) @ q5).sum(2)
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _grouped(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if t.dtype == torch.float64 else torch.float32
        return t.unflatten(1, (k.shape[1], -1)).to(wide)

    @staticmethod
    def _kept(q5: torch.Tensor, start: int, stop: int, scores: Scores) -> torch.Tensor:
        heads = q5.shape[1:3]
        return scores.kept(heads[0] * heads[1], q5.shape[3], start, stop, q5).unflatten(1, heads)

    @staticmethod
    def _blocks(q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
        per_key = 4 * q.shape[0] * q.shape[1] * q.shape[2]
        size = max(16, BLOCK_BYTES // per_key)
        return [(start, min(start + size, k.shape[2])) for start in range(0, k.shape[2], size)]

    @staticmethod
    def _scores(
        q5: torch.Tensor, k: torch.Tensor, start: int, stop: int, sight: Sight, scores: Scores
    ) -> tuple[torch.Tensor, Any]:
        """``[batch, kv heads, group, queries, keys]`` scores and, under a soft cap, their slope."""
        s = q5 @ k[:, :, None, start:stop].to(q5.dtype).transpose(-1, -2) * scores.scale
        slope = None
        if scores.softcap is not None:
            s = torch.tanh(s / scores.softcap)
            slope = 1 - s * s
            s = s * scores.softcap
        if sight is not Sight.ALL:
            seen = visible(q5.shape[3], k.shape[2], sight, scores.window, q5.device)[:, start:stop]
            s = s.masked_fill(~seen, -torch.inf)
        return s, slope
